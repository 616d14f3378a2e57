"""B10, fairness: one tenant floods the engine; what does another one feel who stays below its share?

Virtual token counters (Sheng et al., OSDI 2024): the tenant that got least goes first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import MODEL, Bench, make_parser, make_progress, open_engine
from benchmarks.models import open_checkpoint
from benchmarks.peers.engines import file_backend
from cloister.bench.drive import Timed, drive
from cloister.bench.workloads import make_tokens
from cloister.engine import EngineCore
from cloister.types.events import Abort, Ended, Event, Submit
from cloister.types.request import Request, SamplingParams

VICTIM_PROMPT, VICTIM_ANSWER = 512, 16
FLOOD_PROMPT, FLOOD_ANSWER = 512, 64
MAX_NUM_SEQS, MAX_MODEL_LEN = 16, 1024
NUM_APART = 8
"""Times to first token between two requests of the victim: with its answer it asks for a quarter of the engine at most."""
NUM_APART_ALONE = 3
"""The same without a flood, where they only have to miss each other."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=40, help="requests of the victim")
    parser.add_argument(
        "--interval-s",
        type=float,
        help="between two requests of the victim; unset, 8 times what one takes to its first token alone, so that it stays "
        "below its share on any machine",
    )
    parser.add_argument(
        "--num-earlier", type=int, default=40, help="requests of the victim before the flood, on an idle engine"
    )
    parser.add_argument("--num-flood", type=int, default=64, help="requests of the other tenant, always in the engine")
    parser.add_argument("--models", default=MODEL, help="models, with commas: names, directories, or smollm2")
    parser.add_argument("--kernels", default="best", help="instruction sets, with commas; best is the processor's own")
    parser.add_argument("--quant", default="none", help="number format of matrices, made on load")
    parser.add_argument("--no-fcfs", action="store_true", help="leave out what fcfs does")
    parser.add_argument("--runs", type=int, default=1, help="runs of each model and instruction set")
    options = parser.parse_args()
    bench = Bench(
        "fairness",
        "B10 Fair share: a flood by another tenant",
        "under fcfs the victim waits behind the whole flood; under fair its prompt goes before the flood's work, so its P99 "
        "TTFT stays within 1.5x of alone",
    )
    for model in options.models.split(","):
        for kernels, run in itertools.product(options.kernels.split(","), range(options.runs)):
            compare(bench, options, Case(str(open_checkpoint(model)), kernels), is_first=run == 0 and not options.no_fcfs)
    return bench.finish(options)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on an instruction set."""

    model: str
    kernels: str

    @property
    def name(self) -> str:
        return f"{Path(self.model).name} {self.kernels}"


def compare(bench: Bench, options: argparse.Namespace, case: Case, *, is_first: bool) -> None:
    """Measures the victim alone and flooded; under `fcfs` the first time only."""
    interval_s = options.interval_s or NUM_APART * measure_one(options, case)
    alone = measure(options, case, "fair", interval_s * NUM_APART_ALONE / NUM_APART, flooded=False)
    schedulers = ("fcfs", "fair") if is_first else ("fair",)
    flooded = {scheduler: measure(options, case, scheduler, interval_s, flooded=True) for scheduler in schedulers}
    base = float(np.percentile(alone, 99))
    rows: list[tuple[object, ...]] = [("alone", *spread(alone), 1.0)]
    rows += [(f"flooded, {name}", *spread(ttfts), float(np.percentile(ttfts, 99)) / base) for name, ttfts in flooded.items()]
    bench.print_rows(f"TTFT of the victim, {case.name}", ("run", "P50, ms", "P90, ms", "P99, ms", "P99 over alone"), rows)
    for name, ttfts in flooded.items():
        ratio = float(np.percentile(ttfts, 99)) / base
        bound = {"high": 1.5} if name == "fair" else {"low": 1.5}
        bench.check(f"{case.name}: P99 TTFT under a flood, {name} over alone", ratio, **bound)


def open_warm(options: argparse.Namespace, case: Case, scheduler: str) -> EngineCore:
    """Returns an engine that has learned what its steps cost."""
    settings: dict[str, object] = {"model": case.model, "quant": options.quant, "max_model_len": MAX_MODEL_LEN}
    if case.kernels != "best":
        settings["backend"] = file_backend(case.kernels)
    engine = open_engine(options, scheduler=scheduler, max_num_seqs=MAX_NUM_SEQS, **settings)
    drive(engine, [Timed(0.0, make(f"warm-up-{n}", "warm-up", FLOOD_PROMPT, FLOOD_ANSWER)) for n in range(MAX_NUM_SEQS)])
    return engine


def measure_one(options: argparse.Namespace, case: Case) -> float:
    """Returns what a prompt of the victim takes to its first token on an idle engine, in seconds; the median of five."""
    engine = open_warm(options, case, "fair")
    ttfts = []
    for number in range(5):
        timed = Timed(0.0, make(f"one-{number}", "victim", VICTIM_PROMPT, VICTIM_ANSWER))
        ttfts.append(drive(engine, [timed]).recorder.record_of(timed.request.request_id).ttft_s)
    return float(np.median(ttfts))


def measure(options: argparse.Namespace, case: Case, scheduler: str, interval_s: float, *, flooded: bool) -> list[float]:
    """Returns the victim's times to first token, in seconds; it asks every `interval_s` seconds."""
    engine = open_warm(options, case, scheduler)
    drive(
        engine, [Timed(0.0, make(f"earlier-{n}", "victim", VICTIM_PROMPT, VICTIM_ANSWER)) for n in range(options.num_earlier)]
    )
    victims = [
        Timed(1.0 + n * interval_s, make(f"victim-{n}", "victim", VICTIM_PROMPT, VICTIM_ANSWER))
        for n in range(options.num_requests)
    ]
    with make_progress() as progress:
        task = progress.add_task(f"{scheduler}, {'flooded' if flooded else 'alone'}", total=len(victims))
        flood = Flood(engine, options.num_flood if flooded else 0, len(victims), lambda: progress.advance(task))
        recorder = drive(engine, [*flood.start(), *victims], listeners=[flood]).recorder
    records = [recorder.record_of(timed.request.request_id) for timed in victims]
    if not all(record.ok for record in records):
        raise SystemExit("a request of the victim was not answered; the figures would mean nothing")
    return [record.ttft_s for record in records]


def make(request_id: str, tenant: str, num_prompt: int, num_answer: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
    tokens = make_tokens((*request_id.encode(),), num_prompt, 2048)
    return Request(request_id=request_id, token_ids=tokens, sampling=sampling, tenant=tenant)


def spread(values: list[float]) -> list[float]:
    return [float(p) * 1e3 for p in np.percentile(values, (50, 90, 99))]


class Flood:
    """Keeps `num_open` requests of the flooding tenant in the engine until the victim has all its answers."""

    def __init__(self, engine: EngineCore, num_open: int, num_victims: int, on_answer: Callable[[], None]) -> None:
        self._engine = engine
        self._num_open = num_open
        self._num_left = num_victims
        self._on_answer = on_answer
        self._open: set[str] = set()
        self._numbers = itertools.count()

    def start(self) -> list[Timed]:
        return [Timed(0.0, self._next()) for _ in range(self._num_open)]

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Ended) or not event.last:
            return
        if event.request_id in self._open:
            self._open.remove(event.request_id)
            if self._num_left:
                self._engine.input_queue.put(Submit(self._next()))
        else:
            self._count_answer()

    def _next(self) -> Request:
        request = make(f"flood-{next(self._numbers)}", "flood", FLOOD_PROMPT, FLOOD_ANSWER)
        self._open.add(request.request_id)
        return request

    def _count_answer(self) -> None:
        self._num_left -= 1
        self._on_answer()
        if not self._num_left:
            for request_id in self._open:
                self._engine.input_queue.put(Abort(request_id))


if __name__ == "__main__":
    sys.exit(main())
