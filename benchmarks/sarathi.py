"""B2, Sarathi-Serve: what running streams feel while a long prompt arrives, with the settings that a server has by default.

Sarathi-Serve (Agrawal et al., OSDI 2024, section 4): prefill in chunks beside the decodes, the chunk bounded by the time that
it adds to the step. Beside it the prefill-first baseline: a budget that takes the whole prompt in one step. What a figure is
compared with comes from the engine that does better without the other load.

    python -m benchmarks.sarathi --models cloister-5m,smollm2,DIR --kernels avx2,amx --quant int8
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import MODEL, Bench, console, make_parser, open_engine
from benchmarks.models import open_checkpoint
from benchmarks.peers.engines import file_backend
from cloister.bench.drive import Timed, drive, make_request, make_requests
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.engine import EngineCore
from cloister.types.events import Abort, Event, Progressed

STREAM_TOKENS = 4000
QUIET_TOKENS = 2500
SETTLE_S = 1.0
SHORT_ENOUGH_S = 0.05
"""A time between tokens that no reader feels, whatever it was without the prompt."""
LONG = "long-0"


@dataclass(frozen=True, slots=True)
class Case:
    """What runs: streams with prompts of their own, and the prompt that arrives beside them."""

    model: str
    kernels: str
    num_streams: int
    stream_prompt: int
    long_tokens: int

    @property
    def name(self) -> str:
        streams = f"{self.num_streams} streams of {self.stream_prompt}, prompt of {self.long_tokens}"
        return f"{Path(self.model).name} {self.kernels}, {streams}"


@dataclass(frozen=True, slots=True)
class Stall:
    """What one engine did.

    Attributes:
        alone_s: TTFT of the long prompt on an idle engine.
        quiet_s: gaps of the streams without the prompt, before the same tokens as those of `loaded_s`.
        loaded_s: from the prompt's arrival to its first token.
        ttft_s: of the long prompt beside the streams.
    """

    alone_s: float
    quiet_s: list[float]
    loaded_s: list[float]
    ttft_s: float


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default=MODEL, help="models, with commas: names, directories, or smollm2")
    parser.add_argument("--kernels", default="best", help="instruction sets, with commas; best is the processor's own")
    parser.add_argument("--quant", default="none", help="number format of matrices, made on load")
    parser.add_argument("--cases", default="4:256:2000,16:256:8160,48:1024:8160", help="streams:prompt of each:long prompt")
    parser.add_argument("--runs", type=int, default=1, help="times that everything is measured")
    parser.add_argument("--name", default="sarathi", help="of the file that it leaves")
    options = parser.parse_args()
    bench = Bench(
        options.name,
        "B2 Sarathi-Serve: a long prompt arrives beside running streams, default settings",
        "P99 between tokens within twice its value without the prompt, or 50 ms; the prompt's time to first token within three "
        "times that of alone; prefill-first stalls every stream for the whole prompt",
    )
    for model in options.models.split(","):
        for kernels in options.kernels.split(","):
            for case in read_cases(options, model, kernels):
                for number in range(options.runs):
                    with console.status(f"{case.name}, run {number + 1}"):
                        chunked = measure(options, case)
                        whole = measure(options, case, max_batched_tokens=2 * case.long_tokens, max_stall=1e6)
                    judge(bench, case, chunked, whole)
    return bench.finish(options)


def read_cases(options: argparse.Namespace, model: str, kernels: str) -> list[Case]:
    path = str(open_checkpoint(model))
    return [Case(path, kernels, *map(int, numbers.split(":"))) for numbers in options.cases.split(",")]


def judge(bench: Bench, case: Case, chunked: Stall, whole: Stall) -> None:
    """Prints what both engines did; the best of both without the other load is what loads are compared with."""
    quiet_s = min(percentile(chunked.quiet_s), percentile(whole.quiet_s))
    alone_s = min(chunked.alone_s, whole.alone_s)
    headers = (
        "engine",
        "P99 TBT quiet, ms",
        "P99 TBT loaded, ms",
        "max TBT, ms",
        "ratio",
        "TTFT alone, s",
        "TTFT, s",
        "TTFT ratio",
    )
    rows = [
        (
            name,
            percentile(stall.quiet_s) * 1e3,
            percentile(stall.loaded_s) * 1e3,
            max(stall.loaded_s) * 1e3,
            percentile(stall.loaded_s) / quiet_s,
            stall.alone_s,
            stall.ttft_s,
            stall.ttft_s / alone_s,
        )
        for name, stall in (("chunked", chunked), ("prefill first", whole))
    ]
    bench.print_rows(f"{case.name}, {len(bench.figures)}", headers, rows)
    bound_s = max(2 * quiet_s, SHORT_ENOUGH_S)
    bench.check(
        f"{case.name}: P99 TBT over twice the quiet one, or over 50 ms", percentile(chunked.loaded_s) / bound_s, high=1.0
    )
    bench.check(f"{case.name}: TTFT of the prompt, over alone", chunked.ttft_s / alone_s, high=3.0)


def percentile(gaps_s: list[float]) -> float:
    return float(np.percentile(gaps_s, 99))


def measure(options: argparse.Namespace, case: Case, **settings: object) -> Stall:
    """Measures the prompt alone, the streams alone, and both together on one engine."""
    if case.kernels != "best":
        settings["backend"] = file_backend(case.kernels)
    most = case.long_tokens + 16
    engine = open_engine(
        options,
        model=case.model,
        quant=options.quant,
        max_num_seqs=max(64, 2 * case.num_streams),
        max_model_len=max(most, case.stream_prompt + STREAM_TOKENS),
        **settings,
    )
    vocab_size = min(2048, engine.model.vocab_size)
    long_item = WorkItem(0.0, make_tokens((options.seed, 1), case.long_tokens, vocab_size), case.long_tokens, 2)
    drive(engine, [Timed(0.0, make_request(0, long_item, "warm-up")), *streams(options, case, 100, "warm-up-stream")])
    alone = drive(engine, [Timed(0.0, make_request(0, long_item, "alone"))]).recorder.records[0]
    quiet = drive(engine, streams(options, case, QUIET_TOKENS, "quiet")).recorder.records
    first_due_s = min(record.due_s for record in quiet)
    all_stream_s = max(record.deliveries[0][0] for record in quiet)
    arrival_s = all_stream_s - first_due_s + SETTLE_S
    long = Timed(arrival_s, make_request(0, replace(long_item, arrival_s=arrival_s), "long"))
    stop = _StopStreams(engine, case.num_streams)
    both = drive(engine, [*streams(options, case, STREAM_TOKENS, "stream"), long], listeners=[stop]).recorder
    arrived = both.record_of(LONG)
    start_s, end_s = arrived.due_s, arrived.due_s + arrived.ttft_s
    others = [r for number, r in enumerate(both.records) if number != both.names[LONG]]
    loaded_s: list[float] = []
    quiet_s: list[float] = []
    for stream, same in zip(others, quiet, strict=True):
        times = [time_s for time_s, _ in stream.deliveries]
        tokens = [n for n, time_s in enumerate(times) if n and start_s <= time_s <= end_s + 1e-9]
        loaded_s += gaps_before(times, tokens)
        quiet_s += gaps_before([time_s for time_s, _ in same.deliveries], tokens)
    return Stall(alone.ttft_s, quiet_s, loaded_s, arrived.ttft_s)


def streams(options: argparse.Namespace, case: Case, num_tokens: int, prefix: str) -> list[Timed]:
    length = case.stream_prompt
    items = [
        WorkItem(0.0, make_tokens((options.seed, 2, n), length, 2048), length, num_tokens) for n in range(case.num_streams)
    ]
    return make_requests(items, prefix)


def gaps_before(times: list[float], tokens: list[int]) -> list[float]:
    """Returns the time that passed before each of the tokens, which are counted from 0."""
    if tokens and tokens[-1] >= len(times):
        raise SystemExit("the streams ended too early to compare with: raise QUIET_TOKENS")
    return [times[token] - times[token - 1] for token in tokens]


class _StopStreams:
    """Ends the streams once the long prompt has its first token: what comes later is not measured."""

    def __init__(self, engine: EngineCore, num_streams: int) -> None:
        self._engine = engine
        self._num_streams = num_streams

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progressed) and event.request_id == LONG and event.first:
            for number in range(self._num_streams):
                self._engine.input_queue.put(Abort(f"stream-{number}"))


if __name__ == "__main__":
    sys.exit(main())
