"""A decoder as data: what each layer computes, with no code of any family in it.

`models` makes a spec from a Hugging Face config; a back end builds a program from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cloister.backends.vision import AnyVisionSpec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`relu2` is relu(x) ** 2 (So et al. 2021; Nemotron-H)."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021).

    Attributes:
        inv_freq: angular frequencies after any scaling, in radians per position: head_dim / 2 of them, or fewer: the first
            2 * len(inv_freq) values of a head are turned, the rest stay as they are (GPT-NeoX, Black et al. 2022).
        attention_scale: multiplies cos and sin (YaRN's mscale; 1.0 otherwise).
        interleaved: pair i is the values 2 i and 2 i + 1 of the turned part (GPT-J, Wang and Komatsuzaki 2021); otherwise the
            layout is half-split: value i of its first half pairs with value i of its second.
        axes: which of a token's three positions (0 time, 1 row, 2 column) turns each frequency (M-RoPE, arXiv:2409.12191,
            section 2.1); empty where a token has one position.
    """

    inv_freq: tuple[float, ...]
    attention_scale: float = 1.0
    interleaved: bool = False
    axes: tuple[int, ...] = ()


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
        gated: what the output projection reads is multiplied by sigmoid(q_gate(x)) (Qwen3-Next); `qkv_bias` is its bias too.
        input_scale, output_scale: multiply what q, k and v read, and what the output projection returns (Falcon-H1).
        sinks: each head has a learned logit that takes part in the softmax and has no value (gpt-oss, arXiv:2508.10925;
            Xiao et al. 2023).
        chunked: a query at position p sees keys in [p - p % window, p] in place of a sliding window (Llama 4).
        qk_norm_weighted: the norms of q and k have weights.
        query_growth: None where queries do not grow.
        v_norm: RMSNorm without a weight on each head of v (Gemma 3n).
        shared_kv: number of the earlier layer, of the same heads and window, whose keys and values the queries read; the layer
            has no k and v of its own, and nothing in the cache (Gemma 3n). None where it has.
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
    gated: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0
    sinks: bool = False
    chunked: bool = False
    qk_norm_weighted: bool = True
    query_growth: QueryGrowth | None = None
    v_norm: bool = False
    shared_kv: int | None = None


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """A choice of the positions that each query sees (DeepSeek Sparse Attention's lightning indexer; DeepSeek-V3.2,
    arXiv:2512.02556, section 2.1).

    A key k(x) = norm(index_k(x)), a layer norm, is kept beside each position's latent. The score of position s for a token is
    the sum over heads h of w_h relu(q_h . k_s) / sqrt(num_heads head_dim), where q = index_q(c), c is the latent of its
    queries, and w = index_weights(x). It sees the `num_chosen` positions of the highest scores among its own and those before
    it; of equal ones the earlier. q and k are turned as the attention's rotated parts are, in half-split layout.

    Attributes:
        num_heads, head_dim: of q; all heads share one key.
        norm_eps: of the norm of k.
    """

    num_heads: int
    head_dim: int
    num_chosen: int
    norm_eps: float = 1e-6

    @property
    def num_features(self) -> int:
        """Numbers of one token that the choice reads: queries and weights of all heads."""
        return self.num_heads * (self.head_dim + 1)


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
        index: which positions a query sees; None for all before it. It needs a `q_lora_rank`.
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
    index: IndexSpec | None = None

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
        """Numbers of a key in the absorbed form: what one position takes in the cache, but for the key of an index."""
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
        return attention.head_dim + (0 if attention.index is None else attention.index.head_dim)
    return 0 if attention.shared_kv is not None else 2 * attention.num_kv_heads * attention.head_dim


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A selective state space model (Mamba 2; Dao and Gu, arXiv:2405.21060, section 7).

    in(x) is the gate z and the inputs x, B and C, and a time step for each head. x, B and C pass a causal convolution over
    positions, one filter for each channel, and the activation. With dt = clamp(softplus(dt + dt_bias)) a head's state
    S [head_dim, d_state] becomes exp(-exp(A_log) dt) S + dt x B^T, and its output is S C + D x.

    Attributes:
        num_groups: heads of a group, in the order of their numbers, share B and C; the norm of the output is over each group.
        d_state: numbers of B and of C.
        kernel_size: positions that the convolution sees, its own among them.
        projection_bias, output_bias, conv_bias: `in`, `out` and the convolution carry biases.
        norm: "after_gate": norm(y * silu(z)); "before_gate": norm(y) * silu(z); None is y * silu(z) (Falcon-H1).
        time_step_limit: least and greatest dt.
        input_scale: multiplies what `in` reads (Falcon-H1).
        section_scales: multiply what `in` returns, bias included: z, x, B, C and dt.
        output_scale: multiplies what `out` returns.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    d_state: int
    kernel_size: int
    activation: Activation = "silu"
    projection_bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    input_scale: float = 1.0
    section_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        """Numbers of x, of z and of the output."""
        return self.num_heads * self.head_dim

    @property
    def is_scaled(self) -> bool:
        """Whether inputs or outputs of the matrices are multiplied."""
        return {self.input_scale, self.output_scale, *self.section_scales} != {1.0}

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.d_state

    @property
    def state_size(self) -> int:
        """float32 numbers that one sequence takes: the last inputs of the convolution, oldest first, and S of each head."""
        return (self.kernel_size - 1) * self.conv_size + self.inner_size * self.d_state

    @property
    def step_size(self) -> int:
        """Numbers of one token in a step, before and after it meets the state."""
        return 3 * self.inner_size + self.conv_size + self.num_heads


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec:
    """Linear attention with the gated delta rule (Yang et al. 2024, arXiv:2412.06464; Qwen3-Next).

    q, k and v pass a causal convolution over positions, one filter for each channel, and the activation; q and k are divided
    by their lengths, q by sqrt(key_head_dim) too. With alpha = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b) a
    value head's state S [value_head_dim, key_head_dim] becomes alpha S + beta (v - alpha S k) k^T, and its output is S q.
    Outputs are normalised over each head, scaled, and multiplied by silu(z).

    Attributes:
        num_key_heads: each serves num_value_heads / num_key_heads value heads, which follow one another.
        kernel_size: positions that the convolution sees, its own among them.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    activation: Activation = "silu"

    @property
    def key_size(self) -> int:
        """Numbers of q, and of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Numbers of v, of z and of the output."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def state_size(self) -> int:
        """float32 numbers that one sequence takes: the last inputs of the convolution, oldest first, and S of each head."""
        return (self.kernel_size - 1) * self.conv_size + self.value_size * self.key_head_dim

    @property
    def step_size(self) -> int:
        """Numbers of one token in a step, before and after it meets the state."""
        return self.conv_size + 3 * self.value_size + 2 * self.num_value_heads


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2, Liquid AI 2025): in(x) is B, C and x', and the output is out(C * conv(B * x')).

    The convolution is causal, over positions, with one filter for each channel.

    Attributes:
        size: channels; the hidden size.
        kernel_size: positions that the convolution sees, its own among them.
        bias: `in`, `out` and the convolution carry biases.
    """

    size: int
    kernel_size: int
    bias: bool = False

    @property
    def state_size(self) -> int:
        """float32 numbers that one sequence takes: the last inputs of the convolution, oldest first."""
        return (self.kernel_size - 1) * self.size

    @property
    def step_size(self) -> int:
        """Numbers of one token in a step, before and after it meets the state."""
        return 4 * self.size


StateSpec: TypeAlias = Mamba2Spec | GatedDeltaNetSpec | ShortConvSpec
"""A mixer of tokens whose memory of a sequence is a state of fixed size, all zeros before the first token."""


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
        gate_scale, output_scale: multiply what `gate` and `down` return (Falcon-H1).
        clipped: takes the place of act(gate) * up, if there is one.
        sparsity: act reads max(gate - c, 0) in place of the gate, where c is the value below which so great a part of a normal
            distribution of the gate's mean and deviation lies (Gemma 3n's Gaussian top-k); 0 is off.
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    clipped: ClippedSwiGLU | None = None
    gate_scale: float = 1.0
    output_scale: float = 1.0
    sparsity: float = 0.0

    @property
    def is_scaled(self) -> bool:
        """Whether anything is multiplied."""
        return (self.gate_scale, self.output_scale) != (1.0, 1.0)


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
    x, each through its own pre-norm, and both are added. A layer that lacks a part lacks its norms too.

    Attributes:
        attention: None where the layer has none.
        mlp: None where the layer has none (Mamba 2).
        state: a mixer with a state, in place of attention, or side by side with it: both read the same normed x and their
            outputs are added (Falcon-H1).
        pre_norm: norms before attention and feed-forward (`attention_norm`, `mlp_norm`).
        post_norm: norms on their outputs, before the residual sum (`attention_post_norm`, `mlp_post_norm`; Gemma 2, OLMo 2).
        residual_scale: s (Granite).
    """

    attention: AnyAttentionSpec | None
    mlp: MlpSpec | MoeSpec | None
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    residual_scale: float = 1.0
    state: StateSpec | None = None

    @property
    def mixes(self) -> bool:
        """Whether the layer has a part that mixes tokens."""
        return self.attention is not None or self.state is not None

    @property
    def grouped_attention(self) -> AttentionSpec:
        """The attention of a layer that was checked to be grouped-query attention.

        Raises:
            TypeError: it is another.
        """
        if not isinstance(self.attention, AttentionSpec):
            raise TypeError("this computes grouped-query attention only; the spec must be checked before")
        return self.attention

    @property
    def required_attention(self) -> AnyAttentionSpec:
        """The attention of a layer that was checked to have one.

        Raises:
            TypeError: it has none.
        """
        if self.attention is None:
            raise TypeError("this computes layers with attention only; the spec must be checked before")
        return self.attention

    @property
    def feed_forward(self) -> MlpSpec | MoeSpec:
        """The feed-forward of a layer that was checked to have one.

        Raises:
            TypeError: it has none.
        """
        if self.mlp is None:
            raise TypeError("this computes layers with a feed-forward only; the spec must be checked before")
        return self.mlp


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several residual streams of each token, of which a block computes one, and a low-rank path beside attention (Gemma 3n;
    AltUp: Baykal et al., arXiv:2301.13310; LAuReL: Menghani et al., arXiv:2411.07501).

    Stream 0 begins as the embedding e, stream i as streams_in.i(e), scaled to the size of e (root mean square). A block reads
    all of them: with m = tanh(altup.router(altup.norm(x) / hidden)) of the active stream x, each stream j is predicted as
    p_j = x_j + sum over i of predict(m)[j n + i] x_i. The active prediction p passes the block: with a = norm(p) it is
    (p + post(attention(a)) + a + laurel_norm(laurel_right(laurel_left(a)))) / sqrt(2) before the feed-forward, and y after it.
    Then stream j becomes p_j + (1 + correct(m)[j]) (y - p), with m of y in place of x, and all streams but the first gain
    layer_input_norm(layer_input_out(act(layer_input_gate(x)) * u)), where x is the active one, times `altup.scale` if `scaled`.
    u is the layer's part of the token's own input (layer_inputs.norm(layer_inputs.projection(e) / sqrt(hidden)) + sqrt(size)
    layer_inputs.embed(token)) / sqrt(2), and act is that of the feed-forward. After the last block streams_out.i(x_i) takes the
    place of stream i > 0, scaled to the size of stream 0, and the final norm reads their mean. (The weights of stream i are
    numbered i - 1.)

    Attributes:
        num_streams: n.
        active: number of the stream that blocks compute.
        laurel_rank: numbers between `laurel_left` and `laurel_right`.
        input_size: numbers of a token's input of one layer.
        input_vocab: rows of `layer_inputs.embed`; tokens past them read row 0.
        scaled: the active stream is multiplied before it meets the layer's input.
    """

    num_streams: int
    active: int
    laurel_rank: int
    input_size: int
    input_vocab: int
    scaled: bool = True


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
        vision: the tower that makes embeddings of images; None for a decoder that reads text only.
        streams: residual streams beside the one, and inputs of each layer by token; None for one stream.
        merges_hidden: a module that predicts further tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2). It has neither an
            embedding nor a head: both are those of the program that it is built beside (`Backend.build`). Its first layer
            reads merge([merge_embedding_norm(e); merge_hidden_norm(h)]) of a token's embedding e and of the hidden state h in
            `ForwardBatch.hidden` (equation 21; the order is that of the checkpoints, not of the paper).
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
    vision: AnyVisionSpec | None = None
    streams: StreamsSpec | None = None
    merges_hidden: bool = False


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share blocks (decisions/0018).

    Attributes:
        layers: their numbers. A layer with attention beside a state is in two groups.
        window: positions that their queries see; None: all.
        is_state: a block holds their states at one position.
        is_recent: a block holds their newest keys and values, unpacked (decisions/0034).
    """

    layers: frozenset[int]
    window: int | None = None
    is_state: bool = False
    is_recent: bool = False


def group_layers(spec: DecoderSpec, max_model_len: int, recent_window: int = 0) -> list[LayerGroup]:
    """Returns the groups of a decoder's layers: those with attention by what their queries see, widest first, then all of these
    for their newest positions, then those with a state.

    Args:
        max_model_len: a window that no sequence outgrows counts as none.
        recent_window: newest positions that are kept unpacked too (`MemoryNeed.recent_window`); 0 for none.
    """
    layers: dict[int | None, set[int]] = {}
    for number, layer in enumerate(spec.layers):
        if layer.attention is not None:
            window = layer.attention.window
            layers.setdefault(None if window is None or window >= max_model_len else window, set()).add(number)
    widest_first = sorted(layers, key=lambda window: -(window or 2**62))
    groups = [LayerGroup(frozenset(layers[window]), window) for window in widest_first]
    if recent_window and layers:
        groups.append(LayerGroup(frozenset().union(*layers.values()), recent_window, is_recent=True))
    states = frozenset(number for number, layer in enumerate(spec.layers) if layer.state is not None)
    return [*groups, LayerGroup(states, is_state=True)] if states else groups


def widest_feed_forward(spec: MlpSpec | MoeSpec | None) -> int:
    """Returns how many numbers one token has between the two products of its feed-forward, all its experts together."""
    if spec is None:
        return 0
    if isinstance(spec, MlpSpec):
        return spec.intermediate_size
    return spec.num_chosen * spec.expert.intermediate_size + (spec.shared.intermediate_size if spec.shared else 0)
