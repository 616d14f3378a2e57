"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v, and a sliding window in some layers."""

from cloister.models.family import Bias, Family

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    qkv_bias=Bias.ALWAYS,
    output_bias=Bias.NEVER,
    mlp_bias=Bias.NEVER,
    max_positions=32768,
    windows=True,
    num_kv_heads=32,
)
