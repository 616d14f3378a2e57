"""What requests change of the logits before a token is chosen: penalties, bias, bars, grammars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cloister.runner.bias import LogitBias, apply_bias
from cloister.runner.grammar import MaskArray, bar_tokens
from cloister.runner.penalties import Penalties, apply_penalties
from cloister.runner.state import SequenceState

FloatArray = npt.NDArray[np.float32]


def adjusted(logits: FloatArray, states: Sequence[SequenceState]) -> FloatArray:
    """Returns logits after penalties, bias, bars and grammars: a copy, or the very array when no row asks for any."""
    penalties: dict[int, Penalties] = {}
    biases: dict[int, LogitBias] = {}
    masks: dict[int, MaskArray] = {}
    bars: dict[int, LogitBias] = {}
    for row, state in enumerate(states):
        if state.penalties is not None:
            penalties[row] = state.penalties
        if state.bias is not None:
            biases[row] = state.bias
        if state.grammar is not None:  # first: what it finds says whether a bar on stop tokens still holds
            masks[row] = state.grammar.mask()
        if (bar := state.active_bar) is not None:
            bars[row] = bar
    if not (penalties or biases or bars or masks):
        return logits
    scores = logits.copy()
    if penalties:
        apply_penalties(scores, list(penalties), list(penalties.values()))
    for additions in (biases, bars):
        if additions:
            apply_bias(scores, list(additions), list(additions.values()))
    bar_tokens(scores, list(masks), list(masks.values()))
    return scores
