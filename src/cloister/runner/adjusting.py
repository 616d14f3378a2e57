"""What requests change of the logits before a token is chosen: penalties, bias, bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cloister.runner.bias import apply_bias
from cloister.runner.penalties import apply_penalties
from cloister.runner.state import SequenceState

FloatArray = npt.NDArray[np.float32]


def adjusted(logits: FloatArray, states: Sequence[SequenceState]) -> FloatArray:
    """Returns logits after penalties, bias and bars: a copy, or the very array when no row asks for any."""
    penalties = {row: state.penalties for row, state in enumerate(states) if state.penalties is not None}
    biases = {row: state.bias for row, state in enumerate(states) if state.bias is not None}
    bars = {row: state.active_bar for row, state in enumerate(states) if state.active_bar is not None}
    if not (penalties or biases or bars):
        return logits
    scores = logits.copy()
    if penalties:
        apply_penalties(scores, list(penalties), list(penalties.values()))
    for additions in (biases, bars):
        if additions:
            apply_bias(scores, list(additions), list(additions.values()))
    return scores
