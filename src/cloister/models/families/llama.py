"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023; Dubey et al. 2024), SmolLM, and models of the same shape."""

from cloister.models.family import Bias, Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    max_positions=2048,
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
)
