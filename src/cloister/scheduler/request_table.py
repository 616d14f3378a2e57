"""Requests and sequences from arrival to end, their blocks and their place in the queue. Pure: no I/O, no clock.

Every request ends exactly once, and every block is released.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from cloister.kv import BlockPool, BlockTable, CacheQuotas, Leases, PrefixCache, PrefixKeys
from cloister.scheduler.policies.base import SchedulingPolicy
from cloister.scheduler.sequence import RequestState, SequenceRecord, Status
from cloister.types.events import Arrived, Ended, Event, Preempted, PrefillDone, PrefixTaken, Resumption
from cloister.types.request import FinishReason, Request
from cloister.types.scope import Scope, ScopeKind
from cloister.types.step import NewSequence

NUM_LEFT: Final = 256
"""Requests that left for another engine, of which this one knows that it has no more of their prompts to compute."""


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
        departures: ids of sequences that the runner must drop.
        left: ids of the latest requests that ended or left here and were for another engine.
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
        self.prefix_cache = PrefixCache(pool, keys.public, quotas) if keys is not None else None
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
        self._keys = keys
        self._adapters: set[str | None] = {None}  # digests of those that were ever used: each has a chain in every scope
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
        root, owner = self._root_of(request)
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

    def _root_of(self, request: Request) -> tuple[bytes, bytes | None]:
        """Returns the root of a request's prefix-key chain, and the owner of its cached blocks."""
        self._adapters.add(request.adapter)
        root = self._keys.root(request.scope, request.adapter) if self._keys is not None else b""
        # No later request can find the blocks of a scope with a single request: they have no owner, and are evicted first.
        scope = request.scope
        return root, None if scope.kind is ScopeKind.REQUEST else scope.owner or scope.seed

    def roots_of(self, scope: Scope) -> set[bytes]:
        """Returns the roots of all chains of a scope."""
        return set() if self._keys is None else {self._keys.root(scope, adapter) for adapter in self._adapters}

    def forget(self, roots: set[bytes]) -> None:
        """Drops chains. Requests that are here keep the blocks that they use, and no further ones of them are cached."""
        for state in self.request_states.values():
            state.is_forgotten |= state.root in roots
        for root in roots:
            if self.prefix_cache is not None:
                self.prefix_cache.forget(root)

    def chain_of(self, request: Request, token_ids: list[int], *, num_more: int = 0) -> tuple[list[bytes], bytes, bytes | None]:
        """Returns the keys whose blocks a request with these tokens could read, if it came, with their root and owner.

        Args:
            num_more: so many tokens, which are not known yet, follow before it comes.
        """
        root, owner = self._root_of(request)
        keys: list[bytes] = []
        if self._keys is not None and not _wants_every_position(request):
            documents = request.documents  # of a prompt with documents only the prefix moves between engines
            num_tokens = len(token_ids) + num_more - 1 if documents is None else documents.starts[0]
            num_blocks = num_tokens // self.pool.block_size
            is_base = request.adapter is None
            self._keys.extend(keys, root, token_ids, num_blocks, reads_public=is_base, images=request.images)
        return keys, root, owner

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
        is_last_use = sequence.status is Status.ENDED and sequence.request_state.request.scope.kind is ScopeKind.REQUEST
        if self.prefix_cache is not None and is_last_use:
            # The scope and its cached blocks end with the request; forks may know only their own end of the chain.
            self.prefix_cache.discard(sequence.keys)
            self.prefix_cache.discard(sequence.request_state.sequences[0].keys if sequence.request_state.sequences else [])
        if sequence.status is Status.PREEMPTING:
            sequence.num_planned = sequence.num_committed = sequence.num_pending = sequence.num_kept = 0
            sequence.is_behind = False
            sequence.may_restore = True
            sequence.layerwise = None
            self.wait(sequence)
        else:
            self.sequences.pop(sequence.seq_id, None)

    def renew(self, sequence: SequenceRecord, now: float) -> None:
        """Extends the deadline of a scope's cached blocks, because one of its requests uses them."""
        state = sequence.request_state
        if self.prefix_cache is not None and state.request.scope.lifetime_s is not None:
            self.prefix_cache.renew(state.root, now + state.request.scope.lifetime_s)

    def keep_blocks(self, sequence: SequenceRecord) -> None:
        """Offers full blocks to the prefix cache."""
        if self.prefix_cache is None or self._keys is None or sequence.request_state.request.pooling is not None:
            return  # many texts for pooling would evict the prefixes of chats
        if sequence.request_state.is_forgotten:
            return
        num_full = min(sequence.num_committed, len(sequence.token_ids)) // self.pool.block_size
        if sequence.layerwise is not None:
            is_done = sequence.num_committed >= sequence.request_state.num_prompt_tokens
            num_full = sequence.layerwise.num_kept if is_done else 0
        if num_full > sequence.num_kept:
            state = sequence.request_state
            self._extend_keys(sequence, num_full)
            self.deduplicate(sequence, num_full, sequence.num_kept)
            if self.pool.state_group is not None and num_full * self.pool.block_size == sequence.num_committed:
                self._replace_snapshot(sequence, num_full)
            if self.prefix_cache.tiers is not None and state.kept_root:
                self.prefix_cache.tiers.note_accesses(sequence.keys[sequence.num_kept : num_full], state.owner)
            self.prefix_cache.insert(
                sequence.keys[:num_full],
                table_of(sequence).blocks,
                sequence.num_kept,
                state.kept_root,
                state.owner,
                expires=state.request.scope.lifetime_s is not None,
                documents=state.request.documents,
            )
            sequence.num_kept = num_full

    def deduplicate(self, sequence: SequenceRecord, num_entries: int, start: int = 0) -> None:
        """Lets a model with states, whose hits may end before what is known does, hold known blocks once.

        Args:
            start: entries before it were offered to the cache, by this sequence itself.
        """
        if self.prefix_cache is not None and self.pool.state_group is not None:
            self._extend_keys(sequence, num_entries)
            self.prefix_cache.deduplicate(sequence.keys[:num_entries], table_of(sequence), start)

    def choose_snapshots(self, sequence: SequenceRecord) -> tuple[int, ...]:
        """Returns behind how many leading entries the state of an admitted sequence shall be kept: where the next request with
        this prompt can begin, and where this prompt leaves one that is known."""
        state = sequence.request_state
        if self.pool.state_group is None or self.prefix_cache is None or state.request.pooling is not None:
            return ()
        last = (state.num_prompt_tokens - 1) // self.pool.block_size
        known = self.prefix_cache.count_known(self.match_keys(sequence))
        return tuple(sorted({last, known} - {0}))

    def _replace_snapshot(self, sequence: SequenceRecord, num_entries: int) -> None:
        """Drops the state that was kept on the way to the one that is kept now: of those that nobody chose, only the latest is
        likely to be found again, and they are large."""
        assert self.prefix_cache is not None
        is_prompt = sequence.num_committed <= sequence.request_state.num_prompt_tokens
        if num_entries in sequence.snapshots or (is_prompt and not self.prefix_cache.is_tree):
            return  # without a tree nobody knows where prompts will part
        if sequence.last_snapshot:
            self.prefix_cache.drop_state(sequence.keys[sequence.last_snapshot - 1])
        sequence.last_snapshot = num_entries

    def reads_prefixes(self, request: Request) -> bool:
        """Whether a request looks up its prompt in the prefix cache."""
        return self.prefix_cache is not None and not _wants_every_position(request)

    def match_keys(self, sequence: SequenceRecord) -> list[bytes]:
        """Returns the keys whose blocks a waiting sequence may read: those before the last token, which must be computed for
        its logits."""
        if (
            self.prefix_cache is None
            or self._keys is None
            or (sequence.index == 0 and _wants_every_position(sequence.request_state.request))
        ):
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self.pool.block_size
        self._extend_keys(sequence, num_blocks)
        return sequence.keys[:num_blocks]

    def find_known_document(self, sequence: SequenceRecord) -> list[int]:
        """Returns cached blocks of the document that a running sequence comes to next; none if it comes to something else, or
        to no document's first position."""
        documents, start = sequence.request_state.request.documents, sequence.num_planned
        if documents is None or self.prefix_cache is None or start not in documents.starts:
            return []
        size, end = self.pool.block_size, documents.find_piece_end(start) or documents.end
        keys = self.match_keys(sequence)[: end // size]
        return self.prefix_cache.find_known(keys, table_of(sequence).blocks, start // size, documents)

    def take_cached(self, sequence: SequenceRecord, blocks: Sequence[int], now: float) -> None:
        """Gives a running sequence the blocks of the positions that it comes to next, which it need not compute."""
        state, num_tokens = sequence.request_state, len(blocks) * self.pool.block_size
        self.pool.share(blocks)
        table_of(sequence).blocks.extend(blocks)
        sequence.num_planned += num_tokens
        self._policy.skip(sequence, num_tokens)
        num_cached = min(state.num_prompt_tokens - 1, state.num_cached_tokens + num_tokens)
        if state.first_token_s is None and num_cached > state.num_cached_tokens:  # a preempted prompt may find the same again
            self.events.append(PrefixTaken(state.request.request_id, now, num_cached - state.num_cached_tokens))
            state.num_cached_tokens = num_cached

    def count_cached(self, sequence: SequenceRecord) -> int:
        """Returns how many tokens of a waiting sequence are cached, without changing the cache."""
        return (
            0 if self.prefix_cache is None else self.prefix_cache.match_length(self.match_keys(sequence)) * self.pool.block_size
        )

    def _extend_keys(self, sequence: SequenceRecord, num_blocks: int) -> None:
        if self._keys is not None:
            state = sequence.request_state
            request = state.request
            self._keys.extend(
                sequence.keys,
                state.root,
                sequence.token_ids,
                num_blocks,
                reads_public=request.adapter is None,
                images=request.images,
                documents=request.documents,
            )

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
        """Lets a request leave that another engine goes on with, without an end."""
        leaving = [sequence for sequence in state.sequences if sequence.status is not Status.ENDED]
        for sequence in leaving:
            state.num_open -= 1
            self._close(sequence, now)
        seq_ids = tuple(sequence.seq_id for sequence in leaving)
        self.events.append(PrefillDone(state.request.request_id, now, seq_ids, state.num_cached_tokens))

    def _close(self, sequence: SequenceRecord, now: float) -> None:
        """Takes out a sequence that is not counted as open any more, and its request with the last one."""
        state = sequence.request_state
        self._take_out(sequence)
        self.renew(sequence, now)
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
        """Leases what the sequences of a request have in the prefix cache so far."""
        for sequence in state.sequences:
            self._hold(sequence, now + hold_s)

    def _hold(self, sequence: SequenceRecord, until_s: float) -> None:
        request = sequence.request_state.request
        if self.leases is not None and sequence.num_kept:
            is_only = request.scope.kind is ScopeKind.REQUEST
            self._extend_keys(sequence, sequence.num_kept)
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


def kept_root(scope: Scope, root: bytes) -> bytes:
    """Returns the root under which blocks of a scope may be kept below the device; empty if its only request ends with it."""
    return b"" if scope.kind is ScopeKind.REQUEST and scope.lifetime_s is None else root


def _wants_every_position(request: Request) -> bool:
    """Whether its reply needs the outputs of every prompt position, so that its first sequence cannot use prefix hits."""
    return request.sampling.prompt_logprobs is not None or request.pooling is not None


def table_of(sequence: SequenceRecord) -> BlockTable:
    """The block table of a running sequence."""
    if sequence.table is None:
        raise AssertionError("a sequence without blocks was treated as running")
    return sequence.table
