"""Attacks on who shares a cache, with many samples: what a tenant learns of another by time, by eviction, by order of answers.

The literature attacks one cache for all users: Song et al. (arXiv 2409.20002) and Zheng et al. (arXiv 2411.18191) by the time
to the first token, Wu et al. (NDSS 2025) by the order of answers; Gu et al. (arXiv 2502.07776) found seven public services open
to it. Each attack runs against such a cache first, made of the same engine, so that what the attack can do is measured and not
believed; then inside one tenant, and across tenants. Times are of the processor and of the clock, in an order drawn at random.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Bench, make_parser, make_progress
from cloister.engine.kv_pool import KVPool
from cloister.trust.tokens import TokenSpentError, authorization
from cloister.types.scope import LOCAL_SCOPE
from tests.attack_lab import Answer, Lab
from tests.store_servers import DURABLE, PostgresServer, RedisServer, find_postgres
from tests.token_service import TokenService

LENGTH = 320
NUM_GUESSES = 10
NUM_THREADS = 32
BOUND = 0.55
NUM_BOOTSTRAPS = 2000

LITERATURE = [
    ("time to the first token", "Gu et al., arXiv 2502.07776", "caches shared by all users in seven public services"),
    ("time to the first token", "Zheng et al., arXiv 2411.18191", "hits told in 96.67% to 100% (quoted second-hand)"),
    ("time to the first token", "Song et al., arXiv 2409.20002", "prompts recovered token by token; no figure read"),
    ("order of answers", "Wu et al., NDSS 2025", "prompts recovered where the longest hit is served first; no figure read"),
]
"""What others report; a figure that was not read in the paper itself says so."""

Times = tuple[list[float], list[float]]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-pairs", type=int, default=1000, help="hits and misses of each timing attack")
    parser.add_argument("--num-tier-pairs", type=int, default=600, help="hits and misses of each attack on a KV tier")
    parser.add_argument("--num-floods", type=int, default=150, help="rounds of each eviction probe")
    parser.add_argument("--num-orders", type=int, default=300, help="batches of guesses")
    parser.add_argument("--tiers", default=",".join(TIERS), help="KV tiers that are attacked, with commas")
    parser.add_argument("--only-tiers", action="store_true", help="nothing else is attacked; figures go to attacks_tiers.json")
    options = parser.parse_args()
    bench = Bench(
        "attacks_tiers" if options.only_tiers else "attacks",
        "Attacks: prefix timing, evictions, order of answers, double spending",
        "one cache for all gives everything away (AUC near 1); across tenants a probe is worth a coin (AUC 0.5), and what it "
        "computes is the same to the token; a token is taken once",
    )
    bench.figures["length"] = LENGTH
    if options.only_tiers:
        time_tiers(bench, options.tiers.split(","), options.num_tier_pairs, options.seed)
        return bench.finish(options)
    bench.print_rows("What others report", ("attack", "source", "reported"), LITERATURE)
    time_prefixes(bench, options.num_pairs, options.seed)
    time_tiers(bench, options.tiers.split(","), options.num_tier_pairs, options.seed)
    probe_evictions(bench, options.num_floods, options.seed)
    order_answers(bench, options.num_orders, options.seed)
    spend_twice(bench)
    return bench.finish(options)


def time_prefixes(bench: Bench, num_pairs: int, seed: int) -> None:
    """The attacker sends a prompt that ann sent and one that nobody sent; the time to the first token shall not tell which."""
    lab = Lab("team", cache_scopes=2)
    arms: list[tuple[str, Callable[[str, Sequence[int]], Answer], str]] = [
        ("one cache for all", lambda who, prompt: lab.answer(lab.request(who, prompt, scope=LOCAL_SCOPE)), "bob"),
        ("inside one tenant", lab.ask, "ann"),
        ("across tenants", lab.ask, "bob"),
    ]
    rows: list[tuple[object, ...]] = []
    for name, ask, prober in arms:
        cpu, wall, found = _time_pairs(name, lab, ask, prober, num_pairs if prober == "bob" else num_pairs // 4, seed)
        value, low, high = auc_between(*cpu)
        wall_value, wall_low, wall_high = auc_between(*wall)
        ratio = float(np.median(cpu[1]) / np.median(cpu[0]))
        interval, wall_interval = f"{low:.3f} to {high:.3f}", f"{wall_low:.3f} to {wall_high:.3f}"
        rows.append((name, len(cpu[0]), found, ratio, value, interval, wall_value, wall_interval))
        if name == "across tenants":
            bench.check("prefix timing across tenants, AUC of processor time, either way", max(value, 1 - value), high=BOUND)
            bench.check(
                "prefix timing across tenants, AUC of clock time, either way", max(wall_value, 1 - wall_value), high=BOUND
            )
            bench.check("tokens found in another tenant's cache", found, low=0, high=0)
        else:
            bench.check(f"prefix timing, {name}, AUC of processor time", value, low=0.95)
    headers = ("prefix timing", "pairs", "found", "miss / hit", "AUC, CPU", "95%, CPU", "AUC, clock", "95%, clock")
    bench.print_rows("Hit or miss by the time to the first token", headers, rows)


def _time_pairs(
    name: str, lab: Lab, ask: Callable[[str, Sequence[int]], Answer], prober: str, num_pairs: int, seed: int
) -> tuple[Times, Times, int]:
    order = random.Random(seed)
    cpu: Times = ([], [])
    wall: Times = ([], [])
    found = 0
    with make_progress() as progress:
        for _ in progress.track(range(num_pairs), description=name):
            secret, other = lab.prompt(LENGTH), lab.prompt(LENGTH)
            ask("ann", secret)
            probes = [(0, secret), (1, other)]
            order.shuffle(probes)
            for which, prompt in probes:
                answer = ask(prober, prompt)
                cpu[which].append(answer.cpu_s)
                wall[which].append(answer.wall_s)
                found += answer.num_cached
    return cpu, wall, found


@dataclass(frozen=True)
class Tier:
    """Where ann's prompts are when somebody probes.

    Attributes:
        setting: `kv_tier`, with {} for a directory; None: only the device.
        part_mb: memory of each of two replicas in a pool; 0: there is one replica.
        elsewhere: probes are sent to the other replica.
        profile: that allows it.
    """

    setting: str | None
    part_mb: int = 0
    elsewhere: bool = False
    profile: str = "team"


TIERS = {
    "none": Tier(None),
    "host": Tier("host:64M"),
    "disk": Tier("disk:{},64M"),
    "both": Tier("host:8M+disk:{},64M"),
    "shared": Tier("shared:64M", 64, elsewhere=True),
    "peer": Tier("peer:40M", 40, profile="open"),
}
"""The device has room for two batches of secrets, `both` for less in its own memory. `shared`: ann's prompts went to another
replica than the probes. `peer`: what probes push out of the engine's own part goes to memory that the other one lends, so
prompts that are probed late lie there."""
PROBERS = (("own", "ann", None, 4), ("another key", "bob", None, 1), ("another salt", "ann", "s", 1))
"""Name, who asks, with which `cache_salt`, and the part of the samples."""
NUM_SECRETS = 20
"""Prompts that ann sends before somebody probes."""


@contextmanager
def open_labs(tier: Tier) -> Iterator[list[Lab]]:
    """The replicas of a server with a tier; the first one gets ann's prompts."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        setting = None if tier.setting is None else tier.setting.format(directory)
        pool = KVPool(tier.part_mb * 2**20, 2) if tier.part_mb else None
        labs: list[Lab] = []
        for _ in range(2 if pool else 1):
            beside = labs[0] if labs else None
            labs.append(
                Lab(
                    tier.profile,
                    kv_memory_mb=8,
                    cache_scopes=2,
                    max_model_len=1024,
                    tiers=setting,
                    pool=pool,
                    beside=beside,
                )
            )
            stack.callback(labs[-1].close)
        yield labs


def time_tiers(bench: Bench, names: Sequence[str], num_pairs: int, seed: int) -> None:
    """Ann sends prompts, and her own next ones push them into the tiers. Then somebody sends them, and as many that nobody
    sent: bob with his key, ann with another `cache_salt`, and ann as before, which shows what the probe can see."""
    rows: list[tuple[object, ...]] = []
    for tier in names:
        for name, prober, salt, part in PROBERS:
            with open_labs(TIERS[tier]) as labs:
                probed, what = labs[-1 if TIERS[tier].elsewhere else 0], f"{tier}, {name}"
                cpu, wall, cached, num_loads = _probe_tiers(what, labs, probed, prober, salt, num_pairs // part, seed)
            value, low, high = auc_between(*cpu)
            wall_value, wall_low, wall_high = auc_between(*wall)
            told = _auc(np.negative(cached[0]), np.negative(cached[1]))
            interval, wall_interval = f"{low:.3f} to {high:.3f}", f"{wall_low:.3f} to {wall_high:.3f}"
            rows.append((tier, name, len(cpu[0]), sum(cached[0]), num_loads, told, value, interval, wall_value, wall_interval))
            if name == "own":
                if tier != "none":
                    bench.check(f"tier {tier}, one's own prompts, AUC of cached_tokens", told, low=0.95)
                continue
            bench.check(f"tier {tier}, {name}: AUC of cached_tokens, either way", max(told, 1 - told), high=BOUND)
            bench.check(f"tier {tier}, {name}: loads", num_loads, low=0, high=0)
            bench.check(f"tier {tier}, {name}: AUC of processor time, either way", max(value, 1 - value), high=BOUND)
            bench.check(f"tier {tier}, {name}: AUC of clock time, either way", max(wall_value, 1 - wall_value), high=BOUND)
    headers = ("tier", "prober", "pairs", "found", "loads", "AUC, cached", "AUC, CPU", "95%, CPU", "AUC, clock", "95%, clock")
    bench.print_rows("Whether somebody sent a prompt, through KV tiers", headers, rows)


def _probe_tiers(
    name: str, labs: Sequence[Lab], probed: Lab, prober: str, salt: str | None, num_pairs: int, seed: int
) -> tuple[Times, Times, tuple[list[int], list[int]], int]:
    """Returns processor times, clock times and cached tokens of prompts that ann sent and of others, and all loads."""
    order = random.Random(seed)
    cpu: Times = ([], [])
    wall: Times = ([], [])
    cached: tuple[list[int], list[int]] = ([], [])
    stored, num_loads = labs[0], 0
    with make_progress() as progress:
        for _ in progress.track(range(num_pairs // NUM_SECRETS), description=name):
            probes = [(0, probed.prompt(LENGTH)) for _ in range(NUM_SECRETS)]
            for _, secret in probes:
                stored.ask("ann", secret)
            stored.flood("ann", stored.num_kv_tokens)
            for lab in labs:
                if lab.tiers is not None:
                    lab.wait_for_tiers()
                lab.rest()
            probes += [(1, probed.prompt(LENGTH)) for _ in range(NUM_SECRETS)]
            order.shuffle(probes)
            for which, prompt in probes:
                answer = probed.answer(probed.request(prober, prompt, salt=salt))
                cpu[which].append(answer.cpu_s)
                wall[which].append(answer.wall_s)
                cached[which].append(answer.num_cached)
                num_loads += answer.num_loads
    return cpu, wall, cached, num_loads


def probe_evictions(bench: Bench, num_rounds: int, seed: int) -> None:
    """Ann probes her own prefix; whether bob was busy in between shall not show.

    What is judged is what she finds. The time of a hit shows a busy machine all the same: a flood leaves the processor's caches
    cold, her own blocks in them too. The last probe sends another prompt of her own first, which warms what the model needs.
    """
    rows: list[tuple[object, ...]] = []
    for name, profile, scopes, warms_up in (
        ("one cache for all", "open", 0, False),
        ("a share for each tenant", "team", 2, False),
        ("a share for each tenant, after a prompt of her own", "team", 2, True),
    ):
        lab = Lab(profile, kv_memory_mb=8, cache_scopes=scopes, max_model_len=1024)
        order = random.Random(seed)
        times: Times = ([], [])
        cached: tuple[set[int], set[int]] = (set(), set())
        with make_progress() as progress:
            for _ in progress.track(range(num_rounds), description=name):
                prompt = lab.prompt(LENGTH)
                lab.ask("ann", prompt)
                is_busy = order.random() < 0.5
                for _ in range(lab.num_kv_tokens // 500 + 2 if is_busy else 0):
                    lab.ask("bob", lab.prompt(500))
                if warms_up:
                    lab.ask("ann", lab.prompt(500))
                answer = lab.ask("ann", prompt)
                times[is_busy].append(answer.cpu_s)
                cached[is_busy].add(answer.num_cached)
        value, low, high = auc_between(*times)
        rows.append((name, num_rounds, str(sorted(cached[0])), str(sorted(cached[1])), value, f"{low:.3f} to {high:.3f}"))
        if not scopes:
            bench.check("eviction probe on one cache for all, AUC of processor time", value, low=0.95)
            continue
        bench.check_true(
            f"{name}: as many tokens found after a flood as without", cached[0] == cached[1] and len(cached[0]) == 1
        )
    headers = ("eviction probe", "rounds", "found, quiet", "found, flooded", "AUC, processor", "95%")
    bench.print_rows("Was somebody else busy, by one's own hit", headers, rows)


def order_answers(bench: Bench, num_batches: int, seed: int) -> None:
    """Bob sends guesses at once, one of them right; the first answer shall be the right one's no more often than by chance."""
    rows: list[tuple[object, ...]] = []
    for name, is_shared in (("one cache for all", True), ("across tenants", False)):
        lab = Lab("team", cache_scopes=2, max_batched_tokens=256)
        scope = LOCAL_SCOPE if is_shared else None
        order, num_found = random.Random(seed), 0
        with make_progress() as progress:
            for _ in progress.track(range(num_batches), description=name):
                secret = lab.prompt(LENGTH)
                lab.answer(lab.request("ann", secret, scope=scope))
                guesses = [secret, *(lab.prompt(LENGTH) for _ in range(NUM_GUESSES - 1))]
                requests = [lab.request("bob", guess, scope=scope) for guess in guesses]
                sent = requests.copy()
                order.shuffle(sent)
                num_found += lab.order(sent)[0] == requests[0].request_id
        rows.append((name, num_batches, num_found / num_batches, 1 / NUM_GUESSES))
        if not is_shared:
            deviation = 3 * (0.1 * 0.9 / num_batches) ** 0.5
            bench.check("right guesses first, across tenants", num_found / num_batches, high=1 / NUM_GUESSES + deviation)
    bench.print_rows("Is the first answer the right guess's", ("order of answers", "batches", "right", "by chance"), rows)


def spend_twice(bench: Bench, num_tokens: int = 200) -> None:
    """32 threads spend the same tokens at once, at every kind of store whose server is installed."""
    rows: list[tuple[object, ...]] = []
    with TemporaryDirectory() as directory, ExitStack() as stack:
        Path(directory).chmod(0o755)
        for name, url in _open_stores(Path(directory), stack):
            service = TokenService(Path(directory) / name, store_url=url)
            tokens = [authorization(token) for _ in range(num_tokens // 100) for token in service.buy(100)]
            began_s = time.perf_counter()
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                num_taken = sum(pool.map(_spend_all, repeat(service, NUM_THREADS), repeat(tokens)))
            elapsed_s = time.perf_counter() - began_s
            service.close()
            bench.check(
                f"{name}: tokens taken by 32 threads that spend the same ones", num_taken, low=num_tokens, high=num_tokens
            )
            rows.append((name, num_tokens, NUM_THREADS * num_tokens, num_taken, NUM_THREADS * num_tokens / elapsed_s))
    bench.print_rows("Double spending", ("store", "tokens", "tries", "taken", "tries a second"), rows)


def _open_stores(directory: Path, stack: ExitStack) -> Iterator[tuple[str, str | None]]:
    yield "sqlite", None
    if (programs := find_postgres()) is not None:
        postgres = PostgresServer(programs)
        stack.callback(postgres.kill)
        yield "postgres", postgres.url
    if shutil.which("redis-server") is not None:
        redis = RedisServer(directory / "redis-server", *DURABLE)
        stack.callback(redis.kill)
        yield "redis", redis.url


def _spend_all(service: TokenService, tokens: Sequence[str]) -> int:
    num_taken = 0
    for token in tokens:
        with suppress(TokenSpentError):
            service.redeemer.redeem(token)
            num_taken += 1
    return num_taken


def auc_between(faster: Sequence[float], slower: Sequence[float]) -> tuple[float, float, float]:
    """Returns how well a threshold tells two sets of times apart (Mann-Whitney), and the 95% interval of a bootstrap."""
    first, second = np.asarray(faster), np.asarray(slower)
    draw = np.random.default_rng(0)
    values = [_auc(draw.choice(first, len(first)), draw.choice(second, len(second))) for _ in range(NUM_BOOTSTRAPS)]
    low, high = np.quantile(values, [0.025, 0.975])
    return _auc(first, second), float(low), float(high)


def _auc(faster: npt.NDArray[np.float64], slower: npt.NDArray[np.float64]) -> float:
    ordered = np.sort(slower)
    below = np.searchsorted(ordered, faster, side="left")
    upto = np.searchsorted(ordered, faster, side="right")
    return float(1 - (below + upto).mean() / 2 / len(slower))


if __name__ == "__main__":
    sys.exit(main())
