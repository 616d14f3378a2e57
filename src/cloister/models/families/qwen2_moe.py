"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): many small experts, and a gated one that every token passes."""

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.experts import QWEN_EXPERTS, TRAINING_OF_EXPERTS, place_mixtures, take_moe
from cloister.models.family import PLAIN_TENSORS, Bias, Family
from cloister.models.sources import Source
from cloister.models.windows import see_every_other_early_window


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
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
    feed_forwards=_feed,
    tensors={
        **PLAIN_TENSORS,
        **QWEN_EXPERTS,
        "shared.gate": Source("model.layers.{}.mlp.shared_expert.gate_proj"),
        "shared.up": Source("model.layers.{}.mlp.shared_expert.up_proj"),
        "shared.down": Source("model.layers.{}.mlp.shared_expert.down_proj"),
        "shared_router": Source("model.layers.{}.mlp.shared_expert_gate"),
    },
)  # fmt: skip
