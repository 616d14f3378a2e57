"""Request-level batching: the baseline that Orca is measured against. Pure."""

from __future__ import annotations

from cloister.sched.policies.base import BATCHING_THREAT, POLICIES
from cloister.sched.policies.fcfs import FirstComeFirstServed


@POLICIES.register("static", BATCHING_THREAT)
class Static(FirstComeFirstServed):
    """A batch starts together, and nobody joins before its last sequence ended."""

    def may_admit(self, num_running: int) -> bool:
        return num_running == 0
