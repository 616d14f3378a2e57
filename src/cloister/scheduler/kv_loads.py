"""KV that comes from other engines (decisions/0022) or a tier (decisions/0029), until it is in the prefix cache. Pure: no I/O,
no clock; it takes `now`.

A load asks for the keys of a request (`queries`), takes what arrives, has steps put it into blocks of its own, and offers these
to the prefix cache under their keys: from there on they are like blocks that were computed here. Until the request starts, the
load holds them; a running sequence that needs blocks gets them (`give_up_one`). Whatever does not arrive is computed.

A load may follow a prompt that another engine is computing (decisions/0037). Its request comes when that engine has the first
token, and waits for what is missing then. Room for the whole prompt is promised to it from the beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from cloister.kv import NO_BLOCK, KVObject, KVQuery
from cloister.kv.objects import KVHeader, RestoredEntry
from cloister.kv.two_sided import TwoSidedRestore
from cloister.scheduler.planned_step import PlannedStep
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import RequestState, SequenceRecord, Status, table_of
from cloister.scheduler.sequence_prefixes import kept_root
from cloister.types.events import KVLoaded
from cloister.types.request import Request
from cloister.types.scope import ScopeKind
from cloister.types.step import BlockLoad

KV_LOAD_TIMEOUT_S: Final = 5.0
"""A load ends after this time, whatever has arrived."""
FOLLOW_TIMEOUT_S: Final = 30.0
"""The same for a load that follows a prompt and whose request has not come, from when the last block arrived: a step of the
source may take long."""
PREFETCH_HOLD_S: Final = 10.0
"""What was loaded for a request that may come stays cached for so long."""
OVERHEAD_WEIGHT: Final = 0.25
"""Weight of the last load in the mean of what loads take besides their transfer."""
OVERHEAD_DECAY: Final = 0.95
"""What is left of that mean after a load that was not made: a wrong one must not forbid loads for ever."""
MAX_STEP_BYTES: Final = 8 * 2**20
"""KV that one step takes; at least one entry."""


class KVLoad:
    """One load.

    Attributes:
        state: the request that waits for it; None if it may come later.
        keys: prefix keys of all that could be loaded.
        table: blocks by entry, one for each group: those that were known, and those that arrived.
        num_known: leading entries that were known, for layers that see all positions.
        next_entry: the entry that must come next.
        arrived: what no plan has taken yet.
        num_in_flight: entries in plans that were not committed.
        is_complete: whether the source has sent all it had; None while it sends.
        is_open: no end was reported yet.
        is_alone: it is from a tier, and no sequence ran when it began.
        transfer_s: what its transfer took; None if that was not measured.
        tier: name of the tier that it comes from; empty for another engine.
        num_promised: blocks of each group that it still needs, if it comes from a tier or follows a prompt.
        follows: it follows a prompt that another engine is computing.
        is_copy: it brings a copy of a prefix, for a lease.
        restore: set if a running sequence computes the front meanwhile: entries then come from the last one on, and are offered
            to the prefix cache by that sequence, once it has taken them.
        awaited_s: since when its request waits for it, if it follows a prompt.
    """

    __slots__ = (
        "arrived",
        "awaited_s",
        "deadline_s",
        "follows",
        "is_alone",
        "is_complete",
        "is_copy",
        "is_open",
        "keys",
        "next_entry",
        "num_bytes",
        "num_in_flight",
        "num_known",
        "num_promised",
        "owner",
        "request",
        "restore",
        "root",
        "started_s",
        "state",
        "table",
        "tier",
        "transfer_s",
    )

    def __init__(
        self, request: Request, state: RequestState | None, keys: Sequence[bytes], root: bytes, owner: bytes | None, now: float
    ) -> None:
        self.request, self.state = request, state
        self.keys, self.root, self.owner = list(keys), root, owner
        self.table: list[int] = []
        self.num_known = self.next_entry = self.num_bytes = self.num_in_flight = 0
        self.arrived: deque[KVObject | RestoredEntry] = deque()
        self.started_s, self.deadline_s = now, now + KV_LOAD_TIMEOUT_S
        self.is_complete: bool | None = None
        self.is_open, self.is_alone = True, False
        self.transfer_s: float | None = None
        self.tier = ""
        self.num_promised: list[int] = []
        self.follows = self.is_copy = False
        self.awaited_s: float | None = None
        self.restore: TwoSidedRestore | None = None

    def asks_for(self, header: KVHeader) -> bool:
        """Whether an object is of this load: of its chain, under the key of its entry."""
        entry = header.entry
        return header.root == self.root and 0 <= entry < len(self.keys) and header.key == self.keys[entry]

    @property
    def waits_for_steps(self) -> bool:
        """Whether nothing more comes from the tier. Waiting for steps takes no longer than computing would."""
        return bool(self.tier) and (bool(self.is_complete) or (self.restore is not None and self.is_complete is not None))

    @property
    def elapsed_from_s(self) -> float | None:
        """When the wait for it began; None if nothing waits for it."""
        return self.awaited_s if self.follows else self.started_s


class KVLoads:
    """All loads of one engine, by the id of their request.

    Args:
        requests: the scheduler's requests.

    Attributes:
        queries: what the engine must ask for, since it last took them.
        overhead_s: what a load from a tier takes besides reading while no sequence runs, as far as loads were measured: steps
            of its own. `forgo` lowers it.
        cancelled, cancelled_reads: ids of loads that have ended here, whose transfer from another engine or whose read from a
            tier the engine must end.
        on_copied: called with name and end of each load of a copy, before its blocks are released.
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
        requests.on_end, requests.on_preempt = self._forget, self._leave

    def __len__(self) -> int:
        """Loads that have not ended."""
        return len(self.loading)

    def is_loading(self, request_id: str) -> bool:
        """Whether there is a load of this name: of a request, or of KV that only may serve one."""
        return request_id in self.loading

    def is_awaited(self, request_id: str) -> bool:
        """Whether a request waits for KV: for a load that began for it, not for one that only may serve it."""
        load = self.loading.get(request_id)
        return load is not None and load.state is not None

    @property
    def num_waiting_bytes(self) -> int:
        """KV that has arrived and is in no plan."""
        return sum(found.num_bytes for load in self.loading.values() for found in load.arrived)

    @property
    def next_deadline_s(self) -> float | None:
        """When the next load ends whatever has arrived."""
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
        """Begins the load of a new request, which is queued when it has ended."""
        sequences = [sequence for sequence in state.sequences if sequence.status is Status.NEW]
        keys = self._requests.prefixes.match_keys(max(sequences, key=lambda sequence: len(sequence.token_ids)))
        for sequence in sequences:
            sequence.status = Status.LOADING
        load = self.loading.get(state.request.request_id)
        if load is not None and load.follows and load.state is None and load.is_complete is not False and load.keys == keys:
            load.state, load.awaited_s, load.deadline_s = state, now, now + KV_LOAD_TIMEOUT_S
            return
        self._ask(KVLoad(state.request, state, keys, state.root, state.owner, now), now)

    def restore(
        self, sequence: SequenceRecord, keys: Sequence[bytes], tier: str, num_promised: list[int], timeout_s: float, now: float
    ) -> None:
        """Begins the load of a sequence that was next, from a tier; it is queued again when the load has ended.

        Args:
            keys: of what is known here or in the tier, up to where a hit can end.
            num_promised: blocks of each group that it brings.
        """
        state = sequence.request_state
        sequence.status = Status.LOADING
        load = KVLoad(state.request, state, keys, state.root, state.owner, now)
        load.is_alone = not self._requests.running
        load.tier, load.num_promised, load.deadline_s = tier, num_promised, now + min(timeout_s, KV_LOAD_TIMEOUT_S)
        self._begin(load, now)

    def restore_beside(
        self,
        sequence: SequenceRecord,
        keys: Sequence[bytes],
        restore: TwoSidedRestore,
        tier: str,
        timeout_s: float,
        now: float,
    ) -> None:
        """Begins the load of the end of a prefix whose front a running sequence computes (`scheduler.two_sided_restores`).

        Args:
            keys: of the whole prefix.
        """
        state = sequence.request_state
        load = KVLoad(state.request, state, keys, state.root, state.owner, now)
        load.tier, load.restore, load.deadline_s = tier, restore, now + min(timeout_s, KV_LOAD_TIMEOUT_S)
        load.table = [NO_BLOCK] * len(load.keys)
        load.next_entry = len(load.keys) - 1
        self.loading[state.request.request_id] = load

    def find_of(self, sequence: SequenceRecord) -> KVLoad | None:
        """Returns the load of the end of a running sequence's prefix; None if there is none, or no more."""
        load = self.loading.get(sequence.request_state.request.request_id) if self.loading else None
        return None if load is None or load.restore is None else load

    def drop_late(self, load: KVLoad, front: int) -> None:
        """Forgets what arrived when its sequence had come to it, at entry `front`."""
        while load.arrived and load.arrived[-1].header.entry < front:
            load.arrived.pop()

    def count_missing(self, sequence: SequenceRecord) -> int:
        """Returns the entries that a running sequence must still allocate for its known tokens: not those that wait for it."""
        num_missing = table_of(sequence).num_missing(len(sequence.token_ids))
        load = self.find_of(sequence)
        return num_missing if load is None else num_missing - len(load.table) + load.table.count(NO_BLOCK)

    def end_two_sided(self, load: KVLoad, now: float) -> None:
        """The sequence has come to what has arrived, and has taken it."""
        self._drop_rest(load)
        load.is_complete = bool(load.is_complete)
        self._end(load, now)

    def predict_overhead_s(self) -> float:
        """Returns what a load from a tier is predicted to take besides reading. Where others run it is not counted: the load
        waits for their steps, but so would computing, which also delays them."""
        return 0.0 if self._requests.running else self.overhead_s

    def forgo(self) -> None:
        """Notes that a load was not worth it."""
        self.overhead_s *= OVERHEAD_DECAY

    def prefetch(self, request: Request, token_ids: list[int], now: float) -> None:
        """Begins a load for a request that may come later."""
        keys, root, owner = self._requests.prefixes.chain_of(request, token_ids)
        self._ask(KVLoad(request, None, keys, root, owner, now), now)

    def copy(self, request: Request, now: float) -> None:
        """Begins a load of a prefix that another engine has leased. It is charged to no scope's share of the cache."""
        keys, root, _ = self._requests.prefixes.chain_of(request, request.token_ids)
        load = KVLoad(request, None, keys, root, None, now)
        load.is_copy = True
        self._ask(load, now)

    def follow(self, request: Request, now: float) -> None:
        """Begins a load of a prompt that another engine is computing, if there is room for all of it."""
        keys, root, owner = self._requests.prefixes.chain_of(request, request.token_ids, num_more=1)
        load = KVLoad(request, None, keys, root, owner, now)
        load.follows, load.deadline_s = True, now + FOLLOW_TIMEOUT_S
        if not self._begin(load, now):
            return
        num_missing = len(load.keys) - load.num_known
        promised = [self._pool.max_blocks(group, num_missing) for group in range(self._pool.num_groups)]
        if self._has_room(promised):
            load.num_promised = promised
            self.queries.append(KVQuery(request.request_id, load.root, load.keys, load.num_known, follows=True))
        else:
            self._cut(load, now)

    def cancel_prefetch(self, request_id: str, now: float) -> None:
        """Ends the load of a request that does not come, and forgets what it brought for it."""
        load = self.loading.get(request_id)
        if load is not None and load.state is None:
            self._cut(load, now)
        if self._requests.leases is not None:
            self._requests.leases.drop(_prefetched(request_id))

    def refuse(self, request_id: str, now: float) -> None:
        """Reports a load that this engine cannot make."""
        self._requests.events.append(KVLoaded(request_id, now, 0, 0, 0.0, complete=False))

    def arrive(self, request_id: str, objects: Iterable[KVObject | RestoredEntry]) -> None:
        """Takes genuine objects, in the order of their entries. What comes late, or leaves a gap, is dropped, and so is what an
        earlier load of the request asked for, perhaps with other tokens."""
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
        """The source has sent what it had, or the transfer broke. The load ends when the steps have taken what arrived.

        Args:
            transfer_s: what that took, if it was measured.
        """
        load = self.loading.get(request_id)
        if load is not None and load.is_complete is None:
            load.is_complete, load.transfer_s = is_complete, transfer_s
            self._end_if_done(load, now)

    def settle(self, request_id: str) -> None:
        """The request starts: from here on it holds what it found itself."""
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
                self._cut(load, now)
            else:  # what has arrived is used when the sequence comes to it
                self._stop_transfer(load)
                load.is_complete = False

    def forget(self, roots: Collection[bytes], now: float) -> None:
        """Ends the loads of chains that are dropped; their requests go on without what has not arrived."""
        for load in [load for load in self.loading.values() if load.root in roots]:
            self._cut(load, now)

    def give_up_one(self, now: float) -> bool:
        """Gives back blocks that no sequence runs on: of a lease or of a load. Returns False if there are none."""
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
                self._cut(load, now)
                return True
            self._drop_rest(load)
            self._release(load)
            load.is_complete, load.deadline_s = False, now  # it ends before the next step is filled
            return True
        return False

    # Steps

    def plan(self, step: PlannedStep) -> None:
        """Has a step put what arrived into blocks, as far as there are blocks that nobody else needs."""
        num_left = MAX_STEP_BYTES
        for load in list(self.loading.values()):
            while load.arrived and num_left > 0:
                found = load.arrived.popleft()
                if not self._place(load, found, step):
                    self._cut(load, step.now)
                    break
                num_left -= found.num_bytes

    def commit(self, step: PlannedStep, now: float) -> None:
        """Offers what a step has put into blocks to the prefix cache."""
        cache = self._requests.prefix_cache
        for load, entry in step.loads:
            load.num_in_flight -= 1
            if load.follows and load.state is None:
                load.deadline_s = now + FOLLOW_TIMEOUT_S
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
        """A step failed: what it would have put into blocks is lost."""
        for load, _ in step.loads:
            load.num_in_flight -= 1
            if load.is_open:
                self._cut(load, now)
            else:
                self._settle_in_flight(load, now)

    def _place(self, load: KVLoad, found: KVObject | RestoredEntry, step: PlannedStep) -> bool:
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
        """Whether there are so many blocks of each group besides what running sequences and other loads need."""
        missing = [0 if s.table is None else self.count_missing(s) for s in self._requests.running.values()]
        needed = [sum(counts) for counts in zip(promised, self.count_promised(), strict=True)]
        return self._pool.has_room(missing, len(missing), needed)

    # A load from begin to end

    def _ask(self, load: KVLoad, now: float) -> None:
        """Begins a load from another engine."""
        if self._begin(load, now):
            self.queries.append(KVQuery(load.request.request_id, load.root, load.keys, load.num_known))

    def _begin(self, load: KVLoad, now: float) -> bool:
        """Enters a load, which ends at once if nothing is missing; returns whether something is."""
        name, cache = load.request.request_id, self._requests.prefix_cache
        if name in self.loading:
            self._cut(self.loading[name], now)
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
        """Whether an object is the next of its load. Layers that see all positions need every entry."""
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

    def _cut(self, load: KVLoad, now: float) -> None:
        """Ends a load with what has arrived."""
        self._drop_rest(load)
        load.is_complete = False
        self._end(load, now)

    def _drop_rest(self, load: KVLoad) -> None:
        """Forgets what no plan has taken, and has the transfer end."""
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

    def _forget(self, state: RequestState) -> None:
        """Ends what was loaded for a request that has left."""
        name = state.request.request_id
        load = self._held.pop(name, None) or self.loading.get(name)
        if load is not None and load.state is state:
            if load.is_open:
                del self.loading[name]
                self._drop_rest(load)
                load.is_open = False
            self._release(load)

    def _leave(self, sequence: SequenceRecord, now: float) -> None:
        """Ends the load of the end of a prefix whose front is given up: what came later has nothing to follow."""
        if (load := self.find_of(sequence)) is not None:
            self._cut(load, now)

    def _release(self, load: KVLoad) -> None:
        """Gives back the blocks of a load that has ended, once no plan writes them."""
        if load.num_in_flight:
            return
        blocks, load.table = load.table, []
        # the last one first, so that the prefix cache gets leaves before their parents
        self._pool.release(block for block in reversed(blocks) if block != NO_BLOCK)
        if self._requests.prefix_cache is not None and load.state is None and load.request.scope.kind is ScopeKind.REQUEST:
            self._requests.prefix_cache.discard(load.keys)


def _prefetched(request_id: str) -> str:
    """The name of the lease of what was loaded for a request that may come."""
    return f"prefetched {request_id}"
