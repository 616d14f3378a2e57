"""Gemma 2 (Riviere et al. 2024): soft caps, norms before and after each part, a window in every other layer."""

from collections.abc import Mapping, Sequence

from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family
from cloister.models.sources import Source
from cloister.models.windows import see_by_pattern

GEMMA_TENSORS: Mapping[str, Source] = {
    **PLAIN_TENSORS,
    "norm": Source("model.norm", added=1.0),
    "attention_norm": Source("model.layers.{}.input_layernorm", added=1.0),
    "attention_post_norm": Source("model.layers.{}.post_attention_layernorm", added=1.0),
    "mlp_norm": Source("model.layers.{}.pre_feedforward_layernorm", added=1.0),
    "mlp_post_norm": Source("model.layers.{}.post_feedforward_layernorm", added=1.0),
    "q_norm": Source("model.layers.{}.self_attn.q_norm", added=1.0),
    "k_norm": Source("model.layers.{}.self_attn.k_norm", added=1.0),
}
"""The weight of a norm is stored less one."""


def read_gemma_scales(fields: ConfigFields, _head_dim: int, num_layers: int) -> Sequence[float]:
    """Scores are scaled by a number of the config's own."""
    return [fields.take_size("query_pre_attn_scalar") ** -0.5] * num_layers


def read_gemma_ends(fields: ConfigFields, hidden: int) -> Ends:
    """Embeddings are multiplied by the root of their size."""
    return Ends(embedding_scale=hidden**0.5, logit_softcap=fields.take_limit("final_logit_softcapping"))


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    max_positions=8192,
    names={"hidden_act": ("hidden_activation",)},
    defaults={
        "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "sliding_window": 4096, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    only={"use_bidirectional_attention": False},
    harmless=frozenset(("hidden_act",)),  # `hidden_activation` counts
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    post_norm=True,
    softcap=True,
    windows=see_by_pattern,
    scales=read_gemma_scales,
    ends=read_gemma_ends,
    tensors=GEMMA_TENSORS,
)  # fmt: skip
