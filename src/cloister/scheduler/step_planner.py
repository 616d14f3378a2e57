"""Fills a step: which positions of which sequences it computes, and into which blocks. Pure: no I/O, no clock.

There is no prefill or decode phase: positions of each sequence are planned until the computed ones catch up with the known and
drafted ones.
"""

from __future__ import annotations

from collections.abc import Collection

from cloister.kv import NO_BLOCK, BlockTable, OutOfBlocksError
from cloister.scheduler.admission import count_positions
from cloister.scheduler.beam_search import BeamSearches
from cloister.scheduler.draft_allocator import DraftAllocator
from cloister.scheduler.image_encodings import ImageEncodings
from cloister.scheduler.kv_exports import limit_followed_chunk
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.kv_restores import KVRestores, TierRead
from cloister.scheduler.layerwise import LayerwisePrompts
from cloister.scheduler.planned_step import PlannedStep
from cloister.scheduler.policies.base import SchedulingPolicy
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import SequenceRecord, Status, introduce, table_of
from cloister.scheduler.speculation import NO_DRAFTS, DraftDecision
from cloister.types.events import Scheduled
from cloister.types.step import Fork, SequencePlan

BURST_S = 0.5
"""Requests that arrive within this time of each other form a burst."""
BURST_LASTS_S = 1.0
"""A request counts as part of a new burst for this long after its first token."""
BURST_FLOOR_S = 0.2
"""A step of this time is short enough for requests of a new burst."""


class StepPlanner:
    """Fills the steps of a scheduler.

    Args:
        max_num_seqs: maximum number of running sequences.
        requests: table of requests.
        policy: decides which sequence is next.
        loads: KV on its way here.
        searches: beam searches, whose blocks are reserved.
        encodings: images encoded beside the steps.
        draft_allocator: gives sequences drafts; None disables drafts.
        layerwise: memory of prompts computed layer by layer; None if none can be.

    Attributes:
        kv_restores: decides which KV is restored from tiers; None without tiers.
    """

    def __init__(
        self,
        max_num_seqs: int,
        requests: RequestTable,
        policy: SchedulingPolicy,
        loads: KVLoads,
        searches: BeamSearches,
        encodings: ImageEncodings,
        draft_allocator: DraftAllocator | None,
        layerwise: LayerwisePrompts | None,
    ) -> None:
        self.kv_restores: KVRestores | None = None
        self._max_num_seqs = max_num_seqs
        self._requests, self._pool, self._policy = requests, requests.pool, policy
        self._loads, self._searches, self._encodings = loads, searches, encodings
        self._draft_allocator, self._layerwise = draft_allocator, layerwise

    def fill(self, step: PlannedStep) -> None:
        """Fills a step level by level: waiting sequences of more urgent levels, then decodes, then prefill in the remaining
        time."""
        step.may_admit = self._policy.begin_step(step.now)
        by_level: dict[int, tuple[list[SequenceRecord], list[SequenceRecord]]] = {}
        level_of = self._policy.level
        for sequence in self._requests.running.values():
            num_wanted = sequence.num_wanted
            if num_wanted > 0 and (not sequence.request_state.request.images or self._encodings.fit(sequence, num_wanted)):
                level = level_of(sequence)
                if level not in by_level:
                    by_level[level] = ([], [])
                is_prefill = num_wanted > 1 or (self._loads.loading and self._loads.find_two_sided(sequence) is not None)
                by_level[level][bool(is_prefill)].append(sequence)
        for level in sorted(by_level):
            self._admit(step, before=level)
            step.enter(level)
            decodes, prefills = by_level[level]
            if step.plan.arrivals:  # some may have been preempted, and have started again in this step
                started = {new.seq_id for new in step.plan.arrivals}
                decodes, prefills = ([s for s in part if s.seq_id not in started] for part in (decodes, prefills))
            self._fill_decodes(step, decodes, prefills)
            for sequence in sorted(prefills, key=self._policy.rank):
                self._extend_chunk(step, sequence)
        self._admit(step, before=None)
        if self._encodings.sequences:
            step.plan.encodes = self._encodings.begin(lambda sequence: (level_of(sequence), self._policy.rank(sequence)))

    def _fill_decodes(self, step: PlannedStep, decodes: list[SequenceRecord], prefills: list[SequenceRecord]) -> None:
        """Plans one position for each sequence, which then limits the time of the rest of the step.

        Args:
            prefills: prefills that follow in this level, besides waiting sequences.
        """
        if len(decodes) > step.budget.num_left:
            decodes = sorted(decodes, key=self._policy.rank)
        choices: list[DraftDecision] = []
        if not step.yields_to_prefill:
            decodes = [sequence for sequence in decodes if sequence.status is Status.RUNNING]  # some may have been preempted
            plain = step.budget.size.plus_decodes([sequence.num_planned for sequence in decodes])
            is_burst = bool(prefills or self._requests.num_waiting) and self._is_burst(step, prefills)
            step.budget.bound_by_decodes(plain, BURST_FLOOR_S if is_burst else 0.0)
            if self._draft_allocator is not None:
                choices = self._draft_allocator.choose(step, decodes, plain)
        for place, sequence in enumerate(decodes):
            if step.yields_to_prefill and not step.budget.admits(sequence.num_planned):
                return
            self._extend(step, sequence, 1, choices[place] if choices else NO_DRAFTS)

    def _is_burst(self, step: PlannedStep, prefills: list[SequenceRecord]) -> bool:
        """True if all decoding sequences, of any level, have just begun and arrived in one burst with prompts that are not
        computed yet.

        No stream has been read for long then, so the prompts of the burst are computed in a few large chunks.
        """
        pending = [sequence.request_state.arrival_s for sequence in prefills]
        if (first := self._policy.peek()) is not None:
            pending.append(first.request_state.arrival_s)
        if not pending:
            return False
        since_s, young_s = min(pending) - BURST_S, step.now - BURST_LASTS_S
        for sequence in self._requests.running.values():
            state = sequence.request_state
            if state.first_token_s is not None and (state.arrival_s < since_s or state.first_token_s < young_s):
                return False
        return True

    def _extend_chunk(self, step: PlannedStep, sequence: SequenceRecord) -> None:
        """Plans as much prefill of a running sequence as fits; the step's first chunk always fits in time."""
        if sequence.request_state.request.documents is not None:
            while known := self._requests.prefixes.find_known_document(sequence):  # behind one that was not cached
                self._requests.take_cached(sequence, known, step.now)
        num_most, strict = sequence.max_chunk, step.prefill_level is not None
        if self.kv_restores is not None and self._loads.loading:
            num_most = self.kv_restores.two_sided.limit(sequence, num_most, step.now)
        has_images = bool(sequence.request_state.request.images)
        if sequence.request_state.prefill_only and self._pool.state_group is None and not has_images:
            num_most = limit_followed_chunk(sequence.num_planned, num_most, self._pool.block_size)
        if has_images and not (num_most := self._encodings.fit(sequence, num_most)):
            return
        num_tokens = step.budget.fit(sequence.cost_start, num_most, strict=strict)
        if has_images:
            num_tokens = step.keep_images_whole(sequence, num_tokens, strict=strict)
        if num_tokens and self._extend(step, sequence, num_tokens) and step.prefill_level is None:
            step.prefill_level = self._policy.level(sequence)

    def _admit(self, step: PlannedStep, before: int | None) -> None:
        """Admits waiting sequences while there is capacity for them.

        Args:
            before: only those of a more urgent level than this.
        """
        while step.may_admit and step.budget.num_left > 0:
            sequence = self._policy.peek()
            if sequence is None or (before is not None and self._policy.level(sequence) >= before):
                return
            step.enter(self._policy.level(sequence))
            if not self._make_room(step, sequence):
                if self._policy.pass_over(sequence):
                    continue
                return
            keys, layerwise = self._requests.prefixes.match_keys(sequence), self._layerwise_of(sequence)
            read = None
            if self.kv_restores is not None and layerwise is None and sequence.request_state.request.documents is None:
                read = self.kv_restores.choose_read(sequence, keys)
            hits = self._requests.prefix_cache.match(keys) if self._requests.prefix_cache is not None else []
            if layerwise is not None:
                hits = hits[: layerwise.count_hits(sequence, len(hits))]
            num_hit = len(hits) // self._pool.num_groups * self._pool.block_size
            if not step.budget.fit(num_hit, len(sequence.token_ids) - num_hit, strict=step.prefill_level is not None):
                return
            self._pool.share(block for block in hits if block != NO_BLOCK)
            sequence.table = BlockTable(self._pool, hits)
            if not self._reserve(step, sequence):
                sequence.table.close()
                sequence.table = None
                if self._policy.pass_over(sequence):
                    continue
                return
            if read is not None and read.restore is None:
                self._restore(sequence, read, step.now)
                continue
            if layerwise is not None:
                layerwise.begin(sequence, len(hits))
            self._start(step, sequence, num_hit)
            if read is not None and self.kv_restores is not None:
                self.kv_restores.begin(sequence, read, step.now)
            self._extend_chunk(step, sequence)

    def _restore(self, sequence: SequenceRecord, read: TierRead, now: float) -> None:
        """Moves a waiting sequence from the queue to a load from a tier."""
        assert self.kv_restores is not None
        assert sequence.table is not None
        self._policy.pop()
        self._requests.num_waiting -= 1
        sequence.table.close()
        sequence.table = None
        self._loads.release_held(sequence.request_state.request.request_id)
        self.kv_restores.begin(sequence, read, now)

    def _make_room(self, step: PlannedStep, sequence: SequenceRecord) -> bool:
        """Frees slots for a waiting sequence by preempting others, if the policy permits it."""
        num_taken = sum(s.num_slots for s in self._requests.running.values())
        while num_taken + sequence.num_slots > self._max_num_seqs:
            victim = self._choose_victim(step, behind=sequence)
            if victim is None:
                return False
            num_taken -= victim.num_slots
            self._requests.preempt(victim, step.now)
        return True

    def _reserve(self, step: PlannedStep, sequence: SequenceRecord) -> bool:
        """Whether the pool can hold all known tokens of a waiting sequence in addition to those of running ones; preempts
        others if the policy permits it."""
        needed = own = self._count_needed(sequence, table_of(sequence))
        if self._loads.loading:
            needed = [sum(counts) for counts in zip(own, self._loads.count_promised(), strict=True)]
        while self._requests.running:
            missing = [self._loads.count_missing(s) for s in self._requests.running.values()]
            headroom = len(missing)  # one entry each, so that admission does not cause a preemption one step later
            promised = [sum(counts) for counts in zip(needed, self._searches.count_promised(), strict=True)]
            if self._pool.has_room(missing, headroom, promised):
                return True
            victim = self._choose_victim(step, behind=sequence)
            if victim is None:
                return False
            self._requests.preempt(victim, step.now)
        while not self._pool.has_room([], 0, needed):
            if self._loads.is_restoring or not self._loads.reclaim_one(step.now):
                return False  # loads from tiers end soon
            if self._loads.loading:
                needed = [sum(counts) for counts in zip(own, self._loads.count_promised(), strict=True)]
        return True

    def would_fit(self, sequence: SequenceRecord, leaving: Collection[SequenceRecord]) -> bool:
        """Whether a waiting sequence would have slots and blocks if these running ones left; assumes no prefix hits."""
        gone = {s.seq_id for s in leaving}
        staying = [s for s in self._requests.running.values() if s.seq_id not in gone]
        if sum(s.num_slots for s in staying) + sequence.num_slots > self._max_num_seqs:
            return False
        freed = [0] * self._pool.num_groups
        for block in {block for s in leaving for block in table_of(s).blocks if block != NO_BLOCK}:
            freed[self._pool.group_of(block)] += self._pool.references(block) == 1
        needed = [a - b for a, b in zip(self._count_needed(sequence, BlockTable(self._pool)), freed, strict=True)]
        missing = [self._loads.count_missing(s) for s in staying]
        promised = [sum(counts) for counts in zip(needed, self._searches.count_promised(), strict=True)]
        return self._pool.has_room(missing, len(missing), promised)

    def _count_needed(self, sequence: SequenceRecord, table: BlockTable) -> list[int]:
        """Returns the blocks of each group that a waiting sequence needs in addition to its prefix hit, `table`."""
        state = sequence.request_state
        if state.beams is not None:
            return self._searches.count_blocks(state)
        if (layerwise := self._layerwise_of(sequence)) is not None:
            return [layerwise.count_needed(sequence, table.num_entries)]
        num_most = count_positions(state.num_prompt_tokens, sequence.max_output)
        num_entries = -(-min(len(sequence.token_ids) + 1, num_most) // self._pool.block_size)
        groups = range(self._pool.num_groups)
        return [max(0, self._pool.max_blocks(group, num_entries) - table.count_held(group)) for group in groups]

    def _start(self, step: PlannedStep, sequence: SequenceRecord, num_hit: int) -> None:
        """Moves a waiting sequence to running and introduces it to the runner."""
        self._policy.pop()
        self._requests.num_waiting -= 1
        self._loads.release_held(sequence.request_state.request.request_id)
        sequence.num_planned = sequence.num_committed = num_hit
        self._requests.run(sequence)
        if sequence.request_state.request.images:
            self._encodings.join(sequence)
        sequence.num_kept = num_hit // self._pool.block_size
        sequence.snapshots = self._requests.prefixes.choose_snapshots(sequence)
        state = sequence.request_state
        if num_hit and self.kv_restores is not None and state.kept_root:
            self.kv_restores.tiers.note_accesses(sequence.keys[: sequence.num_kept], state.owner)
        self._requests.prefixes.renew(sequence, step.now)
        resumed = state.scheduled_s is not None
        if not resumed:
            state.scheduled_s = step.now
            state.num_cached_tokens = num_hit
        self._requests.events.append(
            Scheduled(
                request_id=state.request.request_id,
                now_s=step.now,
                queue_s=step.now - state.arrival_s,
                num_cached_tokens=num_hit,
                num_prompt_tokens=state.num_prompt_tokens,
                resumed=resumed,
                num_queried_tokens=state.num_prompt_tokens if self._requests.prefixes.reads_prefixes(state.request) else 0,
            )
        )
        step.plan.arrivals.append(introduce(sequence))

    def _extend(self, step: PlannedStep, sequence: SequenceRecord, num_tokens: int, choice: DraftDecision = NO_DRAFTS) -> bool:
        """Plans the next `num_tokens` positions of a running sequence and its drafts; preempts others for blocks if needed.
        Returns False if it is not planned."""
        num_left = step.budget.num_left - num_tokens
        if sequence.status is not Status.RUNNING or num_left < 0:
            return False
        num_drafts = choice.num_drafts if choice.num_drafts <= num_left else num_left
        start = sequence.num_planned
        end = start + num_tokens + num_drafts
        table = table_of(sequence)
        if not table.is_writable(start, end) and not self._grow(step, sequence, table, start, end):
            return False
        num_known = len(sequence.token_ids) + sequence.num_pending
        is_decode = start == num_known - 1
        samples = int(end == num_known + num_drafts and sequence.max_output > 0)
        is_watched = choice.is_watched
        if self._draft_allocator is not None and samples and not sequence.is_layerwise:
            # the end of a prompt may be a single position
            is_watched = is_watched or not is_decode or not sequence.num_output
        if sequence.is_unknown:
            sequence.is_unknown = False
            step.plan.arrivals.append(introduce(sequence))
        table_start, new_blocks = table.take_unsent()
        step.plan.sequences.append(
            SequencePlan(
                seq_id=sequence.seq_id,
                start=start,
                num_tokens=num_tokens + num_drafts,
                table_start=table_start,
                new_block_ids=new_blocks,
                num_samples=samples,
                num_drafts=num_drafts,
                drafter=choice.drafter if num_drafts else "",
                parents=choice.parents[:num_drafts] if num_drafts and choice.parents is not None else None,
                is_watched=is_watched,
                layerwise=sequence.layerwise,
            )
        )
        if num_drafts:
            step.choices[sequence.seq_id] = choice._replace(num_drafts=num_drafts)
            sequence.num_drafts = num_drafts
        step.parts.append((sequence, start, end, 0 if is_decode else num_tokens))
        step.budget.spend(start if sequence.layerwise is None else sequence.cost_start, num_tokens + num_drafts)
        sequence.num_planned = end
        sequence.num_in_flight += 1
        if samples:
            sequence.num_pending += 1
            if sequence.request_state.num_open > 1 and sequence.request_state.beams is None:
                self._fork(step, sequence)
        return True

    def _grow(self, step: PlannedStep, sequence: SequenceRecord, table: BlockTable, start: int, end: int) -> bool:
        """Makes positions [start, end) writable; returns False if the blocks are not available in this step."""
        snapshots = [] if self._pool.state_group is None else self._snapshots_within(sequence, start, end)
        while True:
            try:
                step.plan.copies.extend(table.grow(start, end, snapshots))
                return True
            except OutOfBlocksError:
                if snapshots:
                    snapshots = []
                    continue
                if self._loads.reclaim_one(step.now):
                    continue
                victim = self._choose_victim(step, behind=None)
                if victim is None:
                    return False
                self._requests.preempt(victim, step.now)
                if victim is sequence or victim.num_in_flight:
                    return False  # its blocks are released when the plans that name it are committed

    def _snapshots_within(self, sequence: SequenceRecord, start: int, end: int) -> list[int]:
        """Returns the entries that end inside of positions [start, end) and get a block for a snapshot of the state.

        Only spare blocks are used: each running sequence needs at most two.
        """
        size, group = self._pool.block_size, self._pool.state_group
        if group is None or self._pool.count_available(group) <= 2 * len(self._requests.running):
            return []
        return [number - 1 for number in sequence.snapshots if start < number * size < end]

    def _fork(self, step: PlannedStep, parent: SequenceRecord) -> None:
        """Forks the request's other sequences from the one that completes the prompt, as far as slots are free.

        The rest is queued, and finds the prompt in the prefix cache. A request that waited for slots of all its answers would
        block those behind it until as many others had ended.
        """
        state = parent.request_state
        num_free = self._max_num_seqs - sum(s.num_slots for s in self._requests.running.values())
        for index in range(len(state.sequences), state.request.sampling.n):
            child = self._requests.make_sequence(state, index, list(parent.token_ids), parent.max_output)
            num_free -= 1
            if num_free < 0:
                self._requests.wait(child)
                continue
            child.table = table_of(parent).fork()
            child.num_planned = parent.num_planned
            child.num_committed = parent.num_planned
            child.num_kept = parent.num_planned // self._pool.block_size
            child.num_pending = 1
            child.num_in_flight = 1
            self._requests.run(child)
            step.forked.append(child)
            step.plan.forks.append(Fork(parent.seq_id, child.seq_id, index))

    def _choose_victim(self, step: PlannedStep, behind: SequenceRecord | None) -> SequenceRecord | None:
        """Returns the least urgent running sequence that is not in this step.

        Args:
            behind: only a sequence that the policy allows this waiting one to preempt.
        """
        planned = step.planned()
        choices = [
            s
            for s in self._requests.running.values()
            if s.seq_id not in planned
            and s.request_state.beams is None
            and (behind is None or self._policy.may_preempt(behind, s))
        ]
        return max(choices, key=lambda s: (self._policy.level(s), self._policy.rank(s)), default=None)

    def _layerwise_of(self, sequence: SequenceRecord) -> LayerwisePrompts | None:
        """Returns the memory plan of prompts computed layer by layer, if the sequence is one of them."""
        return self._layerwise if sequence.is_layerwise else None
