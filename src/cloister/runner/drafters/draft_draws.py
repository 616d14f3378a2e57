"""How a small model's tokens are chosen: with the noise of the model's own, or drawn apart from it with their distribution."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from cloister.backends.base import DrawArray, DrawingProgram, FloatArray, ForwardBatch, IntArray, Program
from cloister.runner.noise import Domain, UniformArray, noise_keys, uniforms
from cloister.runner.sampling import Sampler
from cloister.runner.state import SequenceState
from cloister.types.request import SamplingParams


class DraftChooser:
    """Chooses tokens from a small model's logits as the runner does from the model's; penalties and grammars aside.

    A token that is chosen from q with the very noise that the model's is chosen from p with is the same more often than not:
    the race is run by the same runners on nearly the same track.
    """

    def __init__(self, program: Program, vocab_size: int) -> None:
        self._program = program
        self._drawing = program if isinstance(program, DrawingProgram) else None
        self._sampler = Sampler(vocab_size)

    def forward_draw(self, batch: ForwardBatch, draws: DrawArray) -> IntArray:
        """Computes a batch and chooses a token for each of `draws` (`DrawingProgram.forward_draw`)."""
        if self._drawing is not None:
            return self._drawing.forward_draw(batch, draws)
        return self.draw(self._program.forward(batch), draws)

    def draw(self, logits: FloatArray, draws: DrawArray) -> IntArray:
        """Chooses tokens from logits [num_rows, vocab], in which minus infinity bars one; -1 where there is none to choose."""
        if self._drawing is not None:
            return self._drawing.draw(logits, draws)
        return self._sampler.choose(logits, [_BARE] * len(draws), draws).astype(np.int32)


def draft_numbers(draws: DrawArray, depths: Sequence[int] | IntArray, ordinals: Sequence[int] | IntArray) -> UniformArray:
    """Returns a number for each draw, uniform in [0, 1), that no verification uses; draws at one position differ.

    By depth, too: what follows a rejected draft is drawn again, less deep, in a later step. Whether it is may depend on the
    first draw, as a draft that ended early is asked for less; with the same number the second would not be a draw from its
    distribution.
    """
    keys = noise_keys(draws["seed"], draws["index"], draws["position"])
    return uniforms(keys, Domain.DRAFT, (np.asarray(depths, np.int64) << 16) + np.asarray(ordinals, np.int64))


_BARE = SequenceState(
    seq_id=-1, slot=-1, tokens=array("i"), blocks=array("i"), num_prompt_tokens=0, sampling=SamplingParams(), is_bare=True
)
