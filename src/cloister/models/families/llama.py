"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023; Dubey et al. 2024) and models of nearly the same build: SmolLM, SmolLM3,
Granite 3, OLMo 2, Phi-3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family
from cloister.models.rope import RopeReader, see_listed_windows, see_one_window
from cloister.models.sources import Source
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


def turn_some(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    """Layers turn nothing where `no_rope_layers` has 0, or where it is empty or absent every `no_rope_layer_interval`-th."""
    interval, turned = fields.take_size("no_rope_layer_interval", 4), fields.take_any("no_rope_layers")
    if turned is None or turned == []:
        turned = [(number + 1) % interval for number in range(len(windows))]
    if not isinstance(turned, list) or len(turned) < len(windows):
        raise ModelError("no_rope_layers must list 1 or 0 for each of num_hidden_layers", param="no_rope_layers")
    rope = reader.read(fields)
    return [rope if turned[number] else None for number in range(len(windows))]


SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    max_positions=32768,
    defaults={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    harmless=frozenset(("max_window_layers",)),
    windows=see_listed_windows,
    ropes=turn_some,
)


# Granite 3 (IBM 2024): Llama with four multipliers.


def _scale(fields: ConfigFields, _head_dim: int, num_layers: int) -> Sequence[float]:
    return [fields.take("attention_multiplier", float, 1.0)] * num_layers


def _read_ends(fields: ConfigFields, _hidden: int) -> Ends:
    divisor = fields.take("logits_scaling", float, 1.0)
    if divisor <= 0:
        raise ModelError(f"logits_scaling must be positive, not {divisor}", param="logits_scaling")
    return Ends(embedding_scale=fields.take("embedding_multiplier", float, 1.0), logit_scale=1 / divisor)


GRANITE = replace(
    LLAMA,
    name="granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    scales=_scale,
    ends=_read_ends,
    residual_scale="residual_multiplier",
)


# OLMo 2 (OLMo Team 2024): norms on the outputs of attention and feed-forward instead of their inputs, and on q and k.


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    max_positions=2048,
    defaults={"rms_norm_eps": 1e-5},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    pre_norm=False,
    post_norm=True,
    qk_norm="projection",
    tensors={
        **PLAIN_TENSORS,
        "attention_post_norm": Source("model.layers.{}.post_attention_layernorm"),
        "mlp_post_norm": Source("model.layers.{}.post_feedforward_layernorm"),
    },
)


# Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): fused projections, partial rotary embeddings, and LongRoPE.


_QKV = Source("model.layers.{}.self_attn.qkv_proj", ("q", "k", "v"))
_GATE_UP = Source("model.layers.{}.mlp.gate_up_proj", ("gate", "up"))

PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    max_positions=4096,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    only={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
    harmless=frozenset(("resid_pdrop", "embd_pdrop")),
    partial_rotary=1.0,
    rope_types={"yarn": "longrope"},  # as its first configs called it
    windows=see_one_window,
    tensors={**PLAIN_TENSORS, "q": _QKV, "k": _QKV, "v": _QKV, "gate": _GATE_UP, "up": _GATE_UP},
)
