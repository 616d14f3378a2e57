"""Gemma 3, its text part (Gemma Team 2025): five local layers for each global one, each kind with its own rotation."""

from collections.abc import Sequence

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.families.gemma2 import GEMMA_TENSORS, read_gemma_ends, read_gemma_scales
from cloister.models.family import Bias, Family
from cloister.models.rope import RopeReader
from cloister.models.windows import see_by_pattern
from cloister.types.errors import ModelError

_KINDS = ("full_attention", "sliding_attention")


def _turn_by_kind(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    """Reads `rope_parameters` by kind of layer; or `rope_theta` and `rope_scaling` of global ones, `rope_local_base_freq`."""
    base, local = fields.take("rope_theta", float, 1000000.0), fields.take("rope_local_base_freq", float, 10000.0)
    scaling, given = fields.take_any("rope_scaling") or {}, fields.take_any("rope_parameters") or {}
    if not isinstance(given, dict) or not set(given) <= set(_KINDS):
        raise ModelError(f"rope_parameters of this family are given for {' and '.join(_KINDS)}", param="rope_parameters")
    global_rope = reader.read_parameters(scaling or given.get("full_attention") or {}, base)
    local_rope = reader.read_parameters(given.get("sliding_attention") or {}, local)
    return [global_rope if window is None else local_rope for window in windows]


GEMMA3 = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    max_positions=131072,
    names={"hidden_act": ("hidden_activation",)},
    defaults={
        "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    },
    only={"use_bidirectional_attention": False},
    # `hidden_activation` counts; no layer of transformers caps scores; the pattern is written beside `layer_types`
    harmless=frozenset(("hidden_act", "attn_logit_softcapping", "_sliding_window_pattern")),
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    post_norm=True,
    qk_norm="head",
    windows=see_by_pattern,
    ropes=_turn_by_kind,
    scales=read_gemma_scales,
    ends=read_gemma_ends,
    tensors=GEMMA_TENSORS,
)  # fmt: skip
