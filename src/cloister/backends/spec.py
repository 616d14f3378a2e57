"""A decoder as data: what each layer computes, with no code of any family in it.

`models` makes a spec from a Hugging Face config; a back end builds a program from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021), half-split layout (the first half of a head pairs with the second).

    Attributes:
        inv_freq: [head_dim / 2] angular frequencies after any scaling, in radians per position.
        attention_scale: multiplies cos and sin (YaRN's mscale; 1.0 otherwise).
    """

    inv_freq: tuple[float, ...]
    attention_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023); MQA is num_kv_heads = 1, MHA num_kv_heads = num_heads.

    Attributes:
        scale: multiplies q . k, usually head_dim ** -0.5.
        qkv_bias, output_bias: whether the projections carry biases.
        qk_norm: RMSNorm over head_dim on q and k before rotation (Qwen3).
        window: a query at position p sees keys in (p - window, p]; None is all of [0, p].
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated feed-forward: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Pre-norm block: x += attention(norm(x)); x += mlp(norm(x))."""

    attention: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer.

    Attributes:
        max_positions: positions that the weights were trained for.
        tied_embeddings: logits use the embedding matrix.
        family: the family's name, for people and fingerprints only; no back end may branch on it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_positions: int
    tied_embeddings: bool = False
