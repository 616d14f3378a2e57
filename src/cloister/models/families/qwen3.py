"""Qwen3 dense models (Yang et al. 2025): each head of q and k is normalised, and head_dim stands on its own."""

from cloister.models.family import Bias, Family
from cloister.models.windows import see_late_windows

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
