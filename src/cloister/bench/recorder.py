"""Turns the engine's event stream into per-request records and steps (one source for every figure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from cloister.types.events import Arrived, Ended, Event, Progressed, Scheduled, Stepped
from cloister.types.request import FinishReason

# The record of one request in a run, and its derived figures.


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its sender saw it. Times in seconds from the start of the run.

    Attributes:
        number: place in the workload.
        due_s: when it was to be sent; all latencies count from here, so that a late sender hides nothing.
        deliveries: (time, tokens) of everything that came back; tokens is 1 where the sender cannot know more.
        failure: None for an answer, else what kind of failure (`http_429`, `timeout`, `connection`, `abort`, ...).
    """

    number: int
    due_s: float
    end_s: float
    num_input_tokens: int
    num_output_tokens: int
    deliveries: tuple[tuple[float, int], ...] = ()
    num_cached_tokens: int = 0
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return (self.deliveries[0][0] if self.deliveries else self.end_s) - self.due_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return (self.deliveries[-1][0] if self.deliveries else self.end_s) - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if self.num_output_tokens < 2 or len(self.deliveries) < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between deliveries (TBT): what a reader waits between one piece of text and the next."""
        times = [time_s for time_s, _ in self.deliveries]
        return [after - before for before, after in pairwise(times)]


@dataclass(slots=True)
class _Open:
    """A request that has arrived and not ended."""

    number: int
    arrival_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    deliveries: list[tuple[float, int]] = field(default_factory=list)


class EventRecorder:
    """Listens to events; call it with each one. Times count from the first arrival.

    Attributes:
        steps: every step that ran, in order.
        names: request id -> its number, in order of arrival.
    """

    def __init__(self) -> None:
        self.steps: list[Stepped] = []
        self.names: dict[str, int] = {}
        self._start_s = 0.0
        self._open: dict[str, _Open] = {}
        self._records: dict[int, RequestRecord] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case Arrived():
                self._start_s = self._start_s if self.names else event.now_s
                number = self.names.setdefault(event.request_id, len(self.names))
                self._open[event.request_id] = _Open(number, event.now_s - self._start_s, event.num_prompt_tokens)
            case Scheduled() if event.request_id in self._open:
                request = self._open[event.request_id]
                if not event.resumed:
                    request.num_cached_tokens = event.num_cached_tokens
            case Progressed() if event.request_id in self._open:
                request = self._open[event.request_id]
                request.deliveries.append((event.now_s - self._start_s, event.num_tokens))
                request.num_output_tokens += event.num_tokens
            case Ended() if event.last and event.request_id in self._open:
                self._end(self._open.pop(event.request_id), event)
            case Stepped():
                self.steps.append(event)
            case _:
                pass

    @property
    def records(self) -> list[RequestRecord]:
        """Requests that ended, in order of arrival."""
        return [self._records[number] for number in sorted(self._records)]

    @property
    def num_open(self) -> int:
        """Requests that arrived and have not ended."""
        return len(self._open)

    def record_of(self, request_id: str) -> RequestRecord:
        """Returns the record of one request (KeyError if it has not ended)."""
        return self._records[self.names[request_id]]

    def _end(self, request: _Open, event: Ended) -> None:
        answered = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._records[request.number] = RequestRecord(
            number=request.number,
            due_s=request.arrival_s,
            end_s=event.now_s - self._start_s,
            num_input_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            deliveries=tuple(request.deliveries),
            num_cached_tokens=max(request.num_cached_tokens, event.num_cached_tokens),  # with those found in the middle
            failure=None if answered else event.reason.value,
        )
