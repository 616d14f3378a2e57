"""Qwen3-Next (Qwen Team 2025): three layers of gated delta net for each of gated attention, and many experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cloister.backends.spec import Activation, GatedDeltaNetSpec, MlpSpec, StateSpec
from cloister.models.config import ConfigFields
from cloister.models.families.qwen import QWEN2_MOE
from cloister.models.family import MTP_APART, PLAIN_TENSORS, Bias, Family, FeedForwards
from cloister.models.mixers import FULL, LINEAR, take_dims, take_kinds
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, place_mixtures, take_moe
from cloister.types.errors import ModelError


def read_delta_nets(fields: ConfigFields, _hidden: int, num_layers: int, activation: Activation) -> Sequence[StateSpec | None]:
    """Returns the gated delta net of each layer that is no layer of attention."""
    num_keys, num_values, key_dim, value_dim, kernel_size = take_dims(
        fields, "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )  # fmt: skip
    if num_values % num_keys:
        raise ModelError(
            f"{num_keys} key heads must divide {num_values} value heads of linear attention", param="linear_num_value_heads"
        )
    spec = GatedDeltaNetSpec(num_keys, num_values, key_dim, value_dim, kernel_size, activation)
    interval = fields.take_size("full_attention_interval", 4)
    kinds = take_kinds(fields, num_layers, (LINEAR, FULL))
    if kinds is None:
        kinds = [LINEAR if (number + 1) % interval else FULL for number in range(num_layers)]
    return [spec if kind == LINEAR else None for kind in kinds]


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    shared = replace(mlp, intermediate_size=fields.take_size("shared_expert_intermediate_size"))
    return place_mixtures(fields, mlp, take_moe(fields, mlp, shared), num_layers)


def _centred(name: str) -> Source:
    """A norm that is stored less one."""
    return Source(f"model.{name}", added=1.0)


DELTA_NET_DEFAULTS: Mapping[str, object] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_QKVZ = Source("model.layers.{}.linear_attn.in_proj_qkvz", ("q", "k", "v", "z"), by_head=True)
_BA = Source("model.layers.{}.linear_attn.in_proj_ba", ("b", "a"), by_head=True)
_Q = Source("model.layers.{}.self_attn.q_proj", ("q", "q_gate"), by_head=True)
HYBRID_TENSORS: Mapping[str, Source] = {
    **PLAIN_TENSORS,
    "norm": _centred("norm"),
    "attention_norm": _centred("layers.{}.input_layernorm"),
    "mlp_norm": _centred("layers.{}.post_attention_layernorm"),
    "q": _Q,
    "q_gate": _Q,
    "q_norm": _centred("layers.{}.self_attn.q_norm"),
    "k_norm": _centred("layers.{}.self_attn.k_norm"),
    "mixer": Source("model.layers.{}.linear_attn"),
    "mixer.conv": Source("model.layers.{}.linear_attn.conv1d", filters=True),
    "mixer.norm": Source("model.layers.{}.linear_attn.norm"),
    "mixer.out": Source("model.layers.{}.linear_attn.out_proj"),
}
"""Of Qwen3-Next and Qwen3.5: all but what the projections of linear attention and the experts are called."""

QWEN3_NEXT = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    max_positions=32768,
    defaults={
        **DELTA_NET_DEFAULTS, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    },
    harmless=TRAINING_OF_EXPERTS | {MTP_APART.num_layers, *MTP_APART.refused},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    qk_norm="head",
    partial_rotary=0.25,
    gated_attention=True,
    states=read_delta_nets,
    feed_forwards=_feed,
    tensors={
        **QWEN2_MOE.tensors,
        **HYBRID_TENSORS,
        **dict.fromkeys(("mixer.q", "mixer.k", "mixer.v", "mixer.z"), _QKVZ),
        **dict.fromkeys(("mixer.b", "mixer.a"), _BA),
    },
    mtp=MTP_APART,
)  # fmt: skip
