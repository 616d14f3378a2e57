"""The device memory that a program needs, in bytes, before anything is allocated."""

from __future__ import annotations

import math
from typing import Final

import torch

from cloister.backends.base import MemoryNeed, Weights
from cloister.backends.spec import DecoderSpec, LayerSpec, kv_size, widest_feed_forward
from cloister.backends.tensors import QuantizedTensor, stored_bits

PARTIAL_BYTES: Final = 64 << 20
"""Room for splits of attention that are computed apart, of each kind of layer; a sequence that finds none is computed whole."""
CAPTURED_SEQS: Final = 256
"""Sequences of the largest decode step that is captured; larger ones fill the device by themselves."""
WORKSPACE_BYTES: Final = 128 << 20
"""What FlashInfer wants for each kind of layer under `numerics = "fast"`."""


def device_need(
    spec: DecoderSpec, weights: Weights, dtype: torch.dtype, *, block_size: int, max_batched_tokens: int, is_exact: bool
) -> MemoryNeed:
    """Returns the memory of the current CUDA device that a program needs (`backends.base.Backend.need`)."""
    bits = sum(math.prod(weights.shape(name)) * _bits(weights.form(name), dtype) for name in weights.names())
    slots = sum(kv_size(layer.grouped_attention) for layer in spec.layers)
    num_rows = max(max_batched_tokens, CAPTURED_SEQS)
    return MemoryNeed(
        weights_bytes=round(bits / 8),
        kv_block_bytes=slots * block_size * dtype.itemsize,
        activations_bytes=num_rows * _row_bytes(spec, dtype) + _fixed_bytes(spec, is_exact),
        available_bytes=torch.cuda.mem_get_info()[0],
    )


def _bits(form: QuantizedTensor | None, dtype: torch.dtype) -> float:
    return 8.0 * dtype.itemsize if form is None else stored_bits(form)


def _row_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """What one token takes at the widest place of a step, with its logits (all may be asked for)."""
    widest = max(_widest(layer) for layer in spec.layers)
    return 4 * (spec.hidden_size + spec.vocab_size) + dtype.itemsize * (2 * spec.hidden_size + widest)


def _widest(layer: LayerSpec) -> int:
    attention = layer.grouped_attention
    return max(3 * widest_feed_forward(layer.mlp), (3 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim)


def _fixed_bytes(spec: DecoderSpec, is_exact: bool) -> int:
    """Angles, partial results of attention, the outputs of captured steps, and FlashInfer's workspace."""
    kinds = {layer.grouped_attention for layer in spec.layers}
    angles = sum(4 * spec.max_positions * kind.head_dim for kind in kinds)
    workspaces = 0 if is_exact else len(kinds) * WORKSPACE_BYTES
    return angles + len(kinds) * PARTIAL_BYTES + 4 * CAPTURED_SEQS * spec.vocab_size + workspaces
