"""One block of the decoder on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from cloister.backends.spec import LayerSpec
from cloister.backends.torch.cuda.limits import feed_forward_of
from cloister.backends.torch.cuda.matrices import MatrixReader
from cloister.backends.torch.triton.attention import Heads
from cloister.backends.torch.triton.elementwise import add_and_norm, gate, rotate_and_write


class CudaLayer:
    """All of a block but attention itself.

    Attributes:
        heads: what attention is compiled for.
        attention_norm: [hidden] float32; the norm is computed where the block before ends.
    """

    def __init__(self, spec: LayerSpec, reader: MatrixReader, prefix: str, eps: float) -> None:
        attention, mlp = spec.grouped_attention, feed_forward_of(spec)
        self.spec, self._activation = spec, mlp.activation
        self.heads = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.window or 0)
        self.attention_norm = reader.norm(f"{prefix}.attention_norm")
        self._eps = eps
        self._mlp_norm = reader.norm(f"{prefix}.mlp_norm")
        self._qkv = reader.matrix(*(f"{prefix}.{name}" for name in "qkv"), bias=attention.qkv_bias)
        self._o = reader.matrix(f"{prefix}.o", bias=attention.output_bias)
        self._gate_up = reader.matrix(f"{prefix}.gate", f"{prefix}.up", bias=mlp.bias)
        self._down = reader.matrix(f"{prefix}.down", bias=mlp.bias)
        self._qk_norms = (
            torch.stack([reader.norm(f"{prefix}.q_norm"), reader.norm(f"{prefix}.k_norm")]) if attention.qk_norm else None
        )
        self.matrices = (self._qkv, self._o, self._gate_up, self._down)

    def project(self, normed: Tensor, positions: Tensor, targets: Tensor, angles: Tensor, slots: Tensor) -> Tensor:
        """Writes K and V into the cache and returns queries [num_rows, num_heads, head_dim] for `triton.attention`.

        Args:
            normed: [num_rows, hidden].
            slots: this layer's cache; the other arguments as in `triton.rotary`.
        """
        queries = normed.new_empty(len(normed), self.heads.num_heads, self.heads.head_dim)
        rotate_and_write(
            self._qkv.multiply(normed, normed.dtype), positions, targets, angles, self._qk_norms, queries, slots,
            heads=self.heads, scale=self.spec.grouped_attention.scale, eps=self._eps,
        )  # fmt: skip
        return queries

    def finish(self, hidden: Tensor, mixed: Tensor, normed: Tensor, next_norm: Tensor) -> None:
        """Adds the outputs of attention and of the feed-forward to `hidden`, and leaves its norm in `normed`.

        Args:
            hidden: [num_rows, hidden] float32.
            mixed: [num_rows, num_heads * head_dim].
            next_norm: weight of the norm that follows this block.
        """
        add_and_norm(hidden, self._o.multiply(mixed, mixed.dtype), self._mlp_norm, normed, self._eps)
        gate_up = self._gate_up.multiply(normed, normed.dtype)
        gated = normed.new_empty(len(normed), gate_up.shape[1] // 2)
        gate(gate_up, gated, self._activation)
        add_and_norm(hidden, self._down.multiply(gated, gated.dtype), next_norm, normed, self._eps)
