"""Granite 3 (IBM 2024): Llama with four multipliers."""

from collections.abc import Sequence

from cloister.models.config import ConfigFields
from cloister.models.family import Bias, Ends, Family
from cloister.types.errors import ModelError


def _scale(fields: ConfigFields, _head_dim: int, num_layers: int) -> Sequence[float]:
    return [fields.take("attention_multiplier", float, 1.0)] * num_layers


def _read_ends(fields: ConfigFields, _hidden: int) -> Ends:
    divisor = fields.take("logits_scaling", float, 1.0)
    if divisor <= 0:
        raise ModelError(f"logits_scaling must be positive, not {divisor}", param="logits_scaling")
    return Ends(embedding_scale=fields.take("embedding_multiplier", float, 1.0), logit_scale=1 / divisor)


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    max_positions=2048,
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
    scales=_scale,
    ends=_read_ends,
    residual_scale="residual_multiplier",
)
