"""Qwen3 with experts (Yang et al. 2025)."""

from collections.abc import Sequence

from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.experts import QWEN_EXPERTS, TRAINING_OF_EXPERTS, place_mixtures, take_moe
from cloister.models.family import PLAIN_TENSORS, Bias, Family
from cloister.models.windows import see_window_if_used


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
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
    feed_forwards=_feed,
    tensors={**PLAIN_TENSORS, **QWEN_EXPERTS},
)  # fmt: skip
