"""Scheduling policies, one per file, selected by name."""

from cloister.scheduler.policies import fair, fcfs, lpm, priority, static
from cloister.scheduler.policies.base import POLICIES

__all__ = ["POLICIES", "fair", "fcfs", "lpm", "priority", "static"]
