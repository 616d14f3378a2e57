"""Fair share between tenants by virtual token counters (VTC, Sheng et al. 2024, algorithm 2), with start tags. Pure.

Each tenant has a counter of the work done for it. The tenant with the smallest counter goes first. A tenant that was idle
starts at the virtual time: absence earns no credit, and neither does an engine that only one tenant used. It starts earlier
only by work that another tenant has running on several sequences at once, up to `burst`: virtual time is then a start tag
(start-time fair queueing, Goyal et al. 1996, section 2), so that a flood which took every slot makes room at once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from cloister.sched.policies.base import MIN_SWEEP, POLICIES, PRIORITY_THREAT
from cloister.sched.sequence import Sequence, Status

DECODE_WEIGHT = 2.0
"""Work of a decoded token in prefill tokens (VTC, section 4.1)."""


class _Tenant:
    """Its counter, and the counter at which each of its running sequences started, oldest first."""

    __slots__ = ("counter", "queue", "starts", "sweep_at")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.starts: dict[int, float] = {}
        self.queue: deque[Sequence] = deque()
        self.sweep_at = MIN_SWEEP

    @property
    def is_active(self) -> bool:
        return bool(self.starts or self.queue)

    @property
    def crowd_start(self) -> float:
        """Counter at which its second sequence started: what it did since then, it did beside itself."""
        return next(itertools.islice(self.starts.values(), 1, None), self.counter)


@POLICIES.register("fair", PRIORITY_THREAT)
class Fair:
    """Tenants share the engine; one that floods it waits for itself.

    Args:
        burst: most work that a flood which is running may be set back by, in prefill tokens.
        quantum: a tenant that lags behind the one farthest ahead by more than this goes before it.
    """

    def __init__(self, burst: float = 16384.0, quantum: float = 2048.0) -> None:
        self._burst = burst
        self._quantum = quantum
        self._tenants: dict[str, _Tenant] = {}
        self._floor = 0.0
        self._ahead: float | None = None

    def attach_cache(self, num_cached: Callable[[Sequence], int]) -> None:
        """The order does not follow the cache."""

    def push(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        self._ahead = None
        if sequence.num_output or sequence.group.scheduled_s is not None:
            tenant.queue.appendleft(sequence)  # preempted: it was first before
        else:
            tenant.queue.append(sequence)
        if len(tenant.queue) >= tenant.sweep_at:
            tenant.queue = deque(waiting for waiting in tenant.queue if waiting.status is Status.WAITING)
            tenant.sweep_at = max(MIN_SWEEP, 2 * len(tenant.queue))

    def peek(self) -> Sequence | None:
        waiting = [tenant for tenant in self._tenants.values() if self._head(tenant) is not None]
        return self._head(min(waiting, key=lambda tenant: tenant.counter)) if waiting else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        if sequence is None:
            raise IndexError("nobody waits")
        self._tenant(sequence).queue.popleft()
        return sequence

    def may_admit(self, num_running: int) -> bool:
        return True

    def level(self, sequence: Sequence) -> int:
        return 0 if self._lags(self._tenants[sequence.group.request.tenant]) else 1

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return self._counter(sequence), sequence.group.order

    def displaces(self, candidate: Sequence, victim: Sequence) -> bool:
        if self.level(candidate) >= self.level(victim):
            return False
        # It must still lag when its own start and the victim's second one are paid for: else two tenants with long
        # prompts would take each other's place for ever, and compute nothing but beginnings.
        ahead = self._counter(victim) - self._counter(candidate)
        return ahead > self._quantum + len(candidate.token_ids) + victim.num_planned

    def charge(self, sequence: Sequence, num_prefill: int, num_decode: int) -> None:
        self._tenants[sequence.group.request.tenant].counter += num_prefill + DECODE_WEIGHT * num_decode
        self._ahead = None

    def join(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.group.request.tenant]
        tenant.starts[sequence.seq_id] = tenant.counter
        self._ahead = None

    def leave(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.group.request.tenant]
        self._survey()  # while it still counts: who comes when all are gone must not gain from its work
        del tenant.starts[sequence.seq_id]
        self._ahead = None
        if not tenant.is_active:
            self._forget_idle()

    def _tenant(self, sequence: Sequence) -> _Tenant:
        name = sequence.group.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(0.0)
        if not tenant.is_active:
            tenant.counter = max(tenant.counter, self._start())
        return tenant

    def _start(self) -> float:
        """Returns the virtual time: where a tenant starts that was idle."""
        self._survey()
        crowds = [t.crowd_start for t in self._tenants.values() if len(t.starts) > 1]
        return min(self._floor, max(self._floor - self._burst, min(crowds, default=self._floor)))

    def _counter(self, sequence: Sequence) -> float:
        return self._tenants[sequence.group.request.tenant].counter

    def _lags(self, tenant: _Tenant) -> bool:
        return tenant.counter + self._quantum < self._survey()

    def _survey(self) -> float:
        """Returns the counter of the tenant farthest ahead, and lets the floor follow the one farthest behind."""
        if self._ahead is None:
            active = [t.counter for t in self._tenants.values() if t.is_active]
            self._ahead = max(active, default=0.0)
            self._floor = max(self._floor, min(active, default=0.0))
        return self._ahead

    def _forget_idle(self) -> None:
        """Drops tenants whose counter the virtual time would replace anyway (it never sinks), so that names do not pile up."""
        idle = [n for n, t in self._tenants.items() if not t.is_active]
        for name in idle:
            if self._tenants[name].counter <= self._floor - self._burst:
                del self._tenants[name]

    @staticmethod
    def _head(tenant: _Tenant) -> Sequence | None:
        while tenant.queue and tenant.queue[0].status is not Status.WAITING:
            tenant.queue.popleft()
        return tenant.queue[0] if tenant.queue else None
