"""Low-rank adapters: which products of a decoder one may change, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import AnyAttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A low-rank adapter (LoRA, Hu et al. 2021, equation 3): y = W x + B A x in the products that it changes.

    Attributes:
        updates: product, such as "layers.0.q" -> (A [rank, inputs], B [outputs, rank]), float32; the scale is in B.
    """

    updates: Mapping[str, tuple[FloatArray, FloatArray]]

    @property
    def rank(self) -> int:
        """The largest of its updates'."""
        return max((a.shape[0] for a, _ in self.updates.values()), default=0)


def target_shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Returns product, such as "layers.0.q" -> (outputs, inputs): q, k, v, o and the feed-forward of every layer.

    Experts of a mixture are not among them. Of latent attention it is q, or q_a and q_b, and kv_a and o: kv_b is absorbed.
    """
    return {
        f"layers.{number}.{name}": shape
        for number, layer in enumerate(spec.layers)
        for name, shape in _layer_shapes(layer, spec.hidden_size).items()
    }


def adapter_bytes(spec: DecoderSpec, rank: int) -> int:
    """Returns what an adapter of that rank takes in memory if it changes every product, in float32."""
    return sum(4 * rank * (outputs + inputs) for outputs, inputs in target_shapes(spec).values())


def adapter_step_bytes(spec: DecoderSpec, num_tokens: int) -> int:
    """Returns what a step of so many tokens takes beside its buffers where some have adapters: outputs that are added to in
    float32 before they are bent, and inputs that a parallel block would have overwritten."""
    return num_tokens * max((4 * _kept_numbers(layer, spec.hidden_size) for layer in spec.layers), default=0)


def _kept_numbers(layer: LayerSpec, hidden: int) -> int:
    if not isinstance(layer.mlp, MlpSpec):
        return 0
    padded = -(-layer.mlp.intermediate_size // 16) * 16 * (1 + layer.mlp.gated)
    return padded + 32 + (hidden + 32) * layer.parallel


def _layer_shapes(layer: LayerSpec, hidden: int) -> Mapping[str, tuple[int, int]]:
    shapes = {} if layer.attention is None else _attention_shapes(layer.attention, hidden)
    if isinstance(layer.mlp, MlpSpec):
        inner = layer.mlp.intermediate_size
        shapes |= {"gate": (inner, hidden)} if layer.mlp.gated else {}
        shapes |= {"up": (inner, hidden), "down": (hidden, inner)}
    return shapes


def _attention_shapes(attention: AnyAttentionSpec, hidden: int) -> dict[str, tuple[int, int]]:
    if isinstance(attention, LatentAttentionSpec):
        queries, rank = attention.num_heads * attention.qk_head_dim, attention.q_lora_rank
        shapes = {"q": (queries, hidden)} if rank is None else {"q_a": (rank, hidden), "q_b": (queries, rank)}
        return {**shapes, "kv_a": (attention.head_dim, hidden), "o": (hidden, attention.num_heads * attention.v_head_dim)}
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    gate = {"q_gate": (queries, hidden)} if attention.gated else {}
    own = {"k": (keys, hidden), "v": (keys, hidden)} if attention.shared_kv is None else {}
    return {"q": (queries, hidden), **gate, **own, "o": (hidden, queries)}
