"""Scheduling policies, one a file, found by name."""

from cloister.scheduler.policies import fair, fcfs, lpm, priority, static
from cloister.scheduler.policies.base import POLICIES, SchedulingPolicy

__all__ = ["POLICIES", "SchedulingPolicy", "fair", "fcfs", "lpm", "priority", "static"]
