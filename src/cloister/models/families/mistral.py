"""Mistral (Jiang et al. 2023): Llama with one sliding window in every layer."""

from cloister.models.family import Family
from cloister.models.windows import see_one_window

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    max_positions=131072,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=see_one_window,
)
