"""The noise of drafts that are drawn apart from the model's own tokens, with their distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import IntArray, SamplingMetadata
from cloister.executor.noise import Domain, UniformArray, noise_keys, uniforms


def draft_numbers(
    draws: SamplingMetadata, depths: Sequence[int] | IntArray, ordinals: Sequence[int] | IntArray
) -> UniformArray:
    """Returns a number for each draw, uniform in [0, 1), that no verification uses; draws at one position differ.

    By depth, too: what follows a rejected draft is drawn again, less deep, in a later step. Whether it is may depend on the
    first draw, as a draft that ended early is asked for less; with the same number the second would not be a draw from its
    distribution.
    """
    keys = noise_keys(draws["seed"], draws["index"], draws["position"])
    return uniforms(keys, Domain.DRAFT, (np.asarray(depths, np.int64) << 16) + np.asarray(ordinals, np.int64))
