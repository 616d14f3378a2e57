"""OLMo 2 (OLMo Team 2024): norms on the outputs of attention and feed-forward instead of their inputs, and on q and k."""

from cloister.models.family import PLAIN_TENSORS, Bias, Family
from cloister.models.sources import Source

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    max_positions=2048,
    defaults={"rms_norm_eps": 1e-5},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    pre_norm=False,
    post_norm=True,
    qk_norm="projection",
    tensors={
        **PLAIN_TENSORS,
        "attention_post_norm": Source("model.layers.{}.post_attention_layernorm"),
        "mlp_post_norm": Source("model.layers.{}.post_feedforward_layernorm"),
    },
)
