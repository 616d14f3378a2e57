"""Runs steps of a program; what its back end lacks is done on the host in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from cloister.backends.base import (
    LOGITS,
    Capability,
    FloatArray,
    ForwardBatch,
    IntArray,
    MaskArray,
    Program,
    SamplingMetadata,
    StepOutput,
    Wants,
)
from cloister.executor.grammar import mask_tokens
from cloister.executor.logits_processors import process_logits
from cloister.executor.sampling import Sampler, finite_rows, greedy_tokens, row_pieces
from cloister.executor.sampling_time import SamplingTime
from cloister.executor.state import SequenceState
from cloister.types.clock import WallClock
from cloister.types.errors import EngineError


class ProgramExecutor:
    """Runs a program's step; missing capabilities (sampling, masks, ids of the largest logits) are provided here in numpy.

    Args:
        program: the program.
        vocab_size: columns of its logits.
        sampling_time: counts what is done here; None where nobody asks.
    """

    def __init__(self, program: Program, vocab_size: int, sampling_time: SamplingTime | None = None) -> None:
        has = program.capabilities
        self._program, self._vocab_size = program, vocab_size
        self._is_greedy, self._is_sampling, self._is_masking = (
            capability in has for capability in (Capability.GREEDY, Capability.SAMPLING, Capability.MASKS)
        )
        self.is_asynchronous = Capability.ASYNCHRONOUS in has
        self._lacks_something = not (self._is_greedy and self._is_sampling and self._is_masking)
        self._sampler = None if self._is_sampling else Sampler(vocab_size)
        self._sampling_time = sampling_time or SamplingTime(WallClock())

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step (`backends.base.Program.step`), and overwrites the embeddings of its images, and its
        hidden states, which are copies.

        Raises:
            EngineError: the program returned logits of another shape.
        """
        try:
            if self._lacks_something and not self._can_choose(wants):
                return self._choose_on_host(self._program.step(batch, _logits_first(wants)), batch, wants)
            output = self._program.step(batch, wants)
            if wants.logits and output.logits.shape != (batch.logit_rows.size, self._vocab_size):
                raise _wrong_shape(output)
            return output
        finally:
            for copied in (batch.embeddings, batch.hidden):
                if copied is not None:
                    copied.fill(0)

    def launch(self, batch: ForwardBatch, wants: Wants) -> Callable[[], StepOutput]:
        """Starts one step of an asynchronous program; returns a function that waits for it (`backends.base.Program.launch`)."""
        if self._can_choose(wants):
            return self._program.launch(batch, wants)
        wait = self._program.launch(batch, _logits_first(wants))
        return lambda: self._choose_on_host(wait(), batch, wants)

    def _can_choose(self, wants: Wants) -> bool:
        """Whether the program itself provides all wanted outputs."""
        if wants.sampling is not None or wants.num_top:
            return self._is_sampling and (self._is_masking or wants.masks is None)
        return self._is_greedy or not wants.greedy

    def sample(self, logits: FloatArray, sampling: SamplingMetadata) -> npt.NDArray[np.integer]:
        """Samples one token for each entry from logits (`backends.base.Program.sample`)."""
        return self._program.sample(logits, sampling) if self._sampler is None else self._sampler.sample(logits, sampling)

    def process_and_sample(
        self, logits: FloatArray, states: Sequence[SequenceState], sampling: SamplingMetadata
    ) -> npt.NDArray[np.int64]:
        """Samples like `sample`, after applying each sequence's logits processors to a copy of its row.

        A sequence without processors gets the same token as from a step that samples: other requests must not affect it.
        """
        tokens = np.empty(len(sampling), np.int64)
        is_changed = np.array([state.changes_logits for state in states], np.bool_)
        if not is_changed.all():
            tokens[~is_changed] = self.sample(logits, sampling[~is_changed])
        (changed,) = np.nonzero(is_changed)
        for piece in row_pieces(len(changed), logits.shape[1]):
            places = changed[piece]
            own = sampling[places]
            scores = process_logits(logits[own["row"]], [states[place] for place in places])
            own["row"] = np.arange(len(own))
            tokens[places] = self.sample(scores, own)
        return tokens

    def _choose_on_host(self, output: StepOutput, batch: ForwardBatch, wants: Wants) -> StepOutput:
        if output.logits.shape != (batch.logit_rows.size, self._vocab_size):
            raise _wrong_shape(output)
        logits = np.ascontiguousarray(output.logits, np.float32)
        chosen = StepOutput(hidden=output.hidden)
        if wants.logits:
            chosen.logits = logits
        elif wants.greedy:
            chosen.tokens = greedy_tokens(logits)
        elif wants.sampling is not None:
            masks = None if wants.masks is None else wants.masks()
            since_s = self._sampling_time.now()
            chosen.tokens = self._sample_on_host(logits, wants.sampling, masks)
            self._sampling_time.sum_s += self._sampling_time.now() - since_s
        if wants.num_top:
            chosen.top = largest_ids(logits, wants.num_top)
        return chosen

    def _sample_on_host(self, logits: FloatArray, sampling: SamplingMetadata, masks: MaskArray | None) -> IntArray:
        if masks is None:
            chosen = self._program.sample(logits, sampling) if self._sampler is None else self._sampler.sample(logits, sampling)
            tokens = np.array(chosen, np.int32)
        else:
            tokens = np.empty(len(sampling), np.int32)
            for piece in row_pieces(len(sampling), logits.shape[1]):
                own = sampling[piece].copy()
                scores = logits[own["row"]]
                mask_tokens(scores, range(len(scores)), list(masks[piece]))
                own["row"] = np.arange(len(own))
                tokens[piece] = self.sample(scores, own)
        tokens[~finite_rows(logits)[sampling["row"]]] = -1
        return tokens


def _wrong_shape(output: StepOutput) -> EngineError:
    return EngineError(f"the program returned logits of shape {output.logits.shape}")


def _logits_first(wants: Wants) -> Wants:
    """Returns the outputs to request from a program if tokens are chosen here."""
    shows_hidden = wants.hidden or wants.every_hidden
    return Wants(logits=True, hidden=wants.hidden, every_hidden=wants.every_hidden) if shows_hidden else LOGITS


def largest_ids(logits: FloatArray, count: int) -> IntArray:
    """Returns the ids of each row's largest logits, best first, lower ids first among equal ones, [num_rows, count].

    -1 for a row that is not finite.
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count].astype(np.int32)
    order[~finite_rows(logits)] = -1
    return order
