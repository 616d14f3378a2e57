"""Per-tenant metrics for operators: requests and tokens, running and waiting. Counts only, in memory only.

They are separate from `/metrics`, which any key holder may read and could use to see others' activity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from cloister.policy.gate import Gate
from cloister.types.events import Arrived, Ended, KVLoaded, Lost, Migrated, Preempted, PrefillDone, PrefixTaken, Scheduled
from cloister.types.request import Request

MAX_TENANTS: Final = 1_000
"""Number of tenants shown separately, those with the most usage: an OpenID issuer may have any number of users."""


class TenantReport(msgspec.Struct, frozen=True):
    """One tenant's usage since the start, and its open requests.

    Attributes:
        name: name from the key file, or the hash of an issuer's user; null for all tenants without a row.
        requests: number of requests in the engine; a request with several prompts counts as many.
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

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting)

    def add(self, others: _Figures) -> None:
        """Adds the figures of a tenant without open requests."""
        self.num_requests += others.num_requests
        self.num_prompt_tokens += others.num_prompt_tokens
        self.num_output_tokens += others.num_output_tokens


class TenantFigures:
    """Figures of all tenants of one server. Used from one event loop."""

    def __init__(self) -> None:
        self._figures: dict[str | None, _Figures] = {}
        self._open: dict[str, _Figures] = {}  # by id of a request in the engine

    def begin(self, request: Request) -> None:
        """Records that a request is sent to the engine."""
        figures = self._figures.setdefault(self._name(request.tenant), _Figures())
        figures.num_requests += 1
        figures.waiting.add(request.request_id)
        self._open[request.request_id] = figures

    def _name(self, tenant: str) -> str | None:
        """Returns the row of a tenant, replacing the one with the least usage, so that many names cannot hide a large user."""
        if tenant in self._figures or len(self._figures) - (None in self._figures) < MAX_TENANTS:
            return tenant
        idle = [name for name, figures in self._figures.items() if name is not None and figures.is_idle]
        if not idle:
            return None
        least = min(idle, key=lambda name: self._figures[name].num_tokens)
        self._figures.setdefault(None, _Figures()).add(self._figures.pop(least))
        return tenant

    def observe(
        self, event: Arrived | Scheduled | PrefixTaken | Preempted | Lost | Migrated | Ended | KVLoaded | PrefillDone
    ) -> None:
        """Records one event of a request."""
        if (figures := self._open.get(event.request_id)) is None:
            return
        match event:
            case Scheduled():
                figures.waiting.discard(event.request_id)
                figures.running.add(event.request_id)
                figures.num_prompt_tokens += 0 if event.resumed else event.num_prompt_tokens
            case Preempted() | Lost() | Migrated():
                figures.running.discard(event.request_id)
                figures.waiting.add(event.request_id)
            case Ended():
                figures.num_output_tokens += event.num_output_tokens
            case _:
                pass

    def end(self, request_id: str) -> None:
        """Records that the engine has finished a request."""
        if (figures := self._open.pop(request_id, None)) is not None:
            figures.running.discard(request_id)
            figures.waiting.discard(request_id)

    def report(self) -> TenantsReport:
        """Returns the current figures."""
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
    """Returns an empty collection if there are tenants and the profile permits operators to see them, else None."""
    return TenantFigures() if tells_tenants(gate) else None


def tells_tenants(gate: Gate) -> bool:
    """Whether operators may see figures of tenants."""
    return gate.asks_for_keys and gate.policy.allows("tenant-figures")
