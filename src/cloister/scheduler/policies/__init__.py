"""Scheduling policies, one per file, selected by name."""

from cloister.scheduler.policies import cfs, fair, fcfs, lpm, mlfq, prefill_only, priority, qoe, reorder, static
from cloister.scheduler.policies.base import POLICIES, EngineView

__all__ = [
    "POLICIES",
    "EngineView",
    "cfs",
    "fair",
    "fcfs",
    "lpm",
    "mlfq",
    "prefill_only",
    "priority",
    "qoe",
    "reorder",
    "static",
]
