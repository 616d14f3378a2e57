"""What do copies of hot prefixes bring (`--replicate-hot-prefixes`)?

`python -m benchmarks.hot_prefixes virtual` runs replicas in virtual time, with steps of 4 ms and 0.4 ms for each token, and KV
of a block of 16 tokens in 0.2 ms; `... local` runs engines of the embedded model as processes. Each request is a system prompt
that all share and tokens of its own; a fifth of them go on with a conversation. Another system prompt takes the place of the
first one again and again. Arrivals are a Poisson process. `--output FILE` keeps the table as JSON lines, behind what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster_costs import OtherPrograms
from cloister.cluster import ReplicaSet
from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import run_virtually
from cloister.cluster.virtual.prediction import ClusterShape, running_cluster
from cloister.engine.replica_snapshot import Role
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.events import Ended, Event
from cloister.types.request import Request, SamplingParams, SequenceOutput

LOOK_EVERY_S: Final = 0.1
GO_ON: Final = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """A workload.

    Attributes:
        rate: requests a second.
        change_s: seconds until another system prompt takes the place of the last one.
        vocabulary: token ids are below it.
    """

    rate: float
    seconds: float
    change_s: float
    system: int
    own: int
    answer: int
    vocabulary: int = 256


@dataclass(slots=True)
class Sent:
    """A request, and when its first token came."""

    request: Request
    at_s: float
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed: seconds to the first token, share of prompt tokens that were cached, the mean over time of the most
    requests of a replica beyond the mean of all, the copies that were made, and the share of this machine's cores that other
    programs took."""

    ttfts_s: list[float]
    cached: float
    skew: float
    num_copies: int
    others: float


def make_requests(load: Load, seed: int) -> list[Sent]:
    """Returns requests with their times."""
    sent: list[Sent] = []
    draw, now = random.Random(seed), 0.0
    systems = [
        [draw.randrange(load.vocabulary) for _ in range(load.system)] for _ in range(int(load.seconds / load.change_s) + 1)
    ]
    last: dict[int, list[int]] = {}
    while (now := now + draw.expovariate(load.rate)) < load.seconds:
        number = int(now / load.change_s)
        before = last.get(number, systems[number]) if draw.random() < GO_ON else systems[number]
        token_ids = [*before, *(draw.randrange(load.vocabulary) for _ in range(load.own))]
        if len(token_ids) < load.system + 3 * load.own:
            last[number] = token_ids
        sampling = SamplingParams(max_tokens=draw.randint(1, 2 * load.answer), temperature=0.0, ignore_eos=True)
        sent.append(Sent(Request(request_id=f"{seed}-{len(sent)}", token_ids=token_ids, sampling=sampling), now))
    return sent


async def drive(cluster: ReplicaSet, sent: Sequence[Sent]) -> Outcome:
    """Sends all requests in time."""
    loop, cached = asyncio.get_running_loop(), Counter[str]()
    start_s, skews = loop.time(), []

    def observe(event: Event) -> None:
        if isinstance(event, Ended):
            cached["found"] += event.num_cached_tokens
            cached["all"] += event.num_prompt_tokens

    async def follow(one: Sent) -> None:
        await asyncio.sleep(start_s + one.at_s - loop.time())
        begun_s = loop.time()

        def take(output: SequenceOutput) -> None:
            if output.token_ids and one.ttft_s is None:
                one.ttft_s = loop.time() - begun_s

        await cluster.follow(one.request, take)

    async def look() -> None:
        while True:
            counts = [replica.num_requests for replica in cluster.snapshots()]
            if any(counts):
                skews.append(max(counts) - statistics.fmean(counts))
            await asyncio.sleep(LOOK_EVERY_S)

    others = OtherPrograms(cluster)
    cluster.subscribe(observe)
    looking = asyncio.create_task(look())
    await asyncio.gather(*(follow(one) for one in sent))
    looking.cancel()
    num_copies = sum(replica.num_prefix_copies for replica in cluster.snapshots())
    ttfts_s = [one.ttft_s for one in sent if one.ttft_s is not None]
    assert len(ttfts_s) == len(sent), "a request was lost"
    return Outcome(ttfts_s, cached["found"] / max(1, cached["all"]), statistics.fmean(skews), num_copies, others.share())


def run_virtual(num_replicas: int, router: str, load: Load, seed: int, *, copies: bool) -> Outcome:
    """Runs a workload in virtual time."""
    engine = EngineShape(
        num_blocks=2048, block_size=16, max_num_seqs=16, max_waiting=100_000, max_model_len=4096, max_batched_tokens=256,
        step_s=0.004, token_s=0.0004,
    )  # fmt: skip
    roles: list[Role] = ["mixed"] * num_replicas
    shape = ClusterShape(engine, router, tuple(roles), delay_s=0.0002, moves_kv=True, entry_s=0.0002, copies_prefixes=copies)

    async def run() -> Outcome:
        async with running_cluster(shape, open_tokenizer(), seed) as cluster:
            return await drive(cluster, make_requests(load, seed))

    return run_virtually(run())


async def run_local(num_replicas: int, router: str, load: Load, seed: int, *, copies: bool) -> Outcome:
    """Runs a workload on processes of this machine."""
    settings = resolve_settings(
        {
            "model": "cloister-5m", "replicas": num_replicas, "router": router, "num_threads": 1, "block_size": 16,
            "kv_transfer": "unix", "replicate_hot_prefixes": copies, "max_waiting": 10_000,
        }
    )  # fmt: skip
    cluster = make_engine(settings.engine.config, settings.server.config)
    assert isinstance(cluster, ReplicaSet)
    await cluster.start()
    try:
        return await drive(cluster, make_requests(load, seed))
    finally:
        await cluster.drain(0.0)


def summarise(where: str, num_replicas: int, router: str, copies: bool, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns a row of the table."""
    ttfts_s = sorted(ttft_s for outcome in outcomes for ttft_s in outcome.ttfts_s)
    p50, p99 = (1000 * ttfts_s[int(share * len(ttfts_s))] for share in (0.5, 0.99))
    cached, skew, others = (
        statistics.fmean(values) for values in zip(*((o.cached, o.skew, o.others) for o in outcomes), strict=True)
    )
    return {
        "where": where, "replicas": num_replicas, "router": router, "copies": "on" if copies else "off",
        "cached": f"{cached:.1%}", "TTFT P50, ms": round(p50), "P99, ms": round(p99), "skew": round(skew, 2),
        "copies made": sum(outcome.num_copies for outcome in outcomes), "requests": len(ttfts_s),
        "other programs": f"{others:.0%}" if where == "local" else "-",
    }  # fmt: skip


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", choices=("virtual", "local"))
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--routers", nargs="+", default=["prefix_aware", "least_load", "conductor"])
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second for each replica")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--change-s", type=float, default=20.0)
    parser.add_argument("--system", type=int, default=512)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="file of JSON lines to which the rows are added")
    given = parser.parse_args()
    for num_replicas in given.replicas:
        load = Load(given.rate * num_replicas, given.seconds, given.change_s, given.system, given.own, given.answer)
        for router in given.routers:
            for copies in (False, True):
                outcomes = []
                for seed in given.seeds:
                    if given.where == "virtual":
                        outcomes.append(run_virtual(num_replicas, router, load, seed, copies=copies))
                    else:
                        own = replace(load, vocabulary=3000)
                        outcomes.append(asyncio.run(run_local(num_replicas, router, own, seed, copies=copies)))
                row = summarise(given.where, num_replicas, router, copies, outcomes)
                print(row, flush=True)
                if given.output is not None:
                    with given.output.open("a") as file:
                        file.write(json.dumps(row | {"load": asdict(load), "seeds": given.seeds}) + "\n")


if __name__ == "__main__":
    main()
