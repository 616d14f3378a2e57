"""Runs requests at their arrival times: on an engine in the calling thread, or through a client of engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cloister.bench.recorder import EventRecorder, RequestRecord
from cloister.bench.workloads import WorkItem
from cloister.types.clock import WallClock
from cloister.types.errors import CloisterError
from cloister.types.events import Event, Outputs, Submit
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput

if TYPE_CHECKING:
    from cloister.engine import EngineCore, RequestClient

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
    """Submits every request when it is due, and runs steps until all have ended, including requests submitted by listeners.

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
    """Runs steps until the engine has wiped the residue of the last requests, which would otherwise slow down the next run."""
    while (outputs := engine.step()) is not None:
        _take(outputs, run, listeners)


def _take(outputs: Outputs, run: Drive, listeners: Sequence[Listener]) -> None:
    for event in outputs.events:
        run.recorder(event)
        for listener in listeners:
            listener(event)
    for output in outputs.outputs:
        run.token_ids.setdefault((output.request_id, output.index), []).extend(output.token_ids)


# Through a client


@dataclass(slots=True)
class _Answer:
    """One answer as its client sees it."""

    deliveries: list[tuple[float, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    failure: str | None = None

    def take(self, output: SequenceOutput, now_s: float) -> None:
        if output.token_ids:
            self.deliveries.append((now_s, len(output.token_ids)))
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            self.failure = str(output.finish_reason)


async def drive_client(
    client: RequestClient, requests: Sequence[Timed], *, on_end: Callable[[], None] = lambda: None, late_s: float = 0.0
) -> list[RequestRecord]:
    """Submits every request when it is due, regardless of the others (open loop), and returns the records of their sender.

    Times are of the running event loop, real or virtual.

    Args:
        on_end: called when a request has ended.
        late_s: delay of each submission. Timers of a real loop are late by themselves (asyncio rounds them up to milliseconds),
            those of a virtual loop are not.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def send(number: int, timed: Timed) -> RequestRecord:
        answer = _Answer()
        await asyncio.sleep(start_s + timed.due_s + late_s - loop.time())
        try:
            await client.follow(timed.request, lambda output: answer.take(output, loop.time() - start_s))
        except CloisterError as error:
            answer.failure = error.code
        on_end()
        return RequestRecord(
            number=number,
            due_s=timed.due_s,
            end_s=loop.time() - start_s,
            num_input_tokens=len(timed.request.token_ids),
            num_output_tokens=sum(count for _, count in answer.deliveries),
            deliveries=tuple(answer.deliveries),
            num_cached_tokens=answer.num_cached_tokens,
            failure=answer.failure,
        )

    return list(await asyncio.gather(*(send(number, timed) for number, timed in enumerate(requests))))
