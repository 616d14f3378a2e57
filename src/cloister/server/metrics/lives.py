"""Requests between their first and last event: where they are, and since when."""

from __future__ import annotations

from cloister.types.events import Arrived, Ended, Event, Preempted, Scheduled


class Lives:
    """What must be remembered of a request until it ends.

    Attributes:
        waiting, running: ids of requests.
        last_token_s: (id, index of the sequence) -> when it last gained tokens.
        scheduled_s: id -> when it got its first slot.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.last_token_s: dict[tuple[str, int], float] = {}
        self.scheduled_s: dict[str, float] = {}

    def follow(self, event: Event) -> None:
        """Moves a request to where the event says it is."""
        match event:
            case Arrived(request_id=request_id) | Preempted(request_id=request_id):
                self.running.discard(request_id)
                self.waiting.add(request_id)
            case Scheduled(request_id=request_id, now_s=now_s):
                self.waiting.discard(request_id)
                self.running.add(request_id)
                self.scheduled_s.setdefault(request_id, now_s)
            case Ended(request_id=request_id, index=index, last=last):
                self.last_token_s.pop((request_id, index), None)
                if last:
                    self._forget(request_id)
            case _:
                pass

    def _forget(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        self.running.discard(request_id)
        self.scheduled_s.pop(request_id, None)
