"""Gemma 2 (Riviere et al. 2024) and Gemma 3's text part (Gemma Team 2025): norms before and after each part, local and
global layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family
from cloister.models.rope import RopeReader, see_by_pattern
from cloister.models.sources import Source
from cloister.types.errors import ModelError

# Gemma 2 (Riviere et al. 2024): soft caps, norms before and after each part, a window in every other layer.


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


# Gemma 3, its text part (Gemma Team 2025): five local layers for each global one, each kind with its own rotation.


_KINDS = ("full_attention", "sliding_attention")


def turn_by_kind(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    """Reads `rope_parameters` by kind of layer; or `rope_theta` and `rope_scaling` of global ones, `rope_local_base_freq`."""
    base, local = fields.take("rope_theta", float, 1000000.0), fields.take("rope_local_base_freq", float, 10000.0)
    scaling, given = fields.take_any("rope_scaling") or {}, fields.take_any("rope_parameters") or {}
    if not isinstance(given, dict) or not set(given) <= set(_KINDS):
        raise ModelError(f"rope_parameters of this family are given for {' and '.join(_KINDS)}", param="rope_parameters")
    global_rope = reader.read_parameters(scaling or given.get("full_attention") or {}, base)
    local_rope = reader.read_parameters(given.get("sliding_attention") or {}, local)
    return [global_rope if window is None else local_rope for window in windows]


GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    max_positions=131072,
    defaults={
        "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    },
    # `hidden_activation` counts; no layer of transformers caps scores; the pattern is written beside `layer_types`
    harmless=frozenset(("hidden_act", "attn_logit_softcapping", "_sliding_window_pattern")),
    softcap=False,
    qk_norm="head",
    ropes=turn_by_kind,
)  # fmt: skip
