"""Qwen2, Qwen2.5 and Qwen3 (Yang et al. 2024, 2025), dense and with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Family
from cloister.models.rope import see_every_other_early_window, see_late_windows, see_window_if_used
from cloister.models.sources import QWEN_EXPERTS, TRAINING_OF_EXPERTS, Source, place_mixtures, take_moe

# Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v, and a sliding window in some layers.


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    max_positions=32768,
    defaults={"num_key_value_heads": 32},
    qkv_bias=Bias.ALWAYS,
    windows=see_late_windows,
)


# Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): many small experts, and a gated shared expert.


def _qwen2_feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    shared = replace(mlp, intermediate_size=fields.take_size("shared_expert_intermediate_size"))
    return place_mixtures(fields, mlp, take_moe(fields, mlp, shared), num_layers)


QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    max_positions=32768,
    names={"attention_bias": ("qkv_bias",)},
    defaults={
        "num_key_value_heads": 16, "attention_bias": True, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    harmless=TRAINING_OF_EXPERTS,
    qkv_bias=Bias.FIELD,
    windows=see_every_other_early_window,
    feed_forwards=_qwen2_feed,
    tensors={
        **PLAIN_TENSORS,
        **QWEN_EXPERTS,
        "shared.gate": Source("model.layers.{}.mlp.shared_expert.gate_proj"),
        "shared.up": Source("model.layers.{}.mlp.shared_expert.up_proj"),
        "shared.down": Source("model.layers.{}.mlp.shared_expert.down_proj"),
        "shared_router": Source("model.layers.{}.mlp.shared_expert_gate"),
    },
)  # fmt: skip


# Qwen3 dense models (Yang et al. 2025): per-head norms of q and k, and an explicit head_dim.


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    max_positions=32768,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    qk_norm="head",
    windows=see_late_windows,
)


# Qwen3 with experts (Yang et al. 2025).


def _qwen3_feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    return place_mixtures(fields, mlp, take_moe(fields, mlp), num_layers)


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    max_positions=32768,
    names={"num_experts": ("num_experts", "num_local_experts")},
    defaults={
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    harmless=TRAINING_OF_EXPERTS | {"max_window_layers"},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    qk_norm="head",
    windows=see_window_if_used,
    feed_forwards=_qwen3_feed,
    tensors={**PLAIN_TENSORS, **QWEN_EXPERTS},
)  # fmt: skip
