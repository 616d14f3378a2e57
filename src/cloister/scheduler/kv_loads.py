"""Loads KV from other engines (decisions/0022) and tiers (decisions/0029) into the prefix cache. Pure: no I/O, no clock; it
takes `now`.

A load asks for the keys of a request (`queries`), has steps write the objects that arrive into its own blocks, and inserts
these into the prefix cache, where they are like blocks computed here. The load holds them until its request starts, unless a
running sequence needs blocks (`reclaim_one`). What does not arrive is computed.

A load may follow a prompt that another engine is computing (decisions/0037): its request comes when that engine has the first
token, and waits for the rest. Blocks for the whole prompt are promised to the load from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from cloister.kv import NO_BLOCK, KVObject, KVQuery
from cloister.kv.objects import RestoredEntry
from cloister.kv.two_sided import TwoSidedRestore
from cloister.scheduler.kv_load import KVLoad
from cloister.scheduler.planned_step import PlannedStep
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import RequestState, SequenceRecord, Status, table_of
from cloister.scheduler.sequence_prefixes import kept_root
from cloister.types.events import KVLoaded
from cloister.types.request import Request
from cloister.types.scope import ScopeKind
from cloister.types.step import BlockLoad

PREFETCH_HOLD_S: Final = 10.0
"""KV prefetched for a request stays leased in the cache for this time."""
OVERHEAD_WEIGHT: Final = 0.25
"""Weight of the last load in the mean overhead of loads (time besides the transfer)."""
OVERHEAD_DECAY: Final = 0.95
"""Factor on that mean for each load that was declined: a wrong mean must not prevent loads forever."""
MAX_STEP_BYTES: Final = 8 * 2**20
"""Maximum KV that one step imports; at least one entry."""


class KVLoads:
    """All loads of one engine, by the id of their request.

    Args:
        requests: the scheduler's requests.

    Attributes:
        queries: queries that the engine has yet to send.
        loading: loads that have not ended, by request id.
        overhead_s: measured mean time of a load from a tier besides reading, while no sequence runs: it needs steps of its own.
            `note_declined` lowers it.
        cancelled, cancelled_reads: ids of ended loads whose transfer from another engine, or read from a tier, the engine must
            cancel.
        on_copied: called with each ended load of a copy and the time, before its blocks are released.
    """

    def __init__(self, requests: RequestTable) -> None:
        self.queries: list[KVQuery] = []
        self.overhead_s = 0.0
        self.cancelled: list[str] = []
        self.cancelled_reads: list[str] = []
        self.on_copied: Callable[[KVLoad, float], None] = lambda load, now: None
        self._requests = requests
        self._pool = requests.pool
        self._full = next((number for number, group in enumerate(self._pool.groups) if group.window is None), None)
        self.loading: dict[str, KVLoad] = {}
        self._held: dict[str, KVLoad] = {}  # ended; its request waits for a slot
        requests.on_end, requests.on_preempt = self._note_ended, self._note_preempted

    def __len__(self) -> int:
        """Loads that have not ended."""
        return len(self.loading)

    def is_loading(self, request_id: str) -> bool:
        """Whether there is a load of this name, for a request or a prefetch."""
        return request_id in self.loading

    def is_awaited(self, request_id: str) -> bool:
        """Whether a request waits for a load; prefetches do not count."""
        load = self.loading.get(request_id)
        return load is not None and load.state is not None

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of KV that have arrived and are in no plan yet."""
        return sum(found.num_bytes for load in self.loading.values() for found in load.arrived)

    @property
    def next_deadline_s(self) -> float | None:
        """Next deadline of a load."""
        return min((load.deadline_s for load in self.loading.values() if not load.waits_for_steps), default=None)

    @property
    def is_restoring(self) -> bool:
        """Whether blocks are promised to loads from a tier, which end soon."""
        return any(any(load.num_promised) for load in self.loading.values() if load.tier)

    def count_promised(self) -> list[int]:
        """Returns the blocks of each group that loads still need, from a tier or following a prompt."""
        promised = [load.num_promised for load in self.loading.values() if load.num_promised]
        return [sum(counts) for counts in zip(*promised, strict=True)] if promised else [0] * self._pool.num_groups

    def begin(self, state: RequestState, now: float) -> None:
        """Begins the load of a new request, which is queued when the load ends."""
        sequences = [sequence for sequence in state.sequences if sequence.status is Status.NEW]
        keys = self._requests.prefixes.match_keys(max(sequences, key=lambda sequence: len(sequence.token_ids)))
        for sequence in sequences:
            sequence.status = Status.LOADING
        load = self.loading.get(state.request.request_id)
        if load is not None and load.follows and load.state is None and load.is_complete is not False and load.keys == keys:
            load.begin_wait(state, now)
            return
        self._ask(KVLoad(state.request, state, keys, state.root, state.owner, now), now)

    def begin_restore(
        self, sequence: SequenceRecord, keys: Sequence[bytes], tier: str, num_promised: list[int], timeout_s: float, now: float
    ) -> None:
        """Begins a load from a tier for the next waiting sequence, which is queued again when the load ends.

        Args:
            keys: of the longest hit with the tier's blocks.
            num_promised: blocks of each group that the load brings.
        """
        state = sequence.request_state
        sequence.status = Status.LOADING
        load = KVLoad(state.request, state, keys, state.root, state.owner, now)
        load.is_alone = not self._requests.running
        load.tier, load.num_promised, load.deadline_s = tier, num_promised, min(load.deadline_s, now + timeout_s)
        self._begin(load, now)

    def begin_two_sided(
        self,
        sequence: SequenceRecord,
        keys: Sequence[bytes],
        restore: TwoSidedRestore,
        tier: str,
        timeout_s: float,
        now: float,
    ) -> None:
        """Begins a load of the end of a prefix while a running sequence computes its front (`scheduler.two_sided_restores`).

        Args:
            keys: of the whole prefix.
        """
        state = sequence.request_state
        load = KVLoad(state.request, state, keys, state.root, state.owner, now)
        load.tier, load.restore, load.deadline_s = tier, restore, min(load.deadline_s, now + timeout_s)
        load.table = [NO_BLOCK] * len(load.keys)
        load.next_entry = len(load.keys) - 1
        self.loading[state.request.request_id] = load

    def find_two_sided(self, sequence: SequenceRecord) -> KVLoad | None:
        """Returns the two-sided load of a running sequence; None if there is none."""
        load = self.loading.get(sequence.request_state.request.request_id) if self.loading else None
        return None if load is None or load.restore is None else load

    def drop_late(self, load: KVLoad, front: int) -> None:
        """Drops objects before entry `front`, which the sequence has computed itself."""
        while load.arrived and load.arrived[-1].header.entry < front:
            load.arrived.pop()

    def count_missing(self, sequence: SequenceRecord) -> int:
        """Returns the table entries that a running sequence must still allocate for its known tokens, without those loaded for
        it."""
        num_missing = table_of(sequence).num_missing(len(sequence.token_ids))
        load = self.find_two_sided(sequence)
        return num_missing if load is None else num_missing - len(load.table) + load.table.count(NO_BLOCK)

    def end_two_sided(self, load: KVLoad, now: float) -> None:
        """Ends a two-sided load whose sequence has taken the blocks that arrived."""
        self._drop_pending(load)
        load.is_complete = bool(load.is_complete)
        self._end(load, now)

    def predict_overhead_s(self) -> float:
        """Returns the predicted seconds of a load from a tier besides reading; 0 while sequences run, as the load needs no
        steps of its own then."""
        return 0.0 if self._requests.running else self.overhead_s

    def note_declined(self) -> None:
        """Notes that a load was declined because computing is faster."""
        self.overhead_s *= OVERHEAD_DECAY

    def prefetch(self, request: Request, token_ids: list[int], now: float) -> None:
        """Begins a load for a request that may come later."""
        keys, root, owner = self._requests.prefixes.chain_of(request, token_ids)
        self._ask(KVLoad(request, None, keys, root, owner, now), now)

    def copy(self, request: Request, now: float) -> None:
        """Begins a load of a copy of another engine's leased prefix, which is charged to no scope's share of the cache."""
        keys, root, _ = self._requests.prefixes.chain_of(request, request.token_ids)
        load = KVLoad(request, None, keys, root, None, now)
        load.is_copy = True
        self._ask(load, now)

    def follow(self, request: Request, now: float) -> None:
        """Begins a load of a prompt that another engine is computing, if there is room for all of it."""
        keys, root, owner = self._requests.prefixes.chain_of(request, request.token_ids, num_more=1)
        load = KVLoad(request, None, keys, root, owner, now)
        load.follows = True
        load.keep_following(now)
        if not self._begin(load, now):
            return
        num_missing = len(load.keys) - load.num_known
        promised = [self._pool.max_blocks(group, num_missing) for group in range(self._pool.num_groups)]
        if self._has_room(promised):
            load.num_promised = promised
            self.queries.append(KVQuery(request.request_id, load.root, load.keys, load.num_known, follows=True))
        else:
            self._end_early(load, now)

    def cancel_prefetch(self, request_id: str, now: float) -> None:
        """Ends a prefetch whose request will not come, and the lease on what it loaded."""
        load = self.loading.get(request_id)
        if load is not None and load.state is None:
            self._end_early(load, now)
        if self._requests.leases is not None:
            self._requests.leases.drop(_prefetched(request_id))

    def refuse(self, request_id: str, now: float) -> None:
        """Reports a load that this engine cannot make."""
        self._requests.events.append(KVLoaded(request_id, now, 0, 0, 0.0, complete=False))

    def arrive(self, request_id: str, objects: Iterable[KVObject | RestoredEntry]) -> None:
        """Takes verified objects, in the order of their entries. Late objects, those after a gap, and those of an earlier load
        of the request (perhaps with other tokens) are dropped."""
        load = self.loading.get(request_id)
        if load is None or load.is_complete is not None:
            return
        for found in objects:
            if not load.asks_for(found.header):
                continue
            if not self._follows(load, found):
                self._stop_transfer(load)
                load.is_complete = False
                return
            load.num_bytes += found.num_bytes
            load.arrived.append(found)

    def finish(self, request_id: str, now: float, *, is_complete: bool, transfer_s: float | None = None) -> None:
        """Notes that the source has sent all that it had, or that the transfer failed. The load ends when steps have taken all
        that arrived.

        Args:
            transfer_s: seconds of the transfer, if they were measured.
        """
        load = self.loading.get(request_id)
        if load is not None and load.is_complete is None:
            load.is_complete, load.transfer_s = is_complete, transfer_s
            self._end_if_done(load, now)

    def release_held(self, request_id: str) -> None:
        """Releases what was loaded for a request that starts, and now holds its own references."""
        load = self._held.pop(request_id, None)
        if load is not None:
            self._release(load)
        if self._requests.leases is not None:
            self._requests.leases.drop(_prefetched(request_id))

    def expire(self, now: float) -> None:
        """Ends the loads whose deadline has passed."""
        for load in [load for load in self.loading.values() if load.deadline_s <= now]:
            if load.waits_for_steps:
                continue
            if load.restore is None:
                self._end_early(load, now)
            else:  # what has arrived is used when the sequence comes to it
                self._stop_transfer(load)
                load.is_complete = False

    def forget(self, roots: Collection[bytes], now: float) -> None:
        """Ends the loads of chains that are dropped; their requests continue without the rest."""
        for load in [load for load in self.loading.values() if load.root in roots]:
            self._end_early(load, now)

    def reclaim_one(self, now: float) -> bool:
        """Ends one lease or load to free its blocks; returns False if there is none."""
        if self._requests.leases is not None and self._requests.leases.drop_one():
            return True
        load = next(iter(self._held.values()), None)
        if load is not None:
            del self._held[load.request.request_id]
            self._release(load)
            return True
        load = next((load for load in self.loading.values() if not load.num_in_flight and load.table), None)
        if load is not None:
            if load.restore is not None:
                self._end_early(load, now)
                return True
            self._drop_pending(load)
            self._release(load)
            load.is_complete, load.deadline_s = False, now  # it ends before the next step is filled
            return True
        return False

    # Steps

    def plan(self, step: PlannedStep) -> None:
        """Has a step write objects that arrived into blocks, as far as there are spare ones."""
        num_left = MAX_STEP_BYTES
        for load in list(self.loading.values()):
            while load.arrived and num_left > 0:
                found = load.arrived.popleft()
                if not self._allocate(load, found, step):
                    self._end_early(load, step.now)
                    break
                num_left -= found.num_bytes

    def commit(self, step: PlannedStep, now: float) -> None:
        """Inserts the blocks that a step has written into the prefix cache."""
        cache = self._requests.prefix_cache
        for load, entry in step.loads:
            load.num_in_flight -= 1
            if load.follows and load.state is None:
                load.keep_following(now)
            if load.is_open and cache is not None and load.restore is None:
                scope = load.request.scope
                root, expires = kept_root(scope, load.root), scope.lifetime_s is not None and not load.is_copy
                cache.insert(
                    load.keys, load.table, entry, root, load.owner, expires=expires, is_copy=load.is_copy, end=entry + 1
                )
                if scope.lifetime_s is not None and expires:
                    cache.renew(load.root, now + scope.lifetime_s)
            self._settle_in_flight(load, now)

    def fail(self, step: PlannedStep, now: float) -> None:
        """Ends the loads whose blocks a failed step was to write."""
        for load, _ in step.loads:
            load.num_in_flight -= 1
            if load.is_open:
                self._end_early(load, now)
            else:
                self._settle_in_flight(load, now)

    def _allocate(self, load: KVLoad, found: KVObject | RestoredEntry, step: PlannedStep) -> bool:
        pool, num_groups, entry = self._pool, self._pool.num_groups, found.header.entry
        groups = [
            group
            for group, content in enumerate(found.contents)
            if content and load.table[entry * num_groups + group] == NO_BLOCK
        ]
        num_running = len(self._requests.running)
        if any(pool.count_available(group) <= num_running * (1 + pool.groups[group].is_state) for group in groups):
            return False
        for group in groups:
            (block,) = pool.allocate(1, group)
            load.table[entry * num_groups + group] = block
            if load.num_promised:
                load.num_promised[group] = max(0, load.num_promised[group] - 1)
            step.plan.loads.append(BlockLoad(block, found.contents[group]))
        load.num_in_flight += 1
        step.loads.append((load, entry))
        return True

    def _has_room(self, promised: Sequence[int]) -> bool:
        """Whether the pool can promise these blocks of each group in addition to what running sequences and other loads
        need."""
        missing = [0 if s.table is None else self.count_missing(s) for s in self._requests.running.values()]
        needed = [sum(counts) for counts in zip(promised, self.count_promised(), strict=True)]
        return self._pool.has_room(missing, len(missing), needed)

    # A load from begin to end

    def _ask(self, load: KVLoad, now: float) -> None:
        """Begins a load from another engine."""
        if self._begin(load, now):
            self.queries.append(KVQuery(load.request.request_id, load.root, load.keys, load.num_known))

    def _begin(self, load: KVLoad, now: float) -> bool:
        """Registers a load; returns False if nothing is missing, in which case it has ended."""
        name, cache = load.request.request_id, self._requests.prefix_cache
        if name in self.loading:
            self._end_early(self.loading[name], now)
        self.loading[name] = load
        if cache is None or cache.match_length(load.keys) == len(load.keys):
            load.is_complete = True
            self._end_if_done(load, now)
            return False
        load.num_known = load.next_entry = cache.count_known(load.keys)
        for key in load.keys[: load.num_known]:
            load.table += cache.blocks_of(key)
        self._pool.share(block for block in load.table if block != NO_BLOCK)
        load.table += [NO_BLOCK] * ((len(load.keys) - load.num_known) * self._pool.num_groups)
        return True

    def _follows(self, load: KVLoad, found: KVObject | RestoredEntry) -> bool:
        """Whether an object is the next one of its load. Layers that see all positions need every entry."""
        entry = found.header.entry
        if load.restore is not None:
            is_next = entry == load.next_entry
            load.next_entry -= is_next
            return is_next
        if self._full is not None and not found.contents[self._full]:
            return entry < load.num_known
        is_next = entry == load.next_entry if self._full is not None else entry >= load.next_entry
        if is_next:
            load.next_entry = entry + 1
        return is_next

    def _settle_in_flight(self, load: KVLoad, now: float) -> None:
        if load.is_open:
            self._end_if_done(load, now)
        elif not load.num_in_flight:
            self._release(load)

    def _end_early(self, load: KVLoad, now: float) -> None:
        """Ends a load early, with the blocks that are there."""
        self._drop_pending(load)
        load.is_complete = False
        self._end(load, now)

    def _drop_pending(self, load: KVLoad) -> None:
        """Drops objects that are in no plan, and cancels the transfer."""
        if load.is_complete is None:
            self._stop_transfer(load)
        load.arrived.clear()
        load.num_promised = []

    def _stop_transfer(self, load: KVLoad) -> None:
        (self.cancelled_reads if load.tier else self.cancelled).append(load.request.request_id)

    def _end_if_done(self, load: KVLoad, now: float) -> None:
        if load.restore is None and load.is_complete is not None and not load.arrived and not load.num_in_flight:
            self._end(load, now)

    def _end(self, load: KVLoad, now: float) -> None:
        """Reports a load, and queues its request."""
        name, table = load.request.request_id, self._requests
        del self.loading[name]
        load.is_open = False
        if load.is_alone and load.is_complete and load.transfer_s is not None and not table.running:
            self.overhead_s += OVERHEAD_WEIGHT * (max(0.0, now - load.started_s - load.transfer_s) - self.overhead_s)
        num_entries = 0 if table.prefix_cache is None else table.prefix_cache.match_length(load.keys)
        table.events.append(
            KVLoaded(
                request_id=name,
                now_s=now,
                num_tokens=num_entries * self._pool.block_size,
                num_bytes=load.num_bytes,
                elapsed_s=0.0 if load.elapsed_from_s is None else now - load.elapsed_from_s,
                complete=bool(load.is_complete),
                tier=load.tier,
            )
        )
        if load.restore is not None:
            self._release(load)
        elif load.state is None:
            if load.is_copy:
                self.on_copied(load, now)
            elif table.leases is not None:
                is_only = load.request.scope.kind is ScopeKind.REQUEST
                table.leases.take(_prefetched(name), load.keys, now + PREFETCH_HOLD_S, of_one_request=is_only)
            self._release(load)
        else:
            self._held[name] = load
            if name not in table.waiting_for_grammar:
                table.wait_for_slots(load.state)

    def _note_ended(self, state: RequestState) -> None:
        """Ends the load of a request that has ended."""
        name = state.request.request_id
        load = self._held.pop(name, None) or self.loading.get(name)
        if load is not None and load.state is state:
            if load.is_open:
                del self.loading[name]
                self._drop_pending(load)
                load.is_open = False
            self._release(load)

    def _note_preempted(self, sequence: SequenceRecord, now: float) -> None:
        """Ends the two-sided load of a preempted sequence."""
        if (load := self.find_two_sided(sequence)) is not None:
            self._end_early(load, now)

    def _release(self, load: KVLoad) -> None:
        """Releases the blocks of an ended load, once no plan writes them."""
        if load.num_in_flight:
            return
        blocks, load.table = load.table, []
        # the last one first, so that the prefix cache gets leaves before their parents
        self._pool.release(block for block in reversed(blocks) if block != NO_BLOCK)
        if self._requests.prefix_cache is not None and load.state is None and load.request.scope.kind is ScopeKind.REQUEST:
            self._requests.prefix_cache.discard(load.keys)


def _prefetched(request_id: str) -> str:
    """Returns the name of the lease on KV prefetched for a request."""
    return f"prefetched {request_id}"
