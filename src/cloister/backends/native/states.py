"""States of layers: the memory that kernels keep them in, and how steps advance them (cpp/short_conv.cpp, cpp/scan.hpp)."""

from __future__ import annotations

from typing import Final

import numpy as np

from cloister.backends.base import ForwardBatch, IntArray, KVLayout
from cloister.backends.native.memory import ByteArray, reserve
from cloister.backends.native.packing import PANEL
from cloister.backends.spec import DecoderSpec, GatedDeltaNetSpec, Mamba2Spec, ShortConvSpec, StateSpec

_STATE_BYTES: Final = 4  # of a number: float32


class StateStore:
    """The states of one program's layers, one in each block of every layer that has one; zeros before the first token."""

    def __init__(self, layout: KVLayout) -> None:
        self.blocks = layout.state_blocks
        self._has_groups = bool(layout.groups)
        self._layers: list[ByteArray] = []

    def add_layer(self, spec: StateSpec) -> ByteArray:
        """Returns the states of one more layer, [num_blocks, bytes of a state]."""
        size = _STATE_BYTES * spec.state_size
        states = reserve(size * len(self.blocks), streamed=False).reshape(len(self.blocks), size)
        self._layers.append(states)
        return states

    def spans(self, batch: ForwardBatch) -> IntArray:
        """Returns how a step that does not say so advances states (`ForwardBatch.state_spans`).

        Raises:
            ValueError: the batch does not say where the states are.
        """
        if self._has_groups or batch.parents is not None:
            raise ValueError("a step of layers with a state needs `state_spans` where there are groups or token trees")
        starts, blocks = batch.query_starts, batch.block_tables[:, 0]
        filled = starts[:-1] < starts[1:]
        firsts, blocks = starts[:-1][filled], blocks[filled]
        new = blocks[batch.positions[firsts] == 0]
        for states in self._layers:  # nobody wipes blocks for a program without groups
            states[new] = 0
        return np.stack([firsts, starts[1:][filled], blocks, blocks], axis=1).astype(np.int32)


def draft_bytes(spec: DecoderSpec) -> int:
    """Returns what layers with a state keep of one draft: what advances them when it is accepted."""
    return sum(_STATE_BYTES * _draft_size(layer.state) for layer in spec.layers if layer.state is not None)


def _draft_size(state: StateSpec) -> int:
    if isinstance(state, ShortConvSpec):
        return state.size
    if isinstance(state, Mamba2Spec):
        return state.conv_size + state.num_heads
    outputs = state.value_size + state.conv_size  # in whole panels; b and a of each head stand behind them
    return -(-outputs // PANEL) * PANEL - state.value_size + 2 * state.num_value_heads


def draft_state_bytes(spec: DecoderSpec) -> int:
    """Returns what one thread copies of a state to compute a draft: that of one head."""
    return max((_STATE_BYTES * _head_size(layer.state) for layer in spec.layers if layer.state is not None), default=0)


def _head_size(state: StateSpec) -> int:
    if isinstance(state, Mamba2Spec):
        return state.head_dim * state.d_state
    return state.value_head_dim * state.key_head_dim if isinstance(state, GatedDeltaNetSpec) else 0
