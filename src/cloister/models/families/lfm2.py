"""LFM2 (Liquid AI 2025): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import Activation, MlpSpec, ShortConvSpec, StateSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Family, FeedForwards
from cloister.models.mixers import FULL, take_dims, take_kinds
from cloister.models.sources import Source
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
