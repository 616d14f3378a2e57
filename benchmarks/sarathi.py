"""B2, Sarathi-Serve: what running streams feel while a prompt of 8k tokens arrives.

Sarathi-Serve (Agrawal et al., OSDI 2024, section 4): prefill in chunks beside the decodes, the chunk bounded by the time that
it adds to the step. Beside it the prefill-first baseline: a budget that takes the whole prompt in one step.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness import CONTEXT_TOKENS, Bench, console, make_parser, open_engine
from cloister.bench.drive import SteppingEngine, Timed, abort, drive, make_request, make_requests
from cloister.bench.plots import BLUE, GREEN, ORANGE, draw, plot_distribution
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.types.events import Event, Progressed

STREAM_TOKENS = 4000
QUIET_TOKENS = 2500
LONG_TOKENS = CONTEXT_TOKENS - 16
SETTLE_S = 1.0
LONG = "long-0"


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

    @property
    def tbt_ratio(self) -> float:
        return float(np.percentile(self.loaded_s, 99) / np.percentile(self.quiet_s, 99))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-streams", type=int, default=48, help="streams that run when the prompt arrives")
    parser.add_argument("--stream-prompt", type=int, default=1024, help="tokens of each stream's own prompt")
    options = parser.parse_args()
    bench = Bench(
        "sarathi",
        f"B2 Sarathi-Serve: an 8k prompt arrives beside {options.num_streams} streams",
        "a step may take 1.7x of its decodes, so P99 TBT stays within 2x; prefill then has 0.7 of 1.7 of the time and the "
        "prompt's TTFT is 2.4x of alone, within 3x; prefill-first stalls every stream for the whole prompt",
    )
    with console.status("chunked"):
        chunked = measure(options, stall_floor_ms=0.0)  # steps of this model are short of a server's floor
    with console.status("prefill first"):
        whole = measure(options, max_batched_tokens=2 * CONTEXT_TOKENS, max_stall=1e6)
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
    bench.print_rows("Streams", headers, [describe("chunked", chunked), describe("prefill first", whole)])
    bench.check("P99 TBT while the prompt arrives, over without", chunked.tbt_ratio, high=2.0)
    bench.check("TTFT of the prompt, over alone", chunked.ttft_s / chunked.alone_s, high=3.0)
    bench.check("longest stall of prefill-first, over chunked", max(whole.loaded_s) / max(chunked.loaded_s), low=2.0)
    with draw(bench.picture(options), bench.title, size=(7.2, 4.2)) as (axes,):
        plot_distribution(axes, chunked.quiet_s, GREEN, "no prompt arrives")
        plot_distribution(axes, chunked.loaded_s, BLUE, "prompt arrives, chunked")
        plot_distribution(axes, whole.loaded_s, ORANGE, "prompt arrives, prefill first")
        axes.set_xlabel("time between tokens of the streams, ms")
        axes.legend(loc="center", bbox_to_anchor=(0.66, 0.5))
    return bench.finish(options)


def measure(options: argparse.Namespace, **settings: object) -> Stall:
    """Measures the prompt alone, the streams alone, and both together on one engine."""
    engine = open_engine(options, max_num_seqs=2 * options.num_streams, **settings)
    long_item = WorkItem(0.0, make_tokens((options.seed, 1), LONG_TOKENS, 2048), LONG_TOKENS, 2)
    drive(engine, [Timed(0.0, make_request(0, long_item, "warm-up")), *streams(options, 100, "warm-up-stream")])
    alone = drive(engine, [Timed(0.0, make_request(0, long_item, "alone"))]).recorder.records[0]
    quiet = drive(engine, streams(options, QUIET_TOKENS, "quiet")).recorder.records
    first_due_s = min(record.due_s for record in quiet)
    all_stream_s = max(record.deliveries[0][0] for record in quiet)
    arrival_s = all_stream_s - first_due_s + SETTLE_S
    long = Timed(arrival_s, make_request(0, replace(long_item, arrival_s=arrival_s), "long"))
    stop = _StopStreams(engine, options.num_streams)
    both = drive(engine, [*streams(options, STREAM_TOKENS, "stream"), long], listeners=[stop]).recorder
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


def streams(options: argparse.Namespace, num_tokens: int, prefix: str) -> list[Timed]:
    length = options.stream_prompt
    items = [
        WorkItem(0.0, make_tokens((options.seed, 2, n), length, 2048), length, num_tokens) for n in range(options.num_streams)
    ]
    return make_requests(items, prefix)


def gaps_before(times: list[float], tokens: list[int]) -> list[float]:
    """Returns the time that passed before each of the tokens, which are counted from 0."""
    if tokens and tokens[-1] >= len(times):
        raise SystemExit("the streams ended too early to compare with: raise QUIET_TOKENS")
    return [times[token] - times[token - 1] for token in tokens]


class _StopStreams:
    """Ends the streams once the long prompt has its first token: what comes later is not measured."""

    def __init__(self, engine: SteppingEngine, num_streams: int) -> None:
        self._engine = engine
        self._num_streams = num_streams

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progressed) and event.request_id == LONG and event.first:
            for number in range(self._num_streams):
                abort(self._engine, f"stream-{number}")


def describe(name: str, stall: Stall) -> list[object]:
    quiet, loaded = (float(np.percentile(gaps, 99)) * 1e3 for gaps in (stall.quiet_s, stall.loaded_s))
    ratio = stall.ttft_s / stall.alone_s
    return [name, quiet, loaded, max(stall.loaded_s) * 1e3, stall.tbt_ratio, stall.alone_s, stall.ttft_s, ratio]


if __name__ == "__main__":
    sys.exit(main())
