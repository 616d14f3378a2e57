"""LFM2 (Liquid AI 2025): gated short convolutions, attention in some layers, and sigmoid experts in the larger models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import Activation, MlpSpec, MoeSpec, ShortConvSpec, StateSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Family, FeedForwards
from cloister.models.mixers import FULL, take_dims, take_kinds
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts
from cloister.types.errors import ModelError

_CONV = "conv"
_IGNORED = frozenset((
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init",
    "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
))  # fmt: skip
"""Fields of the published configs that transformers does not read."""


def _read_states(fields: ConfigFields, hidden: int, num_layers: int, _activation: Activation) -> Sequence[StateSpec | None]:
    [kernel_size] = take_dims(fields, "conv_L_cache")
    spec = ShortConvSpec(hidden, kernel_size, fields.take("conv_bias", bool, False))
    kinds, attending = take_kinds(fields, num_layers, (_CONV, FULL)), fields.take_any("full_attn_idxs")
    if kinds is None:
        attending = list(range(num_layers)) if attending is None else attending
        if not isinstance(attending, list):
            raise ModelError("full_attn_idxs must list numbers of layers", param="full_attn_idxs")
        kinds = [FULL if number in attending else _CONV for number in range(num_layers)]
    return [spec if kind == _CONV else None for kind in kinds]


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    """`intermediate_size` is that of a plain feed-forward, of which a gated one takes two thirds, rounded up to a multiple."""
    multiple, factor = fields.take_size("block_multiple_of", 256), fields.take_nullable("block_ffn_dim_multiplier", float)
    size = mlp.intermediate_size
    if fields.take("block_auto_adjust_ff_dim", bool, True):
        size = int(2 * size / 3)
        size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    if size < 1:
        raise ModelError("block_ffn_dim_multiplier must be positive", param="block_ffn_dim_multiplier")
    return [replace(mlp, intermediate_size=size)] * num_layers


LFM2 = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    max_positions=128000,
    names={
        "rms_norm_eps": ("norm_eps",), "intermediate_size": ("block_ff_dim", "intermediate_size"),
        "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
    },
    defaults={
        "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1000000.0, "tie_word_embeddings": True, "conv_L_cache": 3,
        "block_ffn_dim_multiplier": 1.0,
    },
    only={"hidden_act": "silu"},
    harmless=_IGNORED,
    qk_norm="head",
    states=_read_states,
    feed_forwards=_feed,
    tensors={
        **PLAIN_TENSORS,
        "norm": Source("model.embedding_norm"),
        "attention_norm": Source("model.layers.{}.operator_norm"),
        "o": Source("model.layers.{}.self_attn.out_proj"),
        "q_norm": Source("model.layers.{}.self_attn.q_layernorm"),
        "k_norm": Source("model.layers.{}.self_attn.k_layernorm"),
        "mlp_norm": Source("model.layers.{}.ffn_norm"),
        "gate": Source("model.layers.{}.feed_forward.w1"),
        "up": Source("model.layers.{}.feed_forward.w3"),
        "down": Source("model.layers.{}.feed_forward.w2"),
        "mixer.in": Source("model.layers.{}.conv.in_proj"),
        "mixer.conv": Source("model.layers.{}.conv.conv", filters=True),
        "mixer.out": Source("model.layers.{}.conv.out_proj"),
    },
)  # fmt: skip


# With experts: all layers but the first few are mixtures, chosen with a bias.


def _read_listed(fields: ConfigFields, hidden: int, num_layers: int, activation: Activation) -> Sequence[StateSpec | None]:
    """transformers has no other way to say which layers attend."""
    fields.need("layer_types")
    return _read_states(fields, hidden, num_layers, activation)


def _feed_moe(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    num_dense = fields.take("num_dense_layers", int, 2)
    if not 0 <= num_dense <= num_layers:
        raise ModelError(f"num_dense_layers must be 0 to {num_layers}, the number of layers", param="num_dense_layers")
    moe = MoeSpec(
        *take_counts(fields),
        replace(mlp, intermediate_size=fields.take_size("moe_intermediate_size", 1792)),
        fields.take("norm_topk_prob", bool, True),
        scoring="sigmoid",
        correction_bias=fields.take("use_expert_bias", bool, True),
        routed_scale=fields.take("routed_scaling_factor", float, 1.0),
    )
    return [mlp if number < num_dense else moe for number in range(num_layers)]


LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    names={name: stored for name, stored in LFM2.names.items() if name != "intermediate_size"},
    defaults={
        **{name: value for name, value in LFM2.defaults.items() if name != "block_ffn_dim_multiplier"},
        "intermediate_size": 7168, "num_experts": 32, "num_experts_per_tok": 4,
    },
    harmless=_IGNORED | TRAINING_OF_EXPERTS,
    states=_read_listed,
    feed_forwards=_feed_moe,
    tensors={
        **LFM2.tensors,
        "router": Source("model.layers.{}.feed_forward.gate"),
        "router.e_score_correction_bias": Source("model.layers.{}.feed_forward.expert_bias", is_tensor=True),
        "experts.gate": Source("model.layers.{}.feed_forward.experts.{}.w1"),
        "experts.up": Source("model.layers.{}.feed_forward.experts.{}.w3"),
        "experts.down": Source("model.layers.{}.feed_forward.experts.{}.w2"),
    },
)  # fmt: skip
