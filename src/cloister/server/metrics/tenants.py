"""Figures of each tenant, for operators: how many requests and tokens, how many run and wait. Counts only, in memory only.

They stand beside `/metrics` and not in it: whoever holds a key may read that, and would see when others are busy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from cloister.privacy.gate import Gate
from cloister.types.events import Arrived, Ended, Event, Preempted, Scheduled
from cloister.types.request import Request

MAX_TENANTS: Final = 1_000
"""Tenants that are told apart; an OpenID issuer may know any number of people."""


class TenantReport(msgspec.Struct, frozen=True):
    """What one tenant did since the start, and has open.

    Attributes:
        name: as the file of keys has it, or the hash that stands for a person of an issuer; null for all beyond `MAX_TENANTS`.
        requests: that the engine took; a request with several prompts counts as many.
    """

    name: str | None
    requests: int
    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int


class TenantsReport(msgspec.Struct, frozen=True):
    """Reply of /metrics/tenants, the busiest since the start first."""

    data: list[TenantReport]
    object: Literal["list"] = "list"


@dataclass(slots=True)
class _Figures:
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    running: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)


class TenantFigures:
    """Those of all tenants of one server. Used from one event loop."""

    def __init__(self) -> None:
        self._figures: dict[str | None, _Figures] = {}
        self._open: dict[str, _Figures] = {}  # by id of a request that the engine has

    def begin(self, request: Request) -> None:
        """Notes that the engine is about to get a request."""
        name = request.tenant if request.tenant in self._figures or len(self._figures) < MAX_TENANTS else None
        figures = self._figures.setdefault(name, _Figures())
        figures.num_requests += 1
        figures.waiting.add(request.request_id)
        self._open[request.request_id] = figures

    def observe(self, event: Arrived | Scheduled | Preempted | Ended) -> None:
        """Takes one event of a request."""
        if (figures := self._open.get(event.request_id)) is None:
            return
        match event:
            case Scheduled():
                figures.waiting.discard(event.request_id)
                figures.running.add(event.request_id)
                figures.num_prompt_tokens += 0 if event.resumed else event.num_prompt_tokens
            case Preempted():
                figures.running.discard(event.request_id)
                figures.waiting.add(event.request_id)
            case Ended():
                figures.num_output_tokens += event.num_output_tokens
            case _:
                pass

    def end(self, request_id: str) -> None:
        """Notes that the engine has nothing left to do for a request."""
        if (figures := self._open.pop(request_id, None)) is not None:
            figures.running.discard(request_id)
            figures.waiting.discard(request_id)

    def report(self) -> TenantsReport:
        """Returns the figures as they are."""
        found = [
            TenantReport(
                name,
                figures.num_requests,
                figures.num_prompt_tokens,
                figures.num_output_tokens,
                len(figures.running),
                len(figures.waiting),
            )
            for name, figures in self._figures.items()
        ]
        return TenantsReport(sorted(found, key=lambda one: -(one.prompt_tokens + one.generation_tokens)))


def make_tenant_figures(gate: Gate) -> TenantFigures | None:
    """Returns an empty collection where tenants are told apart and the profile lets operators see them, else None."""
    return TenantFigures() if tells_tenants(gate) else None


def tells_tenants(gate: Gate) -> bool:
    """Whether operators may see figures of tenants here."""
    return gate.asks_for_keys and gate.policy.allows("tenant-figures")


# Requests between their first and last event: where they are, and since when.


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
