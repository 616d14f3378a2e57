"""Falcon-H1 (TII, arXiv:2507.22448): attention and Mamba 2 side by side in every layer, and a multiplier at every place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import Activation, MlpSpec, StateSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family, FeedForwards
from cloister.models.mixers import INITIALISATION, take_mamba2
from cloister.models.sources import Source
from cloister.types.errors import ModelError


def _take_multipliers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    given = fields.take_any(name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count or not all(_is_finite(number) for number in given):
        raise ModelError(f"{name} must list {count} numbers", param=name)
    return tuple(float(number) for number in given)


def _is_finite(number: object) -> bool:
    return type(number) in (int, float) and math.isfinite(number)  # type: ignore[arg-type]


def _scale(fields: ConfigFields, head_dim: int, num_layers: int) -> Sequence[float]:
    """Keys are multiplied, with their biases, before they are turned: so are scores."""
    return [head_dim**-0.5 * fields.take("key_multiplier", float, 1.0)] * num_layers


def _read_states(fields: ConfigFields, hidden: int, num_layers: int, activation: Activation) -> Sequence[StateSpec]:
    inner = fields.take("mamba_d_ssm", int, None)
    expanded = fields.take_size("mamba_expand") * hidden
    before_gate, normed = fields.take("mamba_norm_before_gate", bool, True), fields.take("mamba_rms_norm", bool, False)
    spec = take_mamba2(
        fields,
        inner or expanded,
        activation,
        projection_bias=fields.take("mamba_proj_bias", bool, False),
        output_bias=fields.take("projectors_bias", bool, False),
        norm=("before_gate" if before_gate else "after_gate") if normed else None,
        input_scale=fields.take("ssm_in_multiplier", float, 1.0),
        section_scales=_take_multipliers(fields, "ssm_multipliers", 5),
        output_scale=fields.take("ssm_out_multiplier", float, 1.0),
    )
    return [spec] * num_layers


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    gate_scale, output_scale = _take_multipliers(fields, "mlp_multipliers", 2)
    return [replace(mlp, gate_scale=gate_scale, output_scale=output_scale)] * num_layers


def _read_ends(fields: ConfigFields, _hidden: int) -> Ends:
    return Ends(
        embedding_scale=fields.take("embedding_multiplier", float, 1.0),
        logit_scale=fields.take("lm_head_multiplier", float, 1.0),
    )


FALCON_H1 = Family(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    max_positions=8192,
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
    },
    only={"mamba_use_mlp": True, "attn_layer_indices": None},
    harmless=INITIALISATION | {"num_logits_to_keep", "mlp_expansion_factor"},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
    scales=_scale,
    attention_scales={"input_scale": "attention_in_multiplier", "output_scale": "attention_out_multiplier"},
    states=_read_states,
    side_by_side=True,
    feed_forwards=_feed,
    ends=_read_ends,
    tensors={
        **PLAIN_TENSORS,
        "norm": Source("model.final_layernorm"),
        "mlp_norm": Source("model.layers.{}.pre_ff_layernorm"),
        "gate": Source("model.layers.{}.feed_forward.gate_proj"),
        "up": Source("model.layers.{}.feed_forward.up_proj"),
        "down": Source("model.layers.{}.feed_forward.down_proj"),
        "mixer": Source("model.layers.{}.mamba"),
        "mixer.in": Source("model.layers.{}.mamba.in_proj"),
        "mixer.conv": Source("model.layers.{}.mamba.conv1d", filters=True),
        "mixer.norm": Source("model.layers.{}.mamba.norm"),
        "mixer.out": Source("model.layers.{}.mamba.out_proj"),
    },
)  # fmt: skip
