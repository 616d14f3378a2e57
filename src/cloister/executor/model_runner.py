"""Runs plans on a program."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cloister.backends.base import Capability, FloatArray, KVGroup, Program, SamplingMetadata
from cloister.backends.vision import AnyVisionSpec
from cloister.executor.drafter_group import DrafterGroup
from cloister.executor.drafters import Drafter
from cloister.executor.generation import TokenGenerator
from cloister.executor.grammar import Grammars, MaskWait
from cloister.executor.image_encoding import ImageEncoding
from cloister.executor.inputs import ScheduledSequence, TableLayout, cut_last, forward_batch, schedule_sequence
from cloister.executor.layerwise import LayerwisePrefill
from cloister.executor.pooling import NO_TEXT, NOT_OFFERED, OF_ENCODERS, encode_parts, pool_parts
from cloister.executor.sampling_time import SamplingTime
from cloister.executor.state import BatchState, SequenceState
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import EngineError
from cloister.types.request import Embedding
from cloister.types.step import EncodedImage, SequencePlan, StepPlan, StepResult


class ModelRunner:
    """Holds the tokens of running sequences and runs plans, returning results. Not thread-safe: one step at a time.

    Args:
        program: the model's program, with its KV cache.
        vocab_size: columns of its logits.
        max_model_len: prompt and answer together, in tokens.
        block_size: positions in one KV block.
        groups: layer groups of the program (`KVLayout.groups`).
        vision: the program's vision tower, if it has one.
        num_images_at_once: images that it encodes at once, beside the steps.

    Attributes:
        encoding: encodes the images of sequences, and says when they are done.
        adapters: digest -> slot of the program's adapters; may change between steps.
        links: digest -> what their link tokens read (`executor.links`), of those that have some; may change too.
        grammars: compiles the grammars of sequences; None fails sequences with a grammar.
        drafters: drafters by their names in plans; None if no plan drafts.
    """

    def __init__(
        self,
        program: Program,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        clock: Clock | None = None,
        adapters: Mapping[str, int] = {},
        links: Mapping[str, FloatArray] = {},
        grammars: Grammars | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        groups: Sequence[KVGroup] = (),
        vision: AnyVisionSpec | None = None,
        num_images_at_once: int = 1,
    ) -> None:
        self.encoding = ImageEncoding(program.encode_image, num_images_at_once)
        self._program = program
        self._num_groups = max(1, len(groups))
        state_group = next((number for number, group in enumerate(groups) if group.is_state), None)
        self._tables = TableLayout(block_size, self._num_groups, state_group, program.ranges)
        self._num_drafter_blocks = groups[0].num_blocks if len(groups) > 1 else None
        self._is_encoder = Capability.ENCODER in program.capabilities
        self._can_pool = Capability.HIDDEN in program.capabilities
        self._clock = clock or WallClock()
        self._grammars = grammars
        self._batch = BatchState(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            adapters=adapters,
            links=links,
            grammars=grammars,
            num_groups=self._num_groups,
            vision=vision if Capability.IMAGES in program.capabilities else None,
            ranges=program.ranges,
        )
        self._drafts = bool(drafters)
        self._drafting = DrafterGroup(drafters or {}, self._clock, takes_trees=Capability.TREES in program.capabilities)
        self._sampling_time = SamplingTime(self._clock)
        self._masks = MaskWait(self._clock, self._sampling_time)
        make_generator = partial(
            TokenGenerator,
            program,
            self._batch,
            vocab_size=vocab_size,
            tables=self._tables,
            clock=self._clock,
            masks=self._masks,
            sampling_time=self._sampling_time,
        )
        self._generator = make_generator(self._drafting)
        self._last_layer = make_generator(DrafterGroup({}, self._clock, takes_trees=False))
        self._layerwise = LayerwisePrefill(program, self._tables, self._generate_from_last_layer)

    def sampling_metadata(self, states: list[SequenceState], rows: list[int]) -> SamplingMetadata:
        """Returns how the next token of each sequence is sampled, for drafters that sample in the same way
        (`DrafterContext`)."""
        return self._batch.sampling_metadata(states, rows)

    def wipe_buffers(self) -> None:
        """Overwrites residue of all steps in the program's buffers, including that of running sequences."""
        self._program.wipe_buffers()
        self._drafting.wipe_buffers()

    @property
    def num_sequences(self) -> int:
        """Sequences held."""
        return len(self._batch)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step, in the order given in `StepPlan`.

        A step that leaves no sequence also wipes the program's buffers.

        Raises:
            EngineError: the plan is inconsistent with the runner's state. After this, or an error of the program, the step's
                sequences must depart before they are named again; others are unaffected.
        """
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Starts a step like `run`, and returns a function that waits for its result. Call it before the next step.

        Meanwhile a program on another device computes, if it chooses all tokens itself.
        """
        started_s = self._clock.now()
        self._sampling_time.sum_s = 0.0
        for seq_id in plan.departures:
            self._batch.depart(seq_id)
            self.encoding.cancel(seq_id)
            self._drafting.forget(seq_id)
        for new in plan.arrivals:
            self._batch.arrive(new)
        for seq_id, offset in plan.encodes:
            self._begin_encoding(seq_id, offset)
        if plan.wipes:
            self._program.wipe_blocks(plan.wipes)
            self._drafting.wipe_blocks(plan.wipes if self._num_groups == 1 else [b for b in plan.wipes if self._is_drafters(b)])
        if plan.loads:
            self._program.import_blocks([load.block for load in plan.loads], [load.content for load in plan.loads])
        if plan.copies:
            self._program.copy_blocks(plan.copies)
            self._drafting.copy_blocks(
                plan.copies if self._num_groups == 1 else [p for p in plan.copies if self._is_drafters(p[0])]
            )
        if not (plan.sequences or self.num_sequences):
            self.wipe_buffers()
        result = StepResult(plan_id=plan.plan_id)
        parts = [self._part(part) for part in plan.sequences]
        if self._batch.num_guided:
            self._masks.begin()
            parts = self._leave_out(parts, plan, result)
        if self._tables.ranges is not None:
            self._batch.map_blocks([part.state for part in parts])
        if self._drafts:
            parts = self._drafted(parts)
        live = [part for part in parts if part.state.failure is None]
        layerwise = []
        for part in live:  # a comprehension would be another call in every step
            if part.plan.layerwise is not None:
                layerwise.append(part)
        if layerwise:
            live = [part for part in live if part.plan.layerwise is None]
        if self._batch.num_with_images:
            self._collect_images(live)
        if self._batch.num_pooled:
            result.embeddings = self._pool([part for part in live if part.state.pool is not None])
            live = [part for part in live if part.state.pool is None]
        if self._is_encoder and live:
            for part in live:
                part.state.failure = NO_TEXT
            live = []
        wait = self._generator.start(live, plan.forks, result)
        for part in layerwise:
            self._layerwise.run(part, result)
        return partial(self._finish, plan, parts, wait, result, started_s)

    def _finish(
        self,
        plan: StepPlan,
        parts: list[ScheduledSequence],
        wait: Callable[[], None] | None,
        result: StepResult,
        started_s: float,
    ) -> StepResult:
        if wait is not None:
            wait()
        if self._tables.state_group is not None:
            self._take_snapshots(parts)
        touched = [part.state for part in parts]
        touched += [self._batch[fork.child_id] for fork in plan.forks]
        if self._batch.num_guided:
            with self._sampling_time:
                self._follow_grammars([state for state in touched if state.grammar is not None], result)
        result.failures = {state.seq_id: state.failure for state in touched if state.failure is not None}
        if result.failures:
            result.unsupported = {state.seq_id for state in touched if state.seq_id in result.failures and state.is_unsupported}
        if self._drafts:
            result.draft_s = self._drafting.take_times()
        result.elapsed_s = self._clock.now() - started_s
        result.sampling_s = self._sampling_time.sum_s
        return result

    def _take_snapshots(self, parts: Sequence[ScheduledSequence]) -> None:
        """Copies the states with which parts end that were cut short, where the next step was to keep them on its way."""
        ends = [(part, self._tables.snapshot_at_end(part)) for part in parts if part.num_cut and part.state.failure is None]
        copies = [(self._tables.running_state(part), block) for part, block in ends if block is not None]
        if copies:
            self._program.copy_blocks(copies)

    def _drafted(self, parts: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Returns the parts with their drafts."""
        going = [part for part in parts if part.state.failure is None and part.state.pool is None]
        pairs = [(part.plan, part.state) for part in going if part.plan.layerwise is None]
        self._drafting.follow(pairs)
        drafts = self._drafting.draft(pairs)
        return [
            schedule_sequence(part.plan, part.state, drafts[part.plan.seq_id]) if part.plan.seq_id in drafts else part
            for part in parts
        ]

    def _leave_out(self, parts: list[ScheduledSequence], plan: StepPlan, result: StepResult) -> list[ScheduledSequence]:
        """Returns the parts without the last positions of sequences that can get no token in this step, as it is known so far,
        and defers these.

        They are those whose token before is late; and, where no position can be computed twice, those whose mask is.
        """
        late = {part.state.seq_id for part in parts if self._is_behind(part)}
        if not self._generator.may_repeat:
            guided = [part.state for part in parts if _may_be_cut(part)]
            missing = [state.grammar for state in guided if state.grammar is not None and not state.grammar.is_ready]
            if len(missing) > 1:  # a single one is waited for during the step
                self._masks.wait(missing, may_defer=True)
                late |= {state.seq_id for state in guided if state.grammar in missing and state.is_late}
        if not late:
            return parts
        result.left_out = late
        result.deferred = late | {fork.child_id for fork in plan.forks if fork.parent_id in late}
        going = []
        for part in parts:
            if part.state.seq_id not in late:
                going.append(part)
            elif (cut := cut_last(part)) is not None:
                going.append(cut)
        return going

    def _is_behind(self, part: ScheduledSequence) -> bool:
        """Whether the step before, of which the plan did not know the result, has deferred its last token."""
        return part.state.grammar is not None and part.state.failure is None and part.end > len(part.state.tokens)

    def _begin_encoding(self, seq_id: int, offset: int) -> None:
        images = self._batch[seq_id].images
        if images is None:  # the step that reaches it says why the sequence cannot run
            self.encoding.report(EncodedImage(seq_id, offset))
        else:
            self.encoding.start(seq_id, next(tile for tile in images.tiles if tile.offset == offset))

    def _collect_images(self, parts: list[ScheduledSequence]) -> None:
        """Takes the images whose positions the step reaches, and forgets those that it is past."""
        for part in parts:
            self._batch.drop_images(part.state, part.plan.start)
            if part.state.images is not None:
                for tile in part.state.images.missing(part.end):
                    part.state.images.embeddings[tile.offset] = self.encoding.collect(part.state.seq_id, tile.offset)

    def _pool(self, parts: list[ScheduledSequence]) -> dict[int, Embedding]:
        """Computes the pooled sequences of a step separately: they need hidden states, not logits."""
        if not self._can_pool:
            for part in parts:
                part.state.failure = NOT_OFFERED
            return {}
        if not self._is_encoder:
            for part in parts:
                if part.state.pool is not None and part.state.pool.params.kind in ("cls", "classify"):
                    part.state.failure = OF_ENCODERS
            parts = [part for part in parts if part.state.failure is None]
        if not parts:
            return {}
        pool = encode_parts if self._is_encoder else pool_parts
        return pool(self._program, parts, forward_batch(parts, self._tables))

    def _generate_from_last_layer(self, part: ScheduledSequence, result: StepResult) -> None:
        """Adds what a chunk of the last layer of a prompt brings."""
        if part.state.pool is not None:
            result.embeddings |= self._pool([part])
            return
        own, how = StepResult(plan_id=result.plan_id), part.plan.layerwise
        may_repeat = how is not None and how.may_repeat and part.state.sampling.prompt_logprobs is None
        if part.plan.num_samples and part.state.grammar is not None and not may_repeat:
            self._masks.wait([part.state.grammar], may_defer=False)
        self._last_layer.start([part], [], own)
        result.samples += own.samples
        result.deferred |= own.deferred
        for seq_id, entries in own.prompt_logprobs.items():
            result.prompt_logprobs.setdefault(seq_id, []).extend(entries)

    def _follow_grammars(self, states: list[SequenceState], result: StepResult) -> None:
        """Reports sequences whose grammar is complete, and starts to compute the masks of the others."""
        if not states or self._grammars is None:
            return
        sampled = {sample.seq_id for sample in result.samples}
        going_on = []
        for state in states:
            if state.grammar is None or state.seq_id not in sampled:
                continue
            if state.grammar.is_complete:
                result.complete.add(state.seq_id)
            else:
                going_on.append(state.grammar)
        self._grammars.look_ahead(going_on)

    def _is_drafters(self, block: int) -> bool:
        """Whether drafters use a block id: they use those of the first group."""
        return self._num_drafter_blocks is None or block < self._num_drafter_blocks

    def _part(self, plan: SequencePlan) -> ScheduledSequence:
        state = self._batch[plan.seq_id]
        start = plan.table_start * self._num_groups
        if plan.new_block_ids or start != len(state.blocks):
            if start > len(state.blocks):
                raise EngineError(f"the step plan leaves a gap in the block table of sequence {plan.seq_id}")
            state.blocks[start:] = array("i", plan.new_block_ids)
            state.unmapped_from = start if state.unmapped_from is None else min(start, state.unmapped_from)
        return schedule_sequence(plan, state)


def _may_be_cut(part: ScheduledSequence) -> bool:
    """Whether a part samples under a grammar, and its last position can wait for a later step."""
    state = part.state
    if state.grammar is None or state.failure is not None or not part.plan.num_samples or part.plan.layerwise is not None:
        return False
    # positions of an image that see each other are computed by one step
    return state.images is None or not any(image.bidirectional and image.end >= part.end for image in state.images.tiles)
