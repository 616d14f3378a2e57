"""How much loads of KV from a tier slow down the decode of others.

    python -m benchmarks.kv_load_stalls [--model MODEL] [--tiers disk,host] [--rounds N] [--pauses-ms N,N]

One stream decodes while a second client sends prompts, one at a time, with a pause between. In turns: nothing else runs
(`alone`); the second client's prompts are on the device (`device`), come from the tier (`loads`), or are new (`computed`). Its
requests take steps of their own in every case, so loads are to be compared with `device`. Times are the engine's, processor
time is that of its process. The disk's file is in the page cache as far as there is memory for it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, make_parser
from benchmarks.kv_tiers import TIMEOUT_S, TimedEngine, running
from benchmarks.models import MODELS, find_model
from cloister.types.config import EngineConfig
from cloister.types.events import Outputs, Progressed, Submit
from cloister.types.request import Request, SamplingParams

KINDS: Final = ("alone", "device", "loads", "computed")
STREAM_PROMPT: Final = 32
NUM_WARM: Final = 16
"""First tokens of each stream that do not count."""
NUM_PROMPTS: Final = 8
"""Prompts that come from the tier, in turns; the device holds fewer."""
_ids = itertools.count()


@dataclass
class StreamEngine(TimedEngine):
    """An engine that remembers when each token was there.

    Attributes:
        token_s: on the engine's clock, by request.
    """

    token_s: dict[str, list[float]] = field(default_factory=dict)

    def deliver(self, message: Outputs) -> None:
        for event in message.events:
            if isinstance(event, Progressed):
                self.token_s.setdefault(event.request_id, []).append(event.now_s)
        super().deliver(message)

    def send(self, token_ids: list[int], max_tokens: int) -> str:
        """Sends a request and returns its id."""
        name = f"{next(_ids)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.transport.send(Submit(Request(request_id=name, token_ids=token_ids, sampling=sampling), 0))
        return name

    async def wait(self, name: str) -> None:
        end_s = time.perf_counter() + TIMEOUT_S
        while name not in self.ended:
            if time.perf_counter() > end_s:
                raise TimeoutError("an engine does not answer")
            await asyncio.sleep(0.0005)

    def processor_s(self) -> float:
        """Returns the processor time of its process so far, of all threads that still run."""
        tasks = Path(f"/proc/{self.transport.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


@dataclass
class Window:
    """One stream from its first token that counts to its last.

    Attributes:
        gaps_s: times between its tokens.
        loading_s: those during which a load was under way.
        num_requests, num_loads: of the second client.
    """

    gaps_s: list[float]
    loading_s: list[float]
    processor_s: float
    num_requests: int
    num_loads: int


class Prompts:
    """What the second client sends."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        self._draw, self._num_tokens, self._vocab_size = random.Random(1), num_tokens, vocab_size
        self._stored = itertools.cycle([self.draw(num_tokens) for _ in range(NUM_PROMPTS)])
        self._here: list[int] = []

    def draw(self, num_tokens: int) -> list[int]:
        return [self._draw.randrange(10, self._vocab_size) for _ in range(num_tokens)]

    def next(self, kind: str) -> list[int]:
        match kind:
            case "loads":
                return next(self._stored)
            case "computed":
                return self.draw(self._num_tokens)
        return self._here

    async def prepare(self, engine: StreamEngine, kind: str) -> None:
        """Has what a window needs on the device, or in the tier."""
        if kind == "device":
            self._here = self.draw(self._num_tokens)
            await engine.wait(engine.send(self._here, 1))
        elif kind == "loads":
            for _ in range(NUM_PROMPTS):
                await engine.wait(engine.send(next(self._stored), 1))


async def watch(engine: StreamEngine, prompts: Prompts, kind: str, stream_tokens: int, pause_s: float) -> Window:
    """Measures one stream."""
    await prompts.prepare(engine, kind)
    stream = engine.send(prompts.draw(STREAM_PROMPT), stream_tokens)
    end_s = time.perf_counter() + TIMEOUT_S
    while len(engine.token_s.get(stream, ())) <= NUM_WARM:
        if time.perf_counter() > end_s:
            raise TimeoutError("the stream does not begin")
        await asyncio.sleep(0.0005)
    num_before, started_s, num_requests = len(engine.loads), engine.processor_s(), 0
    while kind != "alone" and stream not in engine.ended:
        await engine.wait(engine.send(prompts.next(kind), 1))
        num_requests += 1
        await asyncio.sleep(pause_s)
    await engine.wait(stream)
    processor_s = engine.processor_s() - started_s
    spans = [(event.now_s - event.elapsed_s, event.now_s) for event in engine.loads[num_before:]]
    pairs = [*pairwise(engine.token_s[stream][NUM_WARM:])]
    loading = [end - start for start, end in pairs if any(start < last and first < end for first, last in spans)]
    return Window([end - start for start, end in pairs], loading, processor_s, num_requests, len(spans))


def show(bench: Bench, what: str, windows: dict[str, list[Window]]) -> None:
    """Prints what was measured with one tier."""
    rows, of_pairs = [], {}
    for kind, measured in windows.items():
        gaps = sorted(gap for window in measured for gap in window.gaps_s)
        loading = [gap for window in measured for gap in window.loading_s]
        means = [statistics.fmean(window.gaps_s) for window in measured]
        alone = [statistics.fmean(window.gaps_s) for window in windows["alone"]]
        of_pairs[kind] = statistics.median(mine / other for mine, other in zip(means, alone, strict=True))
        rows.append((
            kind, 1e3 * statistics.median(gaps), 1e3 * statistics.fmean(gaps), 1e3 * gaps[len(gaps) * 99 // 100],
            1e3 * statistics.median(loading) if loading else "-", 100 * len(loading) / len(gaps), of_pairs[kind],
            1e3 * sum(window.processor_s for window in measured) / len(gaps),
            sum(window.num_requests for window in measured), sum(window.num_loads for window in measured),
        ))  # fmt: skip
    headers = (
        "second client", "P50, ms", "mean, ms", "P99, ms", "P50 in loads, ms", "in loads, %", "mean over alone",
        "processor, ms a token", "requests", "loads",
    )  # fmt: skip
    bench.print_rows(f"{what}: time between tokens", headers, rows)
    slowed = statistics.median(
        statistics.fmean(loads.gaps_s) / statistics.fmean(here.gaps_s)
        for loads, here in zip(windows["loads"], windows["device"], strict=True)
    )
    medians = {kind: statistics.median(gap for window in windows[kind] for gap in window.gaps_s) for kind in KINDS}
    bench.check(f"{what}: mean time between tokens, loads over device", slowed, high=1.05)
    bench.check(f"{what}: median time between tokens, loads over alone", medians["loads"] / medians["alone"], high=1.05)
    bench.check(f"{what}: mean over alone, loads less computed", of_pairs["loads"] - of_pairs["computed"], high=0.0)


async def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Measures each tier."""
    model = str(find_model(options.model)) if options.model in MODELS else options.model
    longest = max(options.tokens, STREAM_PROMPT + options.stream_tokens) + 16
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        base = EngineConfig(
            model=model, num_threads=1, prefix_cache=True, max_model_len=longest, max_num_seqs=2, weights_cache=""
        )  # fmt: skip
        probe = TimedEngine(base)
        await probe.transport.open(base)
        assert probe.transport.ready is not None
        memory, vocab_size = dict(probe.transport.ready.memory), probe.transport.ready.model.vocab_size
        await probe.transport.close()
        kv_mb = 1.5 * memory["KV cache"] / 2**20  # three sequences of full length
        for tier in options.tiers.split(","):
            where = f"disk:{directory},1G" if tier == "disk" else f"{tier}:1G"
            engine = StreamEngine(replace(base, kv_memory_mb=kv_mb, kv_tier=where))
            prompts = Prompts(options.tokens, min(vocab_size, 2048))
            async with running([engine]):
                for kind in KINDS:
                    await watch(engine, prompts, kind, options.stream_tokens, 0.0)
                for pause_ms in map(float, options.pauses_ms.split(",")):
                    windows: dict[str, list[Window]] = {kind: [] for kind in KINDS}
                    for number in range(options.rounds):
                        for kind in KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]:
                            windows[kind].append(await watch(engine, prompts, kind, options.stream_tokens, pause_ms / 1e3))
                    show(bench, f"{tier}, pauses of {pause_ms:.0f} ms", windows)


def main() -> int:
    """Reads the arguments."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--tiers", default="disk,host", help="with commas")
    parser.add_argument("--tokens", type=int, default=600, help="of a prompt of the second client")
    parser.add_argument("--stream-tokens", type=int, default=1000, help="of the stream")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pauses-ms", default="50,0", help="of the second client after an answer, with commas")
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    bench = Bench(
        "kv_load_stalls",
        "What loads of KV from a tier do to the decode of others",
        "loads lengthen the time between others' tokens by at most 5% beside requests that need none; computing does more",
    )
    load = os.getloadavg()
    asyncio.run(measure(options, bench))
    bench.figures["load average before, after"] = [load[0], os.getloadavg()[0]]
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
