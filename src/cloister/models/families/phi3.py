"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): fused projections, partly turned heads, and LongRoPE."""

from cloister.models.family import PLAIN_TENSORS, Family
from cloister.models.rope import see_one_window
from cloister.models.sources import Source

_QKV = Source("model.layers.{}.self_attn.qkv_proj", ("q", "k", "v"))
_GATE_UP = Source("model.layers.{}.mlp.gate_up_proj", ("gate", "up"))

PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    max_positions=4096,
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    only={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
    harmless=frozenset(("resid_pdrop", "embd_pdrop")),
    partial_rotary=1.0,
    rope_types={"yarn": "longrope"},  # as its first configs called it
    windows=see_one_window,
    tensors={**PLAIN_TENSORS, "q": _QKV, "k": _QKV, "v": _QKV, "gate": _GATE_UP, "up": _GATE_UP},
)
