"""What a family of models is: the differences between decoders, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

PLAIN_TENSORS: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "o": "model.layers.{}.self_attn.o_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}


class Bias(Enum):
    """Whether projections carry a bias: a boolean config field says so, or the family does."""

    NEVER = "never"
    ALWAYS = "always"
    FIELD = "field"


@dataclass(frozen=True)
class Family:
    """One family, by the name of its class in transformers.

    Attributes:
        architecture: entry of `architectures` in config.json.
        model_type: what `model_type` in config.json must be.
        qkv_bias, output_bias: biases in attention; FIELD reads `attention_bias`.
        mlp_bias: FIELD reads `mlp_bias`.
        qk_norm: RMSNorm on each head of q and k.
        windows: the fields `use_sliding_window`, `sliding_window`, `max_window_layers` and `layer_types` exist.
        num_kv_heads: when the config has none; None means as many as heads.
        head_dim: when the config has none; None means hidden_size / num_attention_heads.
        max_positions: when the config has none.
        tensors: canonical module -> name in the checkpoint; {} is the layer.
    """

    name: str
    architecture: str
    model_type: str
    qkv_bias: Bias
    output_bias: Bias
    mlp_bias: Bias
    max_positions: int
    qk_norm: bool = False
    windows: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tensors: Mapping[str, str] = field(default_factory=lambda: PLAIN_TENSORS)
