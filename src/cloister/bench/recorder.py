"""Turns the engine's event stream into records and steps: offline figures and metrics have one source (rule 7)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloister.bench.records import RequestRecord
from cloister.types.events import Arrived, Ended, Event, Progressed, Scheduled, Stepped
from cloister.types.request import FinishReason


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
            num_cached_tokens=request.num_cached_tokens,
            failure=None if answered else event.reason.value,
        )
