"""Qwen3 dense models (Yang et al. 2025): each head of q and k is normalised, and head_dim stands on its own."""

from cloister.models.family import Bias, Family

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.NEVER,
    max_positions=32768,
    qk_norm=True,
    windows=True,
    num_kv_heads=32,
    head_dim=128,
)
