"""Fair share between tenants by virtual token counters (VTC, Sheng et al. 2024, algorithm 2), with bounded credit. Pure.

Each tenant has a counter of the work done for it. The tenant with the smallest counter goes first. A tenant that comes back
after a rest may lag behind the others by `burst` at most: enough that one who stays below its share is served at once, not
so much that a rest can be saved up.
"""

from __future__ import annotations

from collections import deque

from cloister.sched.policies.base import MIN_SWEEP, POLICIES, PRIORITY_THREAT
from cloister.sched.sequence import Sequence, Status

DECODE_WEIGHT = 2.0
"""Work of a decoded token in prefill tokens (VTC, section 4.1)."""


class _Tenant:
    __slots__ = ("counter", "num_running", "queue", "sweep_at")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.num_running = 0
        self.queue: deque[Sequence] = deque()
        self.sweep_at = MIN_SWEEP


@POLICIES.register("fair", PRIORITY_THREAT)
class Fair:
    """Tenants share the engine; one that floods it waits for itself.

    Args:
        burst: by how much work a tenant may lag behind, in prefill tokens.
        quantum: a tenant that lags behind the one farthest ahead by more than this goes before it.
    """

    def __init__(self, burst: float = 16384.0, quantum: float = 2048.0) -> None:
        self._burst = burst
        self._quantum = quantum
        self._tenants: dict[str, _Tenant] = {}
        self._floor = 0.0
        self._ahead: float | None = None

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
        self._tenants[sequence.group.request.tenant].num_running += 1
        self._ahead = None

    def leave(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.group.request.tenant]
        self._survey()  # while it still counts: who comes when all are gone must not gain from its work
        tenant.num_running -= 1
        self._ahead = None
        if not tenant.num_running and not tenant.queue:
            self._forget_idle()

    def _tenant(self, sequence: Sequence) -> _Tenant:
        name = sequence.group.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(0.0)
        if not tenant.num_running and not tenant.queue:
            self._survey()
            tenant.counter = max(tenant.counter, self._floor - self._burst)
        return tenant

    def _counter(self, sequence: Sequence) -> float:
        return self._tenants[sequence.group.request.tenant].counter

    def _lags(self, tenant: _Tenant) -> bool:
        return tenant.counter + self._quantum < self._survey()

    def _survey(self) -> float:
        """Returns the counter of the tenant farthest ahead, and lets the floor follow the one farthest behind."""
        if self._ahead is None:
            active = [t.counter for t in self._tenants.values() if t.num_running or t.queue]
            self._ahead = max(active, default=0.0)
            self._floor = max(self._floor, min(active, default=0.0))
        return self._ahead

    def _forget_idle(self) -> None:
        """Drops tenants whose counter the lift would replace anyway (the floor never sinks), so that names do not pile up."""
        idle = [n for n, t in self._tenants.items() if not t.num_running and not t.queue]
        for name in idle:
            if self._tenants[name].counter <= self._floor - self._burst:
                del self._tenants[name]

    @staticmethod
    def _head(tenant: _Tenant) -> Sequence | None:
        while tenant.queue and tenant.queue[0].status is not Status.WAITING:
            tenant.queue.popleft()
        return tenant.queue[0] if tenant.queue else None
