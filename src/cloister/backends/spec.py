"""A decoder as data: what each layer computes, with no code of any family in it.

`models` makes a spec from a Hugging Face config; a back end builds a program from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

FOREIGN_FAMILY: Final = "transformers"
"""The family of a model without a spec: no layers are known of it."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021).

    Attributes:
        inv_freq: angular frequencies after any scaling, in radians per position: head_dim / 2 of them, or fewer: the first
            2 * len(inv_freq) values of a head are turned, the rest stay as they are (GPT-NeoX, Black et al. 2022).
        attention_scale: multiplies cos and sin (YaRN's mscale; 1.0 otherwise).
        interleaved: pair i is the values 2 i and 2 i + 1 of the turned part (GPT-J, Wang and Komatsuzaki 2021); otherwise the
            layout is half-split: value i of its first half pairs with value i of its second.
    """

    inv_freq: tuple[float, ...]
    attention_scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position p: by 1 + beta * log(1 + floor((p + first) / period)) (Nakanishi 2025, arXiv:2501.19399,
    as Llama 4 has it)."""

    beta: float
    period: int
    first: int = 0


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
        sinks: each head has a learned logit that takes part in the softmax and has no value (gpt-oss, arXiv:2508.10925;
            Xiao et al. 2023).
        chunked: a query at position p sees keys in [p - p % window, p] in place of a sliding window (Llama 4).
        qk_norm_weighted: the norms of q and k have weights.
        query_growth: None where queries do not grow.
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
    sinks: bool = False
    chunked: bool = False
    qk_norm_weighted: bool = True
    query_growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A head's query and key are a part without positions beside a rotated part; the rotated part of the key is one for all heads.
    Keys without positions and values are kv_b(c), where the latent c = norm(kv_a(x)) has `kv_lora_rank` numbers; the cache
    holds c and the rotated key. Queries are q(x), or q_b(norm(q_a(x))) where there is a `q_lora_rank`.

    Computed in absorbed form, that is one KV head of `head_dim` numbers, whose first `kv_lora_rank` are its value too:
    q . kv_b(c) = kv_b^T(q) . c (section 2.1.2). `num_kv_heads`, `head_dim`, `window` and `softcap` describe that head.

    Attributes:
        q_lora_rank: size of the queries' own latent; None where q is one projection.
        scale: multiplies q . k: (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, times the square of YaRN's mscale.
        latent_norm_eps: of the RMSNorms on both latents.
        qkv_bias: q_a and kv_a carry biases (q, q_b and kv_b never do).
        output_bias: the output projection carries a bias.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    rope: RopeSpec | None
    latent_norm_eps: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query before it absorbs kv_b."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_kv_heads(self) -> int:
        """Of the absorbed form."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of a key in the absorbed form: what one position takes in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def window(self) -> None:
        """There is none."""

    @property
    def softcap(self) -> None:
        """There is none."""


AnyAttentionSpec: TypeAlias = AttentionSpec | LatentAttentionSpec


def kv_size(attention: AnyAttentionSpec) -> int:
    """Returns how many numbers one position takes in one layer's KV cache."""
    if isinstance(attention, LatentAttentionSpec):
        return attention.head_dim
    return 2 * attention.num_kv_heads * attention.head_dim


@dataclass(frozen=True, slots=True)
class ClippedSwiGLU:
    """The gate of gpt-oss (arXiv:2508.10925): g * sigmoid(alpha * g) * (u + 1), where g = min(gate, limit) and u is up, clipped
    to [-limit, limit]."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward: down(act(gate(x)) * up(x)) where gated, else down(act(up(x))).

    Attributes:
        clipped: takes the place of act(gate) * up, if there is one.
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    clipped: ClippedSwiGLU | None = None


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024), in place of one feed-forward.

    A token's scores are softmax(router(x)) over all experts, in float32; the `num_chosen` highest take it (of equal ones the
    one with the lower number), and its output is the sum of theirs weighted by their scores.

    Attributes:
        expert: each expert's feed-forward.
        renormalize: the chosen scores are divided by their sum.
        shared: a feed-forward that every token passes beside its experts, or None.
        shared_gate: the shared one's output is multiplied by sigmoid(shared_router(x)) (Qwen2-MoE).
        scoring: "sigmoid" scores each expert by itself (DeepSeek-V3, arXiv:2412.19437, equation 15).
        correction_bias: experts are chosen by score + bias, and weighted by their scores (equation 16).
        num_groups: experts are cut into so many groups of equal size, in the order of their numbers.
        num_chosen_groups: a token chooses only among the experts of that many groups (DeepSeek-V2, section 2.2.2).
        num_group_scores: a group's score is the sum of that many of its highest: 1 in DeepSeek-V2, 2 in DeepSeek-V3.
        routed_scale: multiplies the experts' weights after all of that.
        router_bias: the router carries a bias, which its scores contain (gpt-oss).
        weigh_inputs: a weight multiplies what its expert reads, not what it returns (Llama 4).
    """

    num_experts: int
    num_chosen: int
    expert: MlpSpec
    renormalize: bool = True
    shared: MlpSpec | None = None
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 1
    routed_scale: float = 1.0
    router_bias: bool = False
    weigh_inputs: bool = False


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

    attention: AnyAttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    residual_scale: float = 1.0

    @property
    def grouped_attention(self) -> AttentionSpec:
        """The attention of a layer that was checked to be grouped-query attention.

        Raises:
            TypeError: it is another.
        """
        if not isinstance(self.attention, AttentionSpec):
            raise TypeError("this computes grouped-query attention only; the spec must be checked before")
        return self.attention


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
