"""The runner's state of its sequences: tokens, block tables, and sampling parameters."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.backends.base import SAMPLING_METADATA, FloatArray, IntArray, SamplingMetadata
from cloister.backends.ranges import KVRanges
from cloister.backends.vision import AnyVisionSpec
from cloister.executor.arrays import overwrite
from cloister.executor.grammar import Grammars, GrammarState
from cloister.executor.images import GridPositions, SequenceImages, find_objection
from cloister.executor.links import SequenceLinks
from cloister.executor.logits_processors import LogitBias, Penalties, TokenCounts
from cloister.executor.pooling import Pool
from cloister.types.documents import Documents
from cloister.types.errors import CloisterError, EngineError, InvalidRequestError
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """One sequence.

    Attributes:
        slot: its row in the sampling columns, and the number of its address range.
        tokens: token ids of prompt and output.
        blocks: the block table; one block per entry for each group of layers (`KVLayout.groups`).
        num_groups: number of groups.
        is_unprocessed: its tokens are sampled from the model's distribution, restricted only by its grammar if any, and it
            needs no other outputs.
        is_greedy: it is unprocessed, has no grammar, and takes the most likely token.
        penalties, bias, stop_mask: changes of its logits; None if not requested. `stop_mask` applies before `min_tokens`.
        grammar: its grammar state, if it has a grammar.
        pool: accumulates its prompt's vector; it samples nothing.
        adapter: slot of its adapter; -1 is none.
        stops: tokens that end it.
        failure: why it cannot continue, as a message for the client; set once, after which the sequence computes nothing.
        is_refused: its grammar was refused when it was opened.
        images: images of its prompt; None once all their positions are computed.
        grids: what its tokens turn by, where that is not their position; None where it is.
        documents: parts of its prompt that are encoded separately.
        links: their link tokens; None for none.
        unmapped_from: the first entry of its block table that its address range lacks, or has another block for
            (`BatchState.map_blocks`); None if the range is as the table.
    """

    seq_id: int
    slot: int
    tokens: array[int]
    blocks: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    is_unprocessed: bool = False
    is_greedy: bool = False
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    stop_mask: LogitBias | None = None
    grammar: GrammarState | None = None
    pool: Pool | None = None
    stops: frozenset[int] = frozenset()
    failure: str | None = None
    is_refused: bool = False
    adapter: int = -1
    num_groups: int = 1
    images: SequenceImages | None = None
    grids: GridPositions | None = None
    documents: Documents | None = None
    links: SequenceLinks | None = None
    unmapped_from: int | None = 0

    @property
    def first_group_blocks(self) -> array[int]:
        """The block table of the first group of layers, whose block ids drafters use."""
        return self.blocks if self.num_groups == 1 else self.blocks[:: self.num_groups]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_coupled(self) -> bool:
        """Whether its tokens must depend on its seed only, with or without drafts."""
        return self.sampling.seed is not None or self.sampling.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether its logits are changed before sampling."""
        if self.penalties is not None or self.bias is not None or self.grammar is not None:
            return True
        return self.stop_mask is not None and self.active_stop_mask is not None

    @property
    def active_stop_mask(self) -> LogitBias | None:
        """The mask of stop tokens, while the output is shorter than `min_tokens` and can still grow."""
        if self.grammar is not None and self.grammar.must_end:
            return None
        return self.stop_mask if self.num_output_tokens < self.sampling.min_tokens else None

    @property
    def is_late(self) -> bool:
        """Whether it gets no token in this step, as the mask of its grammar is late."""
        return self.grammar is not None and self.grammar.is_late

    @property
    def is_unsupported(self) -> bool:
        """Whether it cannot continue because of its grammar."""
        return self.is_refused or (self.grammar is not None and self.grammar.failure is not None)

    def append(self, token_id: int) -> None:
        """Adds a sampled token."""
        self.tokens.append(token_id)
        if self.penalties is not None:
            self.penalties.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)
            self.failure = self.grammar.failure


class BatchState:
    """Every sequence that the runner holds, by id.

    Sampling parameters are stored in columns, one row per slot, so that a step gathers them without a loop.

    Args:
        adapters: digest -> slot of the program's adapters.
        links: digest -> what the link tokens of an adapter read, [num_links, hidden], of those that have some.
        num_groups: number of layer groups, each with one block per entry of a block table.
        vision: the tower that encodes images; None if there is none.
        ranges: maps blocks to address ranges of sequences; None if the program has none.

    Attributes:
        num_pooled: number of pooled sequences.
        num_guided: number of sequences with a grammar.
        num_with_images: number of sequences that have images left to compute.
        num_not_greedy, num_processed: number of sequences that are not `is_greedy`, and not `is_unprocessed`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        adapters: Mapping[str, int] = {},
        links: Mapping[str, FloatArray] = {},
        grammars: Grammars | None = None,
        num_groups: int = 1,
        vision: AnyVisionSpec | None = None,
        ranges: KVRanges | None = None,
    ) -> None:
        self._ranges = ranges
        self._num_groups = num_groups
        self._vision = vision
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._links = links
        self._sequences: dict[int, SequenceState] = {}
        self.num_pooled = 0
        self.num_guided = 0
        self.num_with_images = 0
        self.num_not_greedy = 0
        self.num_processed = 0
        self._columns = np.zeros(16, SAMPLING_METADATA)
        self._free_slots = list(range(16))[::-1]

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, seq_id: int) -> SequenceState:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise EngineError(f"the step plan names sequence {seq_id}, which the runner does not hold") from None

    def sampling_metadata(
        self, states: list[SequenceState], rows: list[int] | IntArray, positions: IntArray | None = None
    ) -> SamplingMetadata:
        """Returns how the next token of each sequence is sampled from its row of logits, [len(states)] of `SAMPLING_METADATA`.

        Args:
            positions: positions of the next tokens, if already known.
        """
        metadata = self._columns.take([state.slot for state in states])
        metadata["row"] = rows
        metadata["position"] = [len(state.tokens) for state in states] if positions is None else positions
        return metadata

    def arrive(self, new: NewSequence) -> None:
        """Adds a sequence. One that cannot run is kept as failed, so that the plan's other parts are unaffected."""
        sampling = new.sampling
        state = SequenceState(
            seq_id=new.seq_id,
            slot=self._take_slot(),
            tokens=array("i"),
            blocks=array("i"),
            num_prompt_tokens=new.num_prompt_tokens,
            sampling=sampling,
            pool=Pool(new.pooling) if new.pooling is not None else None,
            stops=frozenset(new.stop_token_ids),
            failure=self._objection(new),
            adapter=-1 if new.adapter is None else self._adapters.get(new.adapter, -1),
            num_groups=self._num_groups,
            documents=new.documents,
        )
        self._file(state)
        self.num_pooled += state.pool is not None
        self._columns[state.slot] = (
            sampling.temperature, 0, sampling.top_k, sampling.top_p, sampling.min_p, new.seed & (2**64 - 1), new.index, 0
        )  # fmt: skip
        if state.failure is None:
            state.tokens.extend(new.token_ids)
            if new.documents is not None and new.documents.num_links and new.adapter is not None:
                state.links = SequenceLinks(new.documents, self._links[new.adapter])
            if new.images:
                state.images, state.grids = SequenceImages(list(new.images)), GridPositions.of(new.images)
                self.num_with_images += 1
            state.penalties = _penalties(sampling, new)
            state.bias = _bias(sampling)
            state.stop_mask = self._stop_mask(new)
            self._open_grammar(state)
            self.num_guided += state.grammar is not None
            state.is_unprocessed = _is_unprocessed(state)
            state.is_greedy = state.is_unprocessed and sampling.temperature == 0 and state.grammar is None
        self._count(state, 1)

    def fork(self, parent_id: int, child_id: int, index: int) -> SequenceState:
        """Makes `child_id` a copy of `parent_id` that samples with its own noise."""
        parent = self[parent_id]
        penalties = parent.penalties
        if penalties is not None:
            penalties = Penalties(penalties.repetition, penalties.presence, penalties.frequency, penalties.counts.copy())
        child = SequenceState(
            seq_id=child_id,
            slot=self._take_slot(),
            tokens=parent.tokens[:],
            blocks=parent.blocks[:],
            num_groups=parent.num_groups,
            num_prompt_tokens=parent.num_prompt_tokens,
            sampling=parent.sampling,
            is_unprocessed=parent.is_unprocessed,
            is_greedy=parent.is_greedy,
            penalties=penalties,
            bias=parent.bias,
            stop_mask=parent.stop_mask,
            grammar=None if parent.grammar is None else parent.grammar.copy(),
            stops=parent.stops,
            failure=parent.failure,
            documents=parent.documents,
            adapter=parent.adapter,
            grids=parent.grids,
        )
        self._file(child)
        self.num_guided += child.grammar is not None
        self._count(child, 1)
        self._columns[child.slot] = self._columns[parent.slot]
        self._columns["index"][child.slot] = index
        return child

    def depart(self, seq_id: int) -> None:
        """Removes a sequence and overwrites its tokens.

        Unknown ids are ignored: after a failed step it is unknown which sequences had arrived.
        """
        state = self._sequences.pop(seq_id, None)
        if state is None:
            return
        overwrite(state.tokens)
        self.drop_images(state, len(state.tokens))
        if state.pool is not None:
            state.pool.wipe()
            self.num_pooled -= 1
        self.num_guided -= state.grammar is not None
        self._count(state, -1)
        self._columns[state.slot] = 0
        self._free_slots.append(state.slot)
        if self._ranges is not None:
            self._ranges.release(state.slot)

    def map_blocks(self, states: Sequence[SequenceState]) -> None:
        """Brings address ranges up to date with block tables; a sequence whose range the system refuses fails."""
        if self._ranges is None:
            return
        for state in states:
            if state.unmapped_from is None:
                continue
            try:
                self._ranges.map(state.slot, state.unmapped_from, state.blocks)
                state.unmapped_from = None
            except EngineError as error:
                state.failure = error.message

    def drop_images(self, state: SequenceState, position: int) -> None:
        """Drops the images of a sequence that end before a position."""
        if state.images is None:
            return
        state.images.drop_before(position)
        if not state.images.tiles:
            state.images = None
            self.num_with_images -= 1

    def _count(self, state: SequenceState, change: int) -> None:
        self.num_not_greedy += change * (not state.is_greedy)
        self.num_processed += change * (not state.is_unprocessed)

    def _file(self, state: SequenceState) -> None:
        if state.seq_id in self._sequences:
            raise EngineError(f"sequence {state.seq_id} arrives, but the runner holds it already")
        self._sequences[state.seq_id] = state

    def _take_slot(self) -> int:
        if not self._free_slots:
            size = self._columns.size
            self._columns = np.concatenate([self._columns, np.zeros(size, SAMPLING_METADATA)])
            self._free_slots = list(range(size, 2 * size))[::-1]
        return self._free_slots.pop()

    def _objection(self, new: NewSequence) -> str | None:
        """Returns why a sequence cannot run, or None."""
        if new.adapter is not None and new.adapter not in self._adapters:
            return "the adapter is not loaded any more; ask for another model"
        num_links = 0 if new.documents is None else new.documents.num_links
        if num_links and num_links != len(self._links.get(new.adapter or "", ())):
            return "the adapter has not so many link tokens; ask for another model, or encode no documents separately"
        ids = new.token_ids
        if not 0 < len(ids) <= self._max_model_len:
            return f"a sequence needs 1 to {self._max_model_len} tokens; shorten the prompt"
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            return f"the prompt has a token id outside the vocabulary; use ids from 0 to {self._vocab_size - 1}"
        if any(not 0 <= token < self._vocab_size for token in new.sampling.logit_bias):
            return f"logit_bias has a token id outside the vocabulary; use ids from 0 to {self._vocab_size - 1}"
        return find_objection(self._vision, new.images, len(ids)) if new.images else None

    def _open_grammar(self, state: SequenceState) -> None:
        grammar = state.sampling.grammar
        if grammar is None:
            return
        if self._grammars is None:
            state.failure = "this engine follows no grammars; leave the grammar out"
            return
        try:
            state.grammar = self._grammars.open(grammar, state.sampling, state.tokens[state.num_prompt_tokens :].tolist())
        except CloisterError as error:
            state.failure, state.is_refused = error.message, isinstance(error, InvalidRequestError)

    def _stop_mask(self, new: NewSequence) -> LogitBias | None:
        ids = sorted({token for token in new.stop_token_ids if 0 <= token < self._vocab_size})
        return LogitBias.mask(ids) if ids and new.sampling.min_tokens else None


def _is_unprocessed(state: SequenceState) -> bool:
    sampling = state.sampling
    is_silent = sampling.logprobs is None and sampling.prompt_logprobs is None
    return is_silent and state.penalties is None and state.bias is None and state.stop_mask is None


def _penalties(sampling: SamplingParams, new: NewSequence) -> Penalties | None:
    asked = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if asked == (1.0, 0.0, 0.0):
        return None
    return Penalties(*asked, TokenCounts(np.array(new.token_ids, np.int32), new.num_prompt_tokens))


def _bias(sampling: SamplingParams) -> LogitBias | None:
    if not sampling.logit_bias:
        return None
    ids, values = zip(*sampling.logit_bias.items(), strict=True)
    return LogitBias(np.array(ids, np.int64), np.array(values, np.float32))
