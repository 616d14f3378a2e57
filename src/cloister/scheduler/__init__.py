"""Scheduler, admission, step budget, and scheduling policies (one file each). Pure: no I/O, no clock, no arrays."""

from cloister.scheduler.budget import BUDGET_THREAT, BudgetConfig, StepBudget, StepCost, StepSize
from cloister.scheduler.policies import POLICIES
from cloister.scheduler.scheduler import Scheduler, SchedulerConfig
from cloister.scheduler.sequence import RequestState

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
