"""What the runner knows of the sequences it holds: tokens, block tables, and how each one samples."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from cloister.backends.base import DRAW, DrawArray
from cloister.runner.bias import Bias
from cloister.runner.penalties import Penalties, TokenCounts
from cloister.types.errors import EngineError
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """One sequence.

    Attributes:
        slot: its row in the sampling columns.
        tokens: prompt, then output.
        blocks: the block table.
        is_bare: it takes a token of the distribution as the model says it, and wants to know nothing else.
        is_plain: it is bare, and takes the most likely token.
        penalties, bias, bar: what changes its logits; None where nothing was asked for. `bar` holds before `min_tokens`.
        failure: why it cannot go on, in words for the client; set once, and the sequence computes no more.
    """

    seq_id: int
    slot: int
    tokens: array[int]
    blocks: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    is_bare: bool = False
    is_plain: bool = False
    penalties: Penalties | None = None
    bias: Bias | None = None
    bar: Bias | None = None
    failure: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_adjusted(self) -> bool:
        """Whether its logits change before a token is chosen."""
        return self.penalties is not None or self.bias is not None or self.active_bar is not None

    @property
    def active_bar(self) -> Bias | None:
        """The bar on stop tokens, while the output is shorter than `min_tokens`."""
        return self.bar if self.num_output_tokens < self.sampling.min_tokens else None

    def append(self, token_id: int) -> None:
        """Adds a sampled token."""
        self.tokens.append(token_id)
        if self.penalties is not None:
            self.penalties.counts.add(token_id)


class BatchState:
    """Every sequence that the runner holds, by id.

    Sampling parameters lie in columns, one row per slot, so that a step gathers them without a loop.
    """

    def __init__(self, *, vocab_size: int, max_model_len: int) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._sequences: dict[int, SequenceState] = {}
        self._columns = np.zeros(16, DRAW)
        self._free_slots = list(range(16))[::-1]

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, seq_id: int) -> SequenceState:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise EngineError(f"the step plan names sequence {seq_id}, which the runner does not hold") from None

    def draws(self, states: list[SequenceState], rows: list[int]) -> DrawArray:
        """Says how the next token of each sequence is chosen from its row of logits, [len(states)] of `DRAW`."""
        draws = self._columns[[state.slot for state in states]]
        draws["row"] = rows
        draws["position"] = [len(state.tokens) for state in states]
        return draws

    def arrive(self, new: NewSequence) -> None:
        """Takes a sequence in. One that cannot run is held as failed, so that the plan's other parts are unharmed."""
        sampling = new.sampling
        state = SequenceState(
            seq_id=new.seq_id,
            slot=self._take_slot(),
            tokens=array("i"),
            blocks=array("i"),
            num_prompt_tokens=new.num_prompt_tokens,
            sampling=sampling,
            failure=self._objection(new),
        )
        self._file(state)
        self._columns[state.slot] = (
            sampling.temperature, 0, sampling.top_k, sampling.top_p, sampling.min_p, new.seed & (2**64 - 1), new.index, 0
        )  # fmt: skip
        if state.failure is None:
            state.tokens.extend(new.token_ids)
            state.penalties = _penalties(sampling, new)
            state.bias = _bias(sampling)
            state.bar = self._bar(new)
            state.is_bare = _is_bare(state)
            state.is_plain = state.is_bare and sampling.temperature == 0

    def fork(self, parent_id: int, child_id: int, index: int) -> SequenceState:
        """Makes `child_id` a copy of `parent_id` that draws with noise of its own."""
        parent = self[parent_id]
        penalties = parent.penalties
        if penalties is not None:
            penalties = Penalties(penalties.repetition, penalties.presence, penalties.frequency, penalties.counts.copy())
        child = SequenceState(
            seq_id=child_id,
            slot=self._take_slot(),
            tokens=parent.tokens[:],
            blocks=parent.blocks[:],
            num_prompt_tokens=parent.num_prompt_tokens,
            sampling=parent.sampling,
            is_bare=parent.is_bare,
            is_plain=parent.is_plain,
            penalties=penalties,
            bias=parent.bias,
            bar=parent.bar,
            failure=parent.failure,
        )
        self._file(child)
        self._columns[child.slot] = self._columns[parent.slot]
        self._columns["index"][child.slot] = index
        return child

    def depart(self, seq_id: int) -> None:
        """Forgets a sequence; its tokens are overwritten.

        One that is not held is no error: after a step that broke off, nobody knows who had arrived.
        """
        state = self._sequences.pop(seq_id, None)
        if state is None:
            return
        memoryview(state.tokens).cast("B")[:] = bytes(state.tokens.itemsize * len(state.tokens))
        self._columns[state.slot] = 0
        self._free_slots.append(state.slot)

    def _file(self, state: SequenceState) -> None:
        if state.seq_id in self._sequences:
            raise EngineError(f"sequence {state.seq_id} arrives, but the runner holds it already")
        self._sequences[state.seq_id] = state

    def _take_slot(self) -> int:
        if not self._free_slots:
            size = self._columns.size
            self._columns = np.concatenate([self._columns, np.zeros(size, DRAW)])
            self._free_slots = list(range(size, 2 * size))[::-1]
        return self._free_slots.pop()

    def _objection(self, new: NewSequence) -> str | None:
        """Says why a sequence cannot run, or None."""
        ids = new.token_ids
        if not 0 < len(ids) <= self._max_model_len:
            return f"a sequence needs 1 to {self._max_model_len} tokens; shorten the prompt"
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            return f"the prompt has a token id outside the vocabulary; use ids from 0 to {self._vocab_size - 1}"
        if any(not 0 <= token < self._vocab_size for token in new.sampling.logit_bias):
            return f"logit_bias has a token id outside the vocabulary; use ids from 0 to {self._vocab_size - 1}"
        return None

    def _bar(self, new: NewSequence) -> Bias | None:
        ids = sorted({token for token in new.stop_token_ids if 0 <= token < self._vocab_size})
        return Bias.bar(ids) if ids and new.sampling.min_tokens else None


def _is_bare(state: SequenceState) -> bool:
    sampling = state.sampling
    is_silent = sampling.logprobs is None and sampling.prompt_logprobs is None
    return is_silent and state.penalties is None and state.bias is None and state.bar is None


def _penalties(sampling: SamplingParams, new: NewSequence) -> Penalties | None:
    asked = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if asked == (1.0, 0.0, 0.0):
        return None
    return Penalties(*asked, TokenCounts(np.array(new.token_ids, np.int32), new.num_prompt_tokens))


def _bias(sampling: SamplingParams) -> Bias | None:
    if not sampling.logit_bias:
        return None
    ids, values = zip(*sampling.logit_bias.items(), strict=True)
    return Bias(np.array(ids, np.int64), np.array(values, np.float32))
