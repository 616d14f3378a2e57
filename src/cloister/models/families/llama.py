"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023; Dubey et al. 2024) and models of the same build: SmolLM, SmolLM3, Granite
3."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import Bias, Ends, Family
from cloister.models.rope import RopeReader, see_listed_windows
from cloister.types.errors import ModelError

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    max_positions=2048,
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
)


# SmolLM3 (Bakouch et al. 2025): Llama without rotary embeddings in every fourth layer.


def _turn_some(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    interval, turned = fields.take_size("no_rope_layer_interval", 4), fields.take_any("no_rope_layers")
    if turned is None:
        turned = [(number + 1) % interval for number in range(len(windows))]
    if not isinstance(turned, list) or len(turned) < len(windows):
        raise ModelError("no_rope_layers must list 1 or 0 for each of num_hidden_layers", param="no_rope_layers")
    rope = reader.read(fields)
    return [rope if turned[number] else None for number in range(len(windows))]


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    max_positions=32768,
    defaults={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    harmless=frozenset(("max_window_layers",)),
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
    windows=see_listed_windows,
    ropes=_turn_some,
)


# Granite 3 (IBM 2024): Llama with four multipliers.


def _scale(fields: ConfigFields, _head_dim: int, num_layers: int) -> Sequence[float]:
    return [fields.take("attention_multiplier", float, 1.0)] * num_layers


def _read_ends(fields: ConfigFields, _hidden: int) -> Ends:
    divisor = fields.take("logits_scaling", float, 1.0)
    if divisor <= 0:
        raise ModelError(f"logits_scaling must be positive, not {divisor}", param="logits_scaling")
    return Ends(embedding_scale=fields.take("embedding_multiplier", float, 1.0), logit_scale=1 / divisor)


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    max_positions=2048,
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
    scales=_scale,
    ends=_read_ends,
    residual_scale="residual_multiplier",
)
