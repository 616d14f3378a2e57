"""Fair share between tenants by virtual token counters (VTC, Sheng et al. 2024, algorithm 2), with start tags. Pure.

Each tenant has a counter of the work done for it. The tenant with the smallest counter goes first. A tenant that was idle
starts at the virtual time: absence earns no credit, and neither does an engine that only one tenant used. It starts earlier
only by the work that another tenant has in progress on several sequences at once, up to `BURST`: virtual time is then a start
tag (start-time fair queueing, Goyal et al. 1996, section 2), so that a flood which holds every slot yields at once. A tenant's
requests queued behind its first one count as well, up to `BURST`, because nothing of a new flood is computed yet. They only put
tenants first that have received no more work: otherwise short requests under many names would overtake long ones.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection

from cloister.scheduler.policies.base import MIN_SWEEP, POLICIES, PRIORITY_THREAT, SchedulingPolicy
from cloister.scheduler.sequence import RequestState, SequenceRecord, Status

DECODE_WEIGHT = 2.0
"""Work of a decoded token in prefill tokens (VTC, section 4.1)."""
BURST = 16384.0
"""Maximum work by which a running flood is set back, in prefill tokens."""
QUANTUM = 2048.0
"""A tenant that lags behind the leading one by more than this goes first, in prefill tokens."""
_NUM_TURNS = 1024
"""Number of tenants whose last turns of beam searches are remembered."""


class _Tenant:
    """A tenant's counter and its backlog.

    Attributes:
        starts: by seq_id, the counter at which each of its running sequences started, oldest first.
        num_uncomputed: by seq_id, the prompt tokens that each of them still has to compute.
        backlog: requested prompt tokens that are not computed yet; ended waiting sequences count until they are swept out.
    """

    __slots__ = ("backlog", "counter", "num_uncomputed", "queue", "starts", "sweep_at")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.starts: dict[int, float] = {}
        self.num_uncomputed: dict[int, int] = {}
        self.queue: deque[SequenceRecord] = deque()
        self.backlog = 0
        self.sweep_at = MIN_SWEEP

    @property
    def is_active(self) -> bool:
        return bool(self.starts or self.queue)

    @property
    def crowd_start(self) -> float:
        """Counter at which its second sequence started: since then it has run several sequences concurrently."""
        return next(itertools.islice(self.starts.values(), 1, None), self.counter)

    @property
    def queued_behind(self) -> int:
        """Its backlog without the rest of its oldest request: a start tag counts the work before a request."""
        if self.starts:
            return self.backlog - self.num_uncomputed[next(iter(self.starts))]
        return self.backlog - (len(self.queue[0].token_ids) if self.queue else 0)

    def enqueue(self, sequence: SequenceRecord, *, first: bool) -> None:
        (self.queue.appendleft if first else self.queue.append)(sequence)
        self.backlog += len(sequence.token_ids)
        if len(self.queue) >= self.sweep_at:
            self.queue = deque(waiting for waiting in self.queue if waiting.status is Status.WAITING)
            self.backlog = sum(len(waiting.token_ids) for waiting in self.queue) + sum(self.num_uncomputed.values())
            self.sweep_at = max(MIN_SWEEP, 2 * len(self.queue))

    def dequeue(self) -> None:
        self.backlog -= len(self.queue.popleft().token_ids)

    def head(self) -> SequenceRecord | None:
        """Returns its first waiting sequence, and drops ended ones before it."""
        while self.queue and self.queue[0].status is not Status.WAITING:
            self.dequeue()
        return self.queue[0] if self.queue else None


@POLICIES.register("fair", PRIORITY_THREAT)
class Fair(SchedulingPolicy):
    """Fair sharing between tenants: a tenant that floods the engine delays only itself."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._floor = 0.0
        self._ahead: tuple[float, tuple[float, float]] | None = None
        self._turns: dict[str, int] = {}  # by tenant, when a search of it was queued last
        self._num_turns = 0

    def push(self, sequence: SequenceRecord) -> None:
        tenant = self._tenant(sequence)
        if sequence.request_state.beams is not None:
            self._note_turn(sequence.request_state.request.tenant)
        self._ahead = None
        was_preempted = sequence.num_output > 0 or sequence.request_state.scheduled_s is not None
        tenant.enqueue(sequence, first=was_preempted)

    def peek(self) -> SequenceRecord | None:
        waiting = [tenant for tenant in self._tenants.values() if tenant.head() is not None]
        return min(waiting, key=lambda tenant: (not self._lags(tenant), tenant.counter)).head() if waiting else None

    def pop(self) -> SequenceRecord:
        sequence = self.peek()
        if sequence is None:
            raise IndexError("no sequence waits")
        self._tenant(sequence).dequeue()
        self._ahead = None
        return sequence

    def choose_search(self, held: Collection[RequestState]) -> RequestState:
        """Tenants take turns: searches differ so much in length that a tenant's lag says little about its next one."""
        return min(held, key=lambda state: (self._turns.get(state.request.tenant, 0), state.order))

    def _note_turn(self, tenant: str) -> None:
        """Notes that a tenant's search is queued. Turns outlive the searches: otherwise a tenant would be first again whenever
        it comes back. Of too many turns the oldest is forgotten; its tenant is among the first anyway."""
        self._num_turns += 1
        self._turns.pop(tenant, None)
        self._turns[tenant] = self._num_turns
        if len(self._turns) > _NUM_TURNS:
            del self._turns[next(iter(self._turns))]

    def level(self, sequence: SequenceRecord) -> int:
        return 0 if self._lags(self._tenant_of(sequence)) else 1

    def rank(self, sequence: SequenceRecord) -> tuple[float, int]:
        return self._tenant_of(sequence).counter, sequence.request_state.order

    def may_preempt(self, candidate: SequenceRecord, victim: SequenceRecord) -> bool:
        if self.level(candidate) >= self.level(victim):
            return False
        # It must still lag after its own start and the victim's restart are charged. Otherwise two tenants with long prompts
        # would preempt each other forever, and compute only the beginnings of prompts.
        winner, loser = self._tenant_of(candidate), self._tenant_of(victim)
        ahead = loser.counter - winner.counter
        if len(loser.starts) > 1:
            ahead = max(ahead, self._committed(loser) - self._committed(winner))
        return ahead > QUANTUM + len(candidate.token_ids) + victim.num_planned

    def charge(self, sequence: SequenceRecord, num_prefill: int, num_decode: int) -> None:
        self._tenant_of(sequence).counter += num_prefill + DECODE_WEIGHT * num_decode
        self.skip(sequence, num_prefill)

    def skip(self, sequence: SequenceRecord, num_prefill: int) -> None:
        tenant = self._tenant_of(sequence)
        num_less = min(num_prefill, tenant.num_uncomputed[sequence.seq_id])
        tenant.num_uncomputed[sequence.seq_id] -= num_less
        tenant.backlog -= num_less
        self._ahead = None

    def join(self, sequence: SequenceRecord) -> None:
        tenant = self._tenant_of(sequence)
        tenant.starts[sequence.seq_id] = tenant.counter
        tenant.num_uncomputed[sequence.seq_id] = len(sequence.token_ids) - sequence.num_planned
        tenant.backlog += tenant.num_uncomputed[sequence.seq_id]
        self._ahead = None

    def leave(self, sequence: SequenceRecord) -> None:
        tenant = self._tenant_of(sequence)
        self._survey()  # while it still counts: a tenant that arrives after all have left must not gain from its work
        del tenant.starts[sequence.seq_id]
        tenant.backlog -= tenant.num_uncomputed.pop(sequence.seq_id)
        self._ahead = None
        if not tenant.is_active:
            self._forget_idle()

    def _tenant(self, sequence: SequenceRecord) -> _Tenant:
        name = sequence.request_state.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(0.0)
        if not tenant.is_active:
            tenant.counter = max(tenant.counter, self._start())
        return tenant

    def _start(self) -> float:
        """Returns the virtual time, at which an idle tenant starts."""
        self._survey()
        crowds = [t.crowd_start for t in self._tenants.values() if len(t.starts) > 1]
        return min(self._floor, max(self._floor - BURST, min(crowds, default=self._floor)))

    def _tenant_of(self, sequence: SequenceRecord) -> _Tenant:
        return self._tenants[sequence.request_state.request.tenant]

    def _committed(self, tenant: _Tenant) -> float:
        """Returns its counter plus the prompt tokens queued behind its oldest request, up to `BURST`.

        So a flood is ahead of others before anything of it is computed, as with start tags, where each request of a flood is
        later by the work of those before it.
        """
        return tenant.counter + min(BURST, tenant.queued_behind)

    def _lags(self, tenant: _Tenant) -> bool:
        done, (committed, counter) = self._survey()
        if tenant.counter + QUANTUM < done:
            return True
        return self._committed(tenant) + QUANTUM < committed and tenant.counter <= counter

    def _survey(self) -> tuple[float, tuple[float, float]]:
        """Returns how far the leading tenant is: by work done, and by work done plus backlog. Raises the floor to the counter
        of the last tenant."""
        if self._ahead is None:
            active = [tenant for tenant in self._tenants.values() if tenant.is_active]
            done = max((tenant.counter for tenant in active), default=0.0)
            self._ahead = done, max(((self._committed(tenant), tenant.counter) for tenant in active), default=(0.0, 0.0))
            self._floor = max(self._floor, min((tenant.counter for tenant in active), default=0.0))
        return self._ahead

    def _forget_idle(self) -> None:
        """Drops tenants whose counter the virtual time would replace anyway (it never decreases), so that names do not
        accumulate."""
        idle = [n for n, t in self._tenants.items() if not t.is_active]
        for name in idle:
            if self._tenants[name].counter <= self._floor - BURST:
                del self._tenants[name]
