"""OLMo 3 (OLMo Team 2025): OLMo 2 with a window in three of four layers, and YaRN in the others only."""

from cloister.models.families.gemma import turn_by_kind
from cloister.models.families.llama import OLMO2
from cloister.models.family import Bias, Family
from cloister.models.rope import see_by_pattern

_THETA = 500000.0

OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    max_positions=2048,
    defaults={
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": _THETA,
        "rope_local_base_freq": _THETA,
    },
    only={"rope_theta": _THETA, "rope_local_base_freq": _THETA},  # transformers takes it for some layers only
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    pre_norm=False,
    post_norm=True,
    qk_norm="projection",
    windows=see_by_pattern,
    ropes=turn_by_kind,
    tensors=OLMO2.tensors,
)  # fmt: skip
