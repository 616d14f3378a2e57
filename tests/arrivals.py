"""Requests of one program that arrive before the first step: what needs their company happens, although the thread that submits
them may be stopped for a while between two of them."""

from __future__ import annotations

from typing import Any

import pytest

from cloister.scheduler import Scheduler


def hold_steps_until(monkeypatch: pytest.MonkeyPatch, num_requests: int) -> None:
    """Engines of this process plan their first step when so many requests are there. Call it once all that come first ended."""
    plan = Scheduler.plan
    started: set[int] = set()

    def plan_together(scheduler: Scheduler, now: float) -> Any:
        if len(scheduler.requests) >= num_requests:
            started.add(id(scheduler))
        return plan(scheduler, now) if id(scheduler) in started else None

    monkeypatch.setattr(Scheduler, "plan", plan_together)
