"""Chooses tokens with a program that can draw, whatever else a request wants of its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import DrawArray, DrawingProgram
from cloister.runner.adjusting import adjusted
from cloister.runner.pieces import row_pieces
from cloister.runner.sampling import FloatArray, IntArray
from cloister.runner.state import SequenceState


class ProgramSampler:
    """`runner.sampling.Sampler` on a program, for steps whose logits are wanted.

    What the program chooses by itself in other steps is the same: a sequence must not feel its company's wishes.
    """

    def __init__(self, program: DrawingProgram) -> None:
        self._program = program

    def choose(self, logits: FloatArray, states: Sequence[SequenceState], draws: DrawArray) -> IntArray:
        """Chooses one token per draw (`Sampler.choose`)."""
        tokens = np.empty(len(draws), np.int64)
        plain = np.array([not state.is_adjusted for state in states], np.bool_)
        tokens[plain] = self._program.draw(logits, draws[plain])
        (changed,) = np.nonzero(~plain)
        for piece in row_pieces(len(changed), logits.shape[1]):
            places = changed[piece]
            own = draws[places]
            scores = adjusted(logits[own["row"]], [states[place] for place in places])
            own["row"] = np.arange(len(own))
            tokens[places] = self._program.draw(scores, own)
        return tokens
