"""Measures a workload on an engine in this thread or on a server: warm-up, requests alone, then the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cloister.bench.drive import Listener, Timed, drive, make_request, make_requests
from cloister.bench.load import OnProgress, Target, send_all
from cloister.bench.recorder import RequestRecord
from cloister.bench.report import AloneModel, AloneObjective, LatencyObjective, Objective, Summary, summarise
from cloister.bench.workloads import DEFAULT_VOCAB_SIZE, WorkItem, Workload, make_tokens
from cloister.types.errors import EngineError
from cloister.types.events import Ended, Event

if TYPE_CHECKING:
    from cloister.engine import EngineCore

NUM_ALONE = 8
WARMUP_OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Objectives:
    """The service-level objective: fixed limits if any is set, else relative to the time of each request alone."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    @classmethod
    def of_milliseconds(cls, ttft_ms: float | None, tbt_ms: float | None) -> Objectives:
        """Returns limits given in milliseconds; None sets none."""
        return cls(*(limit / 1e3 if limit is not None else None for limit in (ttft_ms, tbt_ms)))

    @property
    def are_fixed(self) -> bool:
        return self.ttft_s is not None or self.tbt_s is not None

    def settle(self, alone: Sequence[RequestRecord]) -> Objective:
        """Returns the objective, fitted to requests that ran alone unless limits are fixed.

        Raises:
            EngineError: none of them was answered; the message has the kinds of failure.
        """
        if self.are_fixed:
            return LatencyObjective(self.ttft_s, self.tbt_s)
        try:
            return AloneObjective(AloneModel.fit(alone))
        except ValueError:
            kinds = ", ".join(sorted({record.failure for record in alone if record.failure is not None}))
            advice = "; `GET /v1/models` lists what --api-model may name" if "http_404" in kinds else ""
            raise EngineError(
                f"no request was answered when sent alone ({kinds}); look at the server's log first{advice}"
            ) from None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A run with its figures."""

    summary: Summary
    records: list[RequestRecord]

    def to_json(self) -> dict[str, object]:
        """Returns figures and one row per request as plain JSON values."""
        rows = [
            {
                "due_s": r.due_s,
                "ttft_s": r.ttft_s,
                "e2e_s": r.e2e_s,
                "input_tokens": r.num_input_tokens,
                "output_tokens": r.num_output_tokens,
                "cached_tokens": r.num_cached_tokens,
                "failure": r.failure,
            }
            for r in self.records
        ]
        return {"summary": self.summary.to_json(), "requests": rows}


def measure_engine(
    engine: EngineCore, workload: Workload, *, num_warmup: int = 2, on_end: Callable[[], None] = lambda: None
) -> Measurement:
    """Runs a workload on an engine in this thread; latencies are then the engine's own.

    Args:
        on_end: called when a request of the run proper ends.
    """
    drive(engine, make_requests(make_warmup(workload.items, num_warmup), "warm-up"))
    run = drive(engine, make_requests(workload.items), listeners=[_note_end(on_end)])
    return Measurement(summarise(workload.name, run.recorder.records), run.recorder.records)


def measure_one_by_one(
    engine: EngineCore, workload: Workload, *, num_warmup: int = 2, on_end: Callable[[], None] = lambda: None
) -> Measurement:
    """Runs the requests of a workload one after another."""
    drive(engine, make_requests(make_warmup(workload.items, num_warmup), "warm-up"))
    records: list[RequestRecord] = []
    start_s = 0.0
    for number, item in enumerate(workload.items):
        run = drive(engine, [Timed(0.0, make_request(number, item))], listeners=[_note_end(on_end)])
        records += [shift(record, start_s, number) for record in run.recorder.records]
        start_s = records[-1].end_s
    return Measurement(summarise(workload.name, records), records)


def shift(record: RequestRecord, by_s: float, number: int) -> RequestRecord:
    """Returns a record of a run that began `by_s` seconds later, with another number."""
    deliveries = tuple((time_s + by_s, count) for time_s, count in record.deliveries)
    return replace(record, number=number, due_s=record.due_s + by_s, end_s=record.end_s + by_s, deliveries=deliveries)


async def measure_server(
    target: Target,
    workload: Workload,
    *,
    objectives: Objectives,
    num_warmup: int = 2,
    on_progress: OnProgress | None = None,
) -> Measurement:
    """Sends a workload to a server; latencies are measured at the client.

    Raises:
        EngineError: requests are not even answered one at a time.
    """
    await send_all(make_warmup(workload.items, num_warmup), target, max_concurrency=1)
    items = [] if objectives.are_fixed else pick_alone(workload.items)
    objective = objectives.settle(await send_all(items, target, max_concurrency=1))
    records = await send_all(workload.items, target, on_progress=on_progress)
    return Measurement(summarise(workload.name, records, objective), records)


def make_warmup(items: Sequence[WorkItem], num: int) -> list[WorkItem]:
    """Returns `num` short requests as long as the workload's longest prompts, with other tokens."""
    longest = sorted(items, key=lambda item: item.num_input_tokens, reverse=True)[:num]
    fresh = [freshen(item, ("warm-up", number)) for number, item in enumerate(longest)]
    return [replace(item, num_output_tokens=min(item.num_output_tokens, WARMUP_OUTPUT_TOKENS)) for item in fresh]


def pick_alone(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Returns `NUM_ALONE` requests spread over the lengths of the workload, with other tokens, so that none is cached."""
    ordered = sorted(items, key=lambda item: item.num_input_tokens + item.num_output_tokens)
    places = sorted({round(place * (len(ordered) - 1) / (NUM_ALONE - 1)) for place in range(NUM_ALONE)})
    return [freshen(ordered[place], ("alone", place)) for place in places]


def freshen(item: WorkItem, key: tuple[str, int]) -> WorkItem:
    """Returns a request of the same length, due at once, that shares no prefix with `item`."""
    if isinstance(item.prompt, str):
        words = item.prompt.split()
        random.Random(str(key)).shuffle(words)
        return replace(item, prompt=" ".join([key[0], *words]), arrival_s=0.0)
    vocab_size = max([DEFAULT_VOCAB_SIZE // 2, *item.prompt]) + 1
    return replace(item, prompt=make_tokens((*key[0].encode(), key[1]), len(item.prompt), vocab_size), arrival_s=0.0)


def _note_end(on_end: Callable[[], None]) -> Listener:
    def listen(event: Event) -> None:
        if isinstance(event, Ended) and event.last:
            on_end()

    return listen
