"""Conversations ten times as large as the device's KV memory: time to the first token of later turns, with a KV tier and
without; and what a tier costs where nothing is ever used again.

    python -m benchmarks.kv_tiers [--model MODEL] [--quant FORMAT] [--conversations N] [--turns N] [--tokens N]
    python -m benchmarks.kv_tiers --trace mooncake [--requests N]

Engine processes of one thread: without a tier, with one on disk, one in memory, both (memory for a fifth of the
conversations), and one whose device holds all of them. Each request is sent to each of them in turn, and all must give the same
tokens. The disk's file is in the page cache as far as there is memory for it.

Conversations are drawn, and continue with the answers; or they are whole ones of the Mooncake trace in its order, lengths
scaled. There a later turn is a request whose conversation came before: its first two blocks of the trace are another one's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction

from benchmarks.cluster_traces import sample_conversations
from benchmarks.harness import MOONCAKE, Bench, make_parser
from benchmarks.models import MODELS, find_model
from cloister.bench.traces import read_trace
from cloister.bench.workloads import Recipe, build_workload
from cloister.engine.transports import ProcessTransport
from cloister.launch.processes import ENGINE_ENTRY
from cloister.types.config import EngineConfig
from cloister.types.events import Ended, KVLoaded, Outputs, Progressed, Scheduled, Stepped, Submit
from cloister.types.request import Request, SamplingParams

TURN_TOKENS, ANSWER_TOKENS = 60, 16
"""Tokens of each message after the first, and of each answer."""
TIMEOUT_S = 300.0
TRACE_SCALE, TRACE_LEN = Fraction(1, 16), 2048
"""Factor on the trace's lengths, and the longest request of it in tokens."""


@dataclass(frozen=True)
class Turn:
    """A request of the trace.

    Attributes:
        is_later: its conversation came before.
    """

    prompt: list[int]
    is_later: bool


@dataclass
class TimedEngine:
    """An engine process, and what it said."""

    config: EngineConfig
    transport: ProcessTransport = field(default_factory=lambda: ProcessTransport(ENGINE_ENTRY))
    first_s: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    loads: list[KVLoaded] = field(default_factory=list)
    stored_bytes: int = 0

    def deliver(self, message: Outputs) -> None:
        now = time.perf_counter()
        for event in message.events:
            match event:
                case Progressed(request_id=name):
                    self.first_s.setdefault(name, now)
                case Scheduled(request_id=name):
                    self.cached[name] = event.num_cached_tokens
                case Ended(request_id=name):
                    self.ended.add(name)
                case KVLoaded():
                    self.loads.append(event)
                case Stepped(stored=stored):
                    self.stored_bytes += sum(tier.num_bytes for tier in stored)
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    async def answer(self, name: str, token_ids: list[int]) -> tuple[float, float]:
        """Returns (time to the first token, time to the last one)."""
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        sent_s = time.perf_counter()
        self.transport.send(Submit(Request(request_id=name, token_ids=token_ids, sampling=sampling), 0))
        while name not in self.ended:
            if time.perf_counter() - sent_s > TIMEOUT_S:
                raise TimeoutError("an engine does not answer")
            await asyncio.sleep(0.0003)
        return self.first_s[name] - sent_s, time.perf_counter() - sent_s


async def ask_all(engines: dict[str, TimedEngine], number: int, name: str, prompt: list[int]) -> dict[str, float]:
    """Sends a request to each engine, another one first each time; returns the times to the first token."""
    names, times = list(engines), {}
    shift = number % len(names)
    for kind in names[shift:] + names[:shift]:
        times[kind], _ = await engines[kind].answer(name, prompt)
    assert len({tuple(engine.tokens[name]) for engine in engines.values()}) == 1, "a tier changed an answer"
    return times


def read_turns(options: argparse.Namespace, vocab_size: int) -> list[Turn]:
    """Returns whole conversations of the Mooncake trace, their requests in its order."""
    trace = read_trace(options.traces / MOONCAKE)
    fitting = [row for row in trace.rows if TRACE_SCALE * (row.num_input_tokens + row.num_output_tokens) <= TRACE_LEN]
    rows = sample_conversations(fitting, options.requests, options.seed)
    recipe = Recipe(scale=TRACE_SCALE, vocab_size=min(vocab_size, 2048), seed=options.seed)
    turns, begun = [], set[int]()
    for row, item in zip(rows, build_workload(replace(trace, rows=tuple(rows)), recipe).items, strict=True):
        assert isinstance(item.prompt, list)
        second = row.hash_ids[1] if len(row.hash_ids) > 1 else None
        turns.append(Turn(item.prompt[: TRACE_LEN - ANSWER_TOKENS], second in begun))
        if second is not None:
            begun.add(second)
    return turns


def count_distinct(turns: Sequence[Turn], block_size: int) -> int:
    """Returns the tokens of the prompts, each block counted once for all prompts that begin alike."""
    blocks = {
        hash(tuple(turn.prompt[: end + block_size]))
        for turn in turns
        for end in range(0, len(turn.prompt) - block_size + 1, block_size)
    }
    return len(blocks) * block_size


async def replay(engines: dict[str, TimedEngine], turns: Sequence[Turn]) -> dict[str, list[float]]:
    """Returns the times to the first tokens of later turns, by engine."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number, turn in enumerate(turns):
        taken = await ask_all(engines, number, f"{number}.{int(turn.is_later)}", turn.prompt)
        if turn.is_later:
            for kind, first_s in taken.items():
                times[kind].append(first_s)
    return times


async def converse(
    engines: dict[str, TimedEngine], options: argparse.Namespace, vocab_size: int
) -> tuple[dict[str, list[float]], int]:
    """Returns the times to the first tokens of later turns, by engine, and the tokens of a whole conversation."""
    draw = random.Random(1)
    histories = [[draw.randrange(10, vocab_size) for _ in range(options.tokens)] for _ in range(options.conversations)]
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.turns):
        for number, history in enumerate(histories):
            name = f"{number}.{turn}"
            taken = await ask_all(engines, number + turn, name, history)
            if turn:
                for kind, first_s in taken.items():
                    times[kind].append(first_s)
            answer = next(iter(engines.values())).tokens[name]
            history += [*answer, *(draw.randrange(10, vocab_size) for _ in range(TURN_TOKENS))]
    return times, len(histories[0])


def show_turns(bench: Bench, what: str, engines: dict[str, TimedEngine], times: dict[str, list[float]]) -> None:
    """Prints what later turns take."""
    rows = []
    for kind, engine in engines.items():
        later = sorted(times[kind])
        cached = sum(num for name, num in engine.cached.items() if not name.endswith(".0"))
        ratios = [mine / other for mine, other in zip(times[kind], times["none"], strict=True)]
        p50_ms, p90_ms = 1e3 * statistics.median(later), 1e3 * later[len(later) * 9 // 10]
        rows.append((kind, p50_ms, p90_ms, statistics.median(ratios), cached, *count_stored(engine)))
    headers = ("tier", "TTFT P50, ms", "TTFT P90, ms", "to none, median", "tokens cached", *STORED)
    bench.print_rows(f"{what}, all the same answers", headers, rows)


@asynccontextmanager
async def running(engines: Sequence[TimedEngine]) -> AsyncIterator[None]:
    """Starts engines, takes what they say, and ends them."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.transport.close)
            await engine.transport.open(engine.config)
        for engine in engines:
            stack.callback(asyncio.create_task(engine.transport.run(engine.deliver)).cancel)
        yield


STORED = "stored, MiB", "loads", "a load, MiB", "a load, ms"


def describe(engine: TimedEngine) -> str:
    """Returns what an engine stored and loaded."""
    stored_mb, num_loads, load_mb, load_ms = count_stored(engine)
    if not num_loads:
        return f"{stored_mb:.0f} MiB stored"
    speed = f"{load_mb * 2**20 / load_ms / 1e6:.2f} GB/s"
    return f"{stored_mb:.0f} MiB stored, {num_loads} loads of {load_mb:.1f} MiB and {load_ms:.1f} ms, {speed}"


def count_stored(engine: TimedEngine) -> tuple[float, int, float, float]:
    """Returns what an engine stored and loaded, as in `STORED`."""
    num_loads = len(engine.loads)
    num_bytes, load_s = sum(event.num_bytes for event in engine.loads), sum(event.elapsed_s for event in engine.loads)
    each = max(1, num_loads)
    return engine.stored_bytes / 2**20, num_loads, num_bytes / 2**20 / each, 1e3 * load_s / each


async def waste(bench: Bench, engines: dict[str, TimedEngine], num_requests: int, num_tokens: int, vocab_size: int) -> None:
    """Measures prompts of which none comes again, while the device is full."""
    draw = random.Random(2)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(num_requests):
        prompt = [draw.randrange(10, vocab_size) for _ in range(num_tokens)]
        names = list(engines)
        for kind in names[number % len(names) :] + names[: number % len(names)]:
            _, whole_s = await engines[kind].answer(f"once {number}", prompt)
            times[kind].append(whole_s)
    rows = []
    for kind in times:
        ratios = [mine / other for mine, other in zip(times[kind], times["none"], strict=True)][num_requests // 2 :]
        whole_s = statistics.median(times[kind][num_requests // 2 :])
        rows.append((kind, 1e3 * whole_s, statistics.median(ratios), *count_stored(engines[kind])))
    bench.print_rows(
        f"{num_requests} prompts that come once, the second half", ("tier", "request, ms", "to none, median", *STORED), rows
    )


async def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Measures all."""
    model = str(find_model(options.model)) if options.model in MODELS else options.model
    is_drawn = options.trace is None
    longest = options.tokens + options.turns * (TURN_TOKENS + ANSWER_TOKENS) if is_drawn else TRACE_LEN
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        base = EngineConfig(
            model=model,
            quant=options.quant,
            num_threads=1,
            prefix_cache=True,
            max_model_len=longest,
            max_num_seqs=2,
            weights_cache="",
        )
        probe = TimedEngine(base)
        await probe.transport.open(base)
        assert probe.transport.ready is not None
        memory, vocab_size = dict(probe.transport.ready.memory), probe.transport.ready.model.vocab_size
        await probe.transport.close()
        token_bytes = memory["KV cache"] / (2 * -(-longest // base.block_size) * base.block_size)
        turns = [] if is_drawn else read_turns(options, vocab_size)
        num_tokens = options.conversations * longest if is_drawn else count_distinct(turns, base.block_size)
        needed_mb = num_tokens * token_bytes / 2**20
        disk = f"disk:{directory},8G"
        settings = {"none": None, "disk": disk, "host": "host:1G", "both": f"host:{needed_mb / 5:.1f}M+{disk}"}
        engines = {}
        for kind in (*settings, "all"):
            kv_mb = needed_mb / 10 if kind != "all" else 1.2 * needed_mb
            engines[kind] = TimedEngine(replace(base, kv_memory_mb=kv_mb, kv_tier=settings.get(kind)))
        async with running([*engines.values()]):
            print(f"{options.model} {options.quant}: {token_bytes / 1024:.1f} KiB of KV a token,"
                  f" {needed_mb:.0f} MiB in all, {needed_mb / 10:.0f} MiB on the device")  # fmt: skip
            bench.figures["KV"] = {"a token, KiB": token_bytes / 1024, "all, MiB": needed_mb, "device, MiB": needed_mb / 10}
            if is_drawn:
                times, longest = await converse(engines, options, vocab_size)
                what = f"turns 2 to {options.turns} of {options.conversations} conversations, up to {longest} tokens"
            else:
                times = await replay(engines, turns)
                num_later = sum(turn.is_later for turn in turns)
                what = (
                    f"{num_later} later turns among {len(turns)} requests of the Mooncake trace, {num_tokens} distinct tokens"
                )
            show_turns(bench, what, engines, times)
            p50_s = {kind: statistics.median(taken) for kind, taken in times.items()}
            for kind in settings:
                if kind != "none":
                    bench.check(f"{kind}: TTFT P50 of later turns, over recompute", p50_s[kind] / p50_s["none"], high=1.0)
            del engines["all"]
            if options.once:
                await waste(bench, engines, options.once, options.tokens, vocab_size)


def main() -> int:
    """Reads the arguments."""
    parser = make_parser(__doc__, traces=())
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600, help="of a conversation's first prompt")
    parser.add_argument("--trace", choices=("mooncake",), default=None, help="conversations of a trace; unset, drawn ones")
    parser.add_argument("--requests", type=int, default=200, help="of the trace, about: whole conversations")
    parser.add_argument("--once", type=int, default=400, help="prompts that come once; 0: none")
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    if options.trace is not None and not (options.traces / MOONCAKE).is_file():
        parser.error(f"no trace file at {options.traces / MOONCAKE}; name its folder with --traces")
    bench = Bench(
        "kv_tiers" if options.trace is None else f"kv_tiers_{options.trace}",
        "Later turns of conversations ten times as large as the device's KV memory",
        "with each tier the median later turn waits less for its first token than where it is computed",
    )
    load = os.getloadavg()
    asyncio.run(measure(options, bench))
    bench.figures["model"] = f"{options.model} {options.quant}"
    bench.figures["load average before, after"] = [load[0], os.getloadavg()[0]]
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
