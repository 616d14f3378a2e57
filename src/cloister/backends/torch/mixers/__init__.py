"""Mixers of tokens with a state of fixed size (`backends.spec.StateSpec`), the reference of every kernel.

A mixer has three parts. `project` and `finish` work row by row, on the padded rows of a step. `advance` takes the features of
consecutive tokens of one sequence and changes the sequence's state in place; it goes token by token, so that its bits do not
depend on how a sequence is cut into steps (batch invariance).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cloister.backends.spec import Mamba2Spec, ShortConvSpec, StateSpec
from cloister.backends.torch.mixers.gated_delta_net import GatedDeltaNetMixer
from cloister.backends.torch.mixers.mamba2 import Mamba2Mixer
from cloister.backends.torch.mixers.short_conv import ShortConvMixer
from cloister.backends.torch.reading import AnyLinear, WeightReader


class StateMixer(Protocol):
    """The protocol of a mixer, as a layer uses it.

    Attributes:
        linears: its products.
        num_features: numbers of a row between `project` and `advance`.
        num_mixed: numbers of a row between `advance` and `finish`.
        num_operations: multiplications and additions of the products in `project`, for one row.
        num_output_operations: those in `finish`.
    """

    linears: tuple[AnyLinear, ...]
    num_features: int
    num_mixed: int
    num_operations: float
    num_output_operations: float

    def project(self, normed: Tensor) -> Tensor:
        """Returns features [num_rows, num_features] of normed rows [num_rows, hidden]; num_rows as `linear.pad_rows` gives."""
        ...

    def advance(self, features: Tensor, state: Tensor) -> Tensor:
        """Returns [num_tokens, num_mixed], and changes the state in place.

        Args:
            features: [num_tokens, num_features] of consecutive tokens of one sequence, one token at least.
            state: [state_size] float32, contiguous, as the token before them left it; zeros before the first.
        """
        ...

    def finish(self, mixed: Tensor) -> Tensor:
        """Returns [num_rows, hidden] for [num_rows, num_mixed]; num_rows as `linear.pad_rows` gives."""
        ...


def make_mixer(spec: StateSpec, reader: WeightReader, prefix: str, eps: float) -> StateMixer:
    """Returns the mixer of the layer whose names begin with `prefix`.

    Args:
        eps: of its norm, if it has one.
    """
    if isinstance(spec, Mamba2Spec):
        return Mamba2Mixer(spec, reader, f"{prefix}.mixer", eps)
    if isinstance(spec, ShortConvSpec):
        return ShortConvMixer(spec, reader, f"{prefix}.mixer")
    return GatedDeltaNetMixer(spec, reader, f"{prefix}.mixer", eps)
