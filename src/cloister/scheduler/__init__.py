"""Scheduler, admission, step budget, and scheduling policies (one file each). Pure: no I/O, no clock, no arrays.

Imports lazily: a front needs little of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.scheduler.budget import BUDGET_THREAT, BudgetConfig, StepBudget
    from cloister.scheduler.policies import POLICIES
    from cloister.scheduler.scheduler import Scheduler, SchedulerConfig
    from cloister.scheduler.sequence import RequestState
    from cloister.scheduler.step_cost import StepCost, StepSize

__all__ = [
    "BUDGET_THREAT",
    "POLICIES",
    "BudgetConfig",
    "RequestState",
    "Scheduler",
    "SchedulerConfig",
    "StepBudget",
    "StepCost",
    "StepSize",
]

_HOMES = {
    "budget": (
        "BUDGET_THREAT",
        "BudgetConfig",
        "StepBudget",
    ),
    "policies": ("POLICIES",),
    "scheduler": (
        "Scheduler",
        "SchedulerConfig",
    ),
    "sequence": ("RequestState",),
    "step_cost": (
        "StepCost",
        "StepSize",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
