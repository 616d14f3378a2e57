"""A decoder as data: what each layer computes, with no code of any family in it.

`models` makes a spec from a Hugging Face config; a back end builds a program from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

FOREIGN_FAMILY: Final = "transformers"
"""The family of a model without a spec: no layers are known of it."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021), half-split layout (the first half of the turned part pairs with the second).

    Attributes:
        inv_freq: angular frequencies after any scaling, in radians per position: head_dim / 2 of them, or fewer: the first
            2 * len(inv_freq) values of a head are turned, the rest stay as they are (GPT-NeoX, Black et al. 2022).
        attention_scale: multiplies cos and sin (YaRN's mscale; 1.0 otherwise).
    """

    inv_freq: tuple[float, ...]
    attention_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023); MQA is num_kv_heads = 1, MHA num_kv_heads = num_heads.

    Attributes:
        scale: multiplies q . k, usually head_dim ** -0.5.
        rope: None where positions enter otherwise, or not at all.
        qkv_bias, output_bias: whether the projections carry biases.
        qk_norm: RMSNorm on q and k before rotation.
        qk_norm_over: "head": over head_dim, one weight for all heads (Qwen3); "projection": over all heads together (OLMo 2).
        window: a query at position p sees keys in (p - window, p]; None is all of [0, p].
        softcap: scores become softcap * tanh(scores / softcap) before the softmax (Gemma 2, Riviere et al. 2024); None is off.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    qk_norm_over: Literal["head", "projection"] = "head"
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward: down(act(gate(x)) * up(x)) where gated, else down(act(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024), in place of one feed-forward.

    A token's scores are softmax(router(x)) over all experts, in float32; the `num_chosen` highest take it (of equal ones the
    one with the lower number), and its output is the sum of theirs weighted by their scores.

    Attributes:
        expert: each expert's feed-forward; its bias is False.
        renormalize: the chosen scores are divided by their sum.
        shared: a feed-forward that every token passes beside its experts, or None.
        shared_gate: the shared one's output is multiplied by sigmoid(shared_router(x)) (Qwen2-MoE).
    """

    num_experts: int
    num_chosen: int
    expert: MlpSpec
    renormalize: bool = True
    shared: MlpSpec | None = None
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block.

    In sequence: x += s * post(attention(pre(x))), then x += s * post(mlp(pre(x))). In parallel (GPT-NeoX): both read the same
    x, each through its own pre-norm, and both are added.

    Attributes:
        pre_norm: norms before attention and feed-forward (`attention_norm`, `mlp_norm`).
        post_norm: norms on their outputs, before the residual sum (`attention_post_norm`, `mlp_post_norm`; Gemma 2, OLMo 2).
        residual_scale: s (Granite).
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer.

    Attributes:
        norm_eps: of every norm.
        max_positions: positions that the weights were trained for.
        tied_embeddings: logits use the embedding matrix.
        norm: "rms" (Zhang and Sennrich 2019), or "layer" (Ba et al. 2016), for all norms but those on q and k.
        norm_bias: norms carry a bias beside their weight.
        position_embeddings: a learned vector for each position is added to the token's (`positions.weight`).
        embedding_scale: multiplies token embeddings (Gemma, Granite), before positions are added.
        logit_scale: multiplies logits (Granite).
        logit_softcap: logits become softcap * tanh(logits / softcap) (Gemma 2), after `logit_scale`; None is off.
        head_bias: the head carries a bias.
        family: the family's name, for people and fingerprints only; no back end may branch on it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_positions: int
    tied_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    position_embeddings: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False


def group_layers(spec: DecoderSpec, max_model_len: int) -> list[tuple[int | None, frozenset[int]]]:
    """Returns (window, numbers of layers) of the layers whose queries see the same positions, widest first (decisions/0018).

    Args:
        max_model_len: a window that no sequence outgrows counts as none.
    """
    layers: dict[int | None, set[int]] = {}
    for number, layer in enumerate(spec.layers):
        window = layer.attention.window
        layers.setdefault(None if window is None or window >= max_model_len else window, set()).add(number)
    widest_first = sorted(layers, key=lambda window: -(window or 2**62))
    return [(window, frozenset(layers[window])) for window in widest_first]


def widest_feed_forward(spec: MlpSpec | MoeSpec) -> int:
    """Returns how many numbers one token has between the two products of its feed-forward, all its experts together."""
    if isinstance(spec, MlpSpec):
        return spec.intermediate_size
    return spec.num_chosen * spec.expert.intermediate_size + (spec.shared.intermediate_size if spec.shared else 0)
