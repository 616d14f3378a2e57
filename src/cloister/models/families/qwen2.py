"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v, and a sliding window in some layers."""

from cloister.models.family import Bias, Family
from cloister.models.windows import see_late_windows

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    max_positions=32768,
    defaults={"num_key_value_heads": 32},
    qkv_bias=Bias.ALWAYS,
    windows=see_late_windows,
)
