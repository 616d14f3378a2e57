"""Requests and sequences from arrival to end, their blocks and their place in the queue. Pure: no I/O, no clock.

Every request ends exactly once, and every block is released.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from cloister.kv import BlockPool, CacheQuotas, Leases, PrefixKeys
from cloister.scheduler.policies.base import SchedulingPolicy
from cloister.scheduler.sequence import RequestState, SequenceRecord, Status, table_of
from cloister.scheduler.sequence_prefixes import SequencePrefixes, kept_root
from cloister.types.events import Arrived, Ended, Event, Preempted, PrefillDone, PrefixTaken, Resumption
from cloister.types.request import FinishReason, Request
from cloister.types.scope import ScopeKind
from cloister.types.step import NewSequence

NUM_LEFT: Final = 256
"""Number of requests handed over to other engines that are remembered, to end exports that still follow their prompts."""


class RequestTable:
    """Open requests: adds, forks and ends them.

    Args:
        pool: the KV blocks that sequences hold.
        policy: called when sequences are queued, start and leave.
        keys: computes prefix keys; None switches the prefix cache off.
        quotas: for each group of the pool, the quota of a scope; None for one shared cache.

    Attributes:
        request_states: requests by id.
        waiting_for_grammar: requests that wait for a grammar, and are not queued yet.
        held_searches: beam searches that wait for the share of all searches, and are not queued yet, in order of arrival.
        sequences: sequences by id, including ended ones that a plan in flight still names.
        running: sequences that are planned.
        prefixes: what sequences read from the prefix cache and offer to it.
        prefix_cache: the prefix cache; None if it is off.
        departures: ids of sequences that the runner must drop.
        left: ids of the latest requests that were computed for another engine and have ended or were handed over.
        events: events that were not collected yet.
        leases: blocks that stay cached for other engines; None without a prefix cache.
        on_end: called when the last sequence of a request leaves.
        on_preempt: called when a sequence is preempted, before its blocks are released.
        answers: complete answers of beam searches that were not collected yet, as new sequences.
    """

    def __init__(
        self, pool: BlockPool, policy: SchedulingPolicy, keys: PrefixKeys | None, quotas: list[CacheQuotas] | None = None
    ) -> None:
        self.pool = pool
        self.prefixes = SequencePrefixes(pool, keys, quotas)
        self.prefix_cache = self.prefixes.cache
        self.leases = Leases(pool, self.prefix_cache) if self.prefix_cache is not None else None
        self.on_end: Callable[[RequestState], None] = lambda state: None
        self.on_preempt: Callable[[SequenceRecord, float], None] = lambda sequence, now: None
        self.request_states: dict[str, RequestState] = {}
        self.waiting_for_grammar: dict[str, RequestState] = {}
        self.held_searches: dict[str, RequestState] = {}
        self.sequences: dict[int, SequenceRecord] = {}
        self.running: dict[int, SequenceRecord] = {}
        self.num_waiting = 0
        self.departures: list[int] = []
        self.left: deque[str] = deque(maxlen=NUM_LEFT)
        self.events: list[Event] = []
        self.answers: list[NewSequence] = []
        self._policy = policy
        self._deadlines: list[tuple[float, int, str]] = []
        self._next_seq = 0
        self._next_order = 0

    @property
    def next_deadline_s(self) -> float | None:
        """The next deadline of a request, a lease or cached blocks."""
        while self._deadlines and self._deadlines[0][2] not in self.request_states:
            heapq.heappop(self._deadlines)
        first = self._deadlines[0][0] if self._deadlines else None
        if self.prefix_cache is not None and self.prefix_cache.ttl.queue:
            due_s = self.prefix_cache.ttl.queue[0][0]
            first = due_s if first is None else min(first, due_s)
        if self.leases is not None and self.leases.by_name and (due := self.leases.next_end_s) is not None:
            first = due if first is None else min(first, due)
        return first

    def enlist(self, request: Request, now: float, seed: int, resumption: Resumption | None = None) -> RequestState:
        """Adds a request with its deadline.

        Args:
            resumption: what it had in an engine that was lost: it arrived, and had its first token, before `now`.

        Raises:
            ValueError: its id is in use, or its `n` is 0; the front refuses both earlier.
        """
        if request.request_id in self.request_states:
            raise ValueError("a request id may be used once only")
        if request.sampling.n < 1:
            raise ValueError("a request asks for at least one sequence")
        root, owner = self.prefixes.root_of(request)
        arrival_s = now if resumption is None else now - resumption.waited_s
        state = RequestState(request, now=arrival_s, order=self._next_order, seed=seed, root=root, owner=owner)
        state.kept_root = kept_root(request.scope, root)
        self._next_order += 1
        self.request_states[request.request_id] = state
        if resumption is None:
            self.events.append(Arrived(request.request_id, now, state.num_prompt_tokens))
        else:
            state.num_cached_tokens = resumption.num_cached_tokens
            state.scheduled_s = now if resumption.was_scheduled else None
            if resumption.first_token_after_s is not None:
                state.first_token_s = arrival_s + resumption.first_token_after_s
        heapq.heappush(self._deadlines, (state.deadline_s, state.order, request.request_id))
        return state

    def forget(self, roots: set[bytes]) -> None:
        """Drops chains. Open requests keep the blocks that they use, and cache no further ones."""
        for state in self.request_states.values():
            state.is_forgotten |= state.root in roots
        self.prefixes.forget(roots)

    def make_sequence(self, state: RequestState, index: int, token_ids: list[int], max_output: int) -> SequenceRecord:
        """Adds a sequence to a request, neither queued nor running yet."""
        sequence = SequenceRecord(self._next_seq, state, index, token_ids, max_output)
        self._next_seq += 1
        self.sequences[sequence.seq_id] = sequence
        state.sequences.append(sequence)
        return sequence

    def resume(self, state: RequestState, resumption: Resumption, max_output: int) -> None:
        """Adds all sequences of a request that had output in an engine that was lost, neither queued nor running yet. Each
        computes the prompt and its own output, as after a preemption."""
        for index, token_ids in enumerate(resumption.token_ids):
            sequence = self.make_sequence(state, index, [*state.request.token_ids, *token_ids], max_output)
            if index in resumption.ended:
                sequence.status = Status.ENDED
                state.num_open -= 1
                del self.sequences[sequence.seq_id]

    def wait_for_slots(self, state: RequestState) -> None:
        """Queues the sequences of a new request. A beam search is held until there is room in the share of all of them
        (`BeamSearches.admit`)."""
        if state.beams is not None:
            self.held_searches[state.request.request_id] = state
        else:
            self.queue(state)

    def queue(self, state: RequestState) -> None:
        """Queues the sequences of a new request, for slots that the policy gives."""
        for sequence in state.sequences:
            if sequence.status in (Status.NEW, Status.LOADING):
                self.wait(sequence)

    def wait(self, sequence: SequenceRecord) -> None:
        """Queues a sequence."""
        sequence.status = Status.WAITING
        self.num_waiting += 1
        self._policy.push(sequence)

    def run(self, sequence: SequenceRecord) -> None:
        """Adds a sequence to those that are planned."""
        sequence.status = Status.RUNNING
        self.running[sequence.seq_id] = sequence
        self._policy.join(sequence)

    def leave(self, sequence: SequenceRecord, status: Status) -> None:
        """Stops planning a running sequence; `release_blocks` releases its blocks."""
        del self.running[sequence.seq_id]
        self._policy.leave(sequence)
        sequence.status = status

    def preempt(self, sequence: SequenceRecord, now: float) -> None:
        """Preempts a running sequence and releases its blocks (recomputation, vLLM section 4.5), now or when no plan
        names it."""
        self.leave(sequence, Status.PREEMPTING)
        self.events.append(Preempted(sequence.request_state.request.request_id, now))
        self.on_preempt(sequence, now)
        self.release_blocks(sequence)

    def release_blocks(self, sequence: SequenceRecord | None) -> None:
        """Releases the blocks of a sequence that left, once no plan in flight names it."""
        if sequence is None or sequence.num_in_flight or sequence.status in (Status.RUNNING, Status.WAITING):
            return
        if sequence.table is not None:
            sequence.table.close()
            sequence.table = None
            self.departures.append(sequence.seq_id)
        if sequence.status is Status.ENDED:
            self.prefixes.discard(sequence)
        if sequence.status is Status.PREEMPTING:
            sequence.num_planned = sequence.num_committed = sequence.num_pending = sequence.num_kept = 0
            sequence.is_behind = False
            sequence.may_restore = True
            sequence.layerwise = None
            self.wait(sequence)
        else:
            self.sequences.pop(sequence.seq_id, None)

    def take_cached(self, sequence: SequenceRecord, blocks: Sequence[int], now: float) -> None:
        """Gives a running sequence the cached blocks of its next positions, so that it need not compute them."""
        state, num_tokens = sequence.request_state, len(blocks) * self.pool.block_size
        self.pool.share(blocks)
        table_of(sequence).blocks.extend(blocks)
        sequence.num_planned += num_tokens
        self._policy.skip(sequence, num_tokens)
        num_cached = min(state.num_prompt_tokens - 1, state.num_cached_tokens + num_tokens)
        if state.first_token_s is None and num_cached > state.num_cached_tokens:  # a preempted prompt may find the same again
            self.events.append(PrefixTaken(state.request.request_id, now, num_cached - state.num_cached_tokens))
            state.num_cached_tokens = num_cached

    def end_request(self, state: RequestState, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Ends every open sequence of a request, including those not forked yet."""
        if state.beams is not None:
            self.drop_beams(state)
        while state.num_unforked:
            self.make_sequence(state, len(state.sequences), [], 0)
        for sequence in list(state.sequences):
            self.end(sequence, reason, now, error=error)

    def carry_on(self, parent: SequenceRecord, index: int, token_id: int) -> SequenceRecord:
        """Returns a new running sequence: a beam with one more token, which shares the blocks of its parent."""
        child = self.make_sequence(parent.request_state, index, [*parent.token_ids, token_id], parent.max_output)
        child.table = table_of(parent).fork()
        child.table.num_sent = 0
        child.num_planned = child.num_committed = parent.num_committed
        child.num_kept, child.keys = parent.num_kept, parent.keys[:]
        child.is_unknown = True
        self.run(child)
        return child

    def drop(self, sequence: SequenceRecord) -> None:
        """Ends a beam without an event."""
        self._take_out(sequence)
        self.release_blocks(sequence)

    def _take_out(self, sequence: SequenceRecord) -> None:
        """Removes an ending sequence from the running or waiting ones."""
        if sequence.status is Status.RUNNING:
            self.leave(sequence, Status.ENDED)
        elif sequence.status is Status.WAITING:
            self.num_waiting -= 1
        sequence.status = Status.ENDED

    def drop_beams(self, state: RequestState) -> None:
        """Ends the beams of a request, leaving it without sequences."""
        for sequence in state.sequences:
            self.drop(sequence)
        state.sequences, state.beams = [], None

    def end(
        self,
        sequence: SequenceRecord,
        reason: FinishReason,
        now: float,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """Ends a sequence once; the event of the request's last one has `last` set."""
        if sequence.status is Status.ENDED:
            return
        state = sequence.request_state
        state.num_open -= 1
        self.events.append(
            Ended(
                request_id=state.request.request_id,
                seq_id=sequence.seq_id,
                index=sequence.index,
                now_s=now,
                reason=reason,
                num_prompt_tokens=state.num_prompt_tokens,
                num_output_tokens=max(0, sequence.num_output),
                num_cached_tokens=state.num_cached_tokens,
                arrival_s=state.arrival_s,
                first_token_s=state.first_token_s,
                last=state.num_open == 0,
                stop_reason=stop_reason,
                error=error,
                num_beam_tokens=state.num_beam_tokens if state.num_open == 0 else 0,
            )
        )
        self._close(sequence, now)

    def hand_over(self, state: RequestState, now: float) -> None:
        """Hands a request over to another engine: its sequences leave without an `Ended` event."""
        leaving = [sequence for sequence in state.sequences if sequence.status is not Status.ENDED]
        for sequence in leaving:
            state.num_open -= 1
            self._close(sequence, now)
        seq_ids = tuple(sequence.seq_id for sequence in leaving)
        self.events.append(PrefillDone(state.request.request_id, now, seq_ids, state.num_cached_tokens))

    def _close(self, sequence: SequenceRecord, now: float) -> None:
        """Removes a sequence that no longer counts as open, and with the last one its request."""
        state = sequence.request_state
        self._take_out(sequence)
        self.prefixes.renew(sequence, now)
        if state.hold_kv_s:
            self._hold(sequence, now + state.hold_kv_s)
        if state.num_open == 0:
            del self.request_states[state.request.request_id]
            if state.prefill_only:
                self.left.append(state.request.request_id)
            self.waiting_for_grammar.pop(state.request.request_id, None)
            self.held_searches.pop(state.request.request_id, None)
            self.on_end(state)
        self.release_blocks(sequence)

    def hold(self, state: RequestState, hold_s: float, now: float) -> None:
        """Leases the cached blocks of a request's sequences."""
        for sequence in state.sequences:
            self._hold(sequence, now + hold_s)

    def _hold(self, sequence: SequenceRecord, until_s: float) -> None:
        request = sequence.request_state.request
        if self.leases is not None and sequence.num_kept:
            is_only = request.scope.kind is ScopeKind.REQUEST
            self.prefixes.extend_keys(sequence, sequence.num_kept)
            self.leases.take(request.request_id, sequence.keys[: sequence.num_kept], until_s, of_one_request=is_only)

    def expire(self, now: float) -> None:
        """Ends requests whose deadline has passed, and drops cached blocks of scopes whose deadline has passed."""
        while (deadline := self.next_deadline_s) is not None and deadline <= now:
            if self.leases is not None:
                self.leases.expire(now)
            if self.prefix_cache is not None and self.prefix_cache.ttl.queue:
                self.prefix_cache.expire(now)
            if not self._deadlines or self._deadlines[0][0] > now:
                return
            state = self.request_states.get(heapq.heappop(self._deadlines)[2])
            if state is None:
                continue
            waited = now - state.arrival_s
            message = (
                f"the request was not complete after {waited:.1f} s, its deadline; try again when the server is "
                "less busy, ask for fewer tokens, or raise --request-timeout-s"
            )
            self.end_request(state, FinishReason.TIMEOUT, now, error=message)
