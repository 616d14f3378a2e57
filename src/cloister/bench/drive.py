"""Runs requests on an engine in the calling thread at their arrival times, to measure the engine alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloister.bench.recorder import EventRecorder
from cloister.bench.workloads import WorkItem
from cloister.types.clock import WallClock
from cloister.types.events import Event, Outputs, Submit
from cloister.types.request import Request, SamplingParams

if TYPE_CHECKING:
    from cloister.engine import EngineCore

Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """A request and when to submit it, in seconds from the start."""

    due_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class Drive:
    """The result of a run.

    Attributes:
        recorder: records and steps.
        token_ids: by request id and sequence index, every output token.
    """

    recorder: EventRecorder
    token_ids: dict[tuple[str, int], list[int]]


def make_request(number: int, item: WorkItem, prefix: str = "bench") -> Request:
    """Returns an item as a greedy request for an answer of exactly its length.

    Raises:
        ValueError: the item's prompt is text; the engine takes tokens.
    """
    if isinstance(item.prompt, str):
        raise ValueError("tokenize the prompts first")
    sampling = SamplingParams(temperature=0.0, max_tokens=item.num_output_tokens, ignore_eos=True)
    return Request(request_id=f"{prefix}-{number}", token_ids=item.prompt, sampling=sampling)


def make_requests(items: Iterable[WorkItem], prefix: str = "bench") -> list[Timed]:
    """Returns a workload as timed requests."""
    return [Timed(item.arrival_s, make_request(number, item, prefix)) for number, item in enumerate(items)]


def drive(engine: EngineCore, requests: Sequence[Timed], *, listeners: Sequence[Listener] = ()) -> Drive:
    """Submits every request when it is due, and runs steps until all have ended, including those that listeners submitted.

    Args:
        listeners: called with every event as it happens.
    """
    clock = WallClock()
    run = Drive(EventRecorder(), {})
    queue = sorted(requests, key=lambda timed: timed.due_s)
    start_s, num_sent = clock.now(), 0
    while num_sent < len(queue) or len(run.recorder.names) < num_sent or run.recorder.num_open:
        now_s = clock.now() - start_s
        while num_sent < len(queue) and queue[num_sent].due_s <= now_s:
            engine.input_queue.put(Submit(queue[num_sent].request))
            num_sent += 1
        outputs = engine.step()
        if outputs is not None:
            _take(outputs, run, listeners)
        elif num_sent < len(queue):
            time.sleep(max(0.0, queue[num_sent].due_s - (clock.now() - start_s)))
    _settle(engine, run, listeners)
    return run


def _settle(engine: EngineCore, run: Drive, listeners: Sequence[Listener]) -> None:
    """Lets the engine wipe residue of the last requests, so that runs do not pay for each other."""
    while (outputs := engine.step()) is not None:
        _take(outputs, run, listeners)


def _take(outputs: Outputs, run: Drive, listeners: Sequence[Listener]) -> None:
    for event in outputs.events:
        run.recorder(event)
        for listener in listeners:
            listener(event)
    for output in outputs.outputs:
        run.token_ids.setdefault((output.request_id, output.index), []).extend(output.token_ids)
