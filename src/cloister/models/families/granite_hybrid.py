"""Granite 4 (IBM 2025): Mamba 2 in most layers, attention in the others, Granite's multipliers, and experts in some models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import Activation, MlpSpec, MoeSpec, RopeSpec, StateSpec
from cloister.models.config import ConfigFields
from cloister.models.families.granite_moe import GRANITE_EXPERTS
from cloister.models.families.llama import GRANITE
from cloister.models.family import PLAIN_TENSORS, Bias, Family, FeedForwards
from cloister.models.mixers import FULL, LINEAR, take_kinds, take_mamba2
from cloister.models.rope import RopeReader
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts

_KINDS = {LINEAR: True, "mamba": True, FULL: False, "attention": False}
"""Kind of a layer -> whether it has a state."""


def _turn_if_asked(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    rope, kind = reader.read(fields), fields.take("position_embedding_type", str, "nope")
    return [rope if kind == "rope" else None] * len(windows)


def _read_states(fields: ConfigFields, hidden: int, num_layers: int, activation: Activation) -> Sequence[StateSpec | None]:
    biased, inner = fields.take("mamba_proj_bias", bool, False), fields.take_size("mamba_expand") * hidden
    spec = take_mamba2(fields, inner, activation, projection_bias=biased, output_bias=biased)
    kinds = take_kinds(fields, num_layers, _KINDS) or [LINEAR] * num_layers
    return [spec if _KINDS[kind] else None for kind in kinds]


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    """`intermediate_size` is that of an expert; without experts there is the shared feed-forward only."""
    shared = replace(mlp, intermediate_size=fields.take_size("shared_intermediate_size"))
    if fields.peek("num_experts", 8) == 0:
        fields.drop((fields.name_of("num_experts"), "num_experts_per_tok"))
        return [shared] * num_layers
    return [MoeSpec(*take_counts(fields), mlp, shared=shared)] * num_layers


_SHARED = Source("model.layers.{}.shared_mlp.input_linear", ("gate", "up"))

GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    max_positions=2048,
    names={"num_experts": ("num_local_experts",), "layer_types": ("layer_types", "layers_block_type")},
    defaults={
        "intermediate_size": 11008, "num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 256,
    },
    only={"normalization_function": "rmsnorm", "mlp_bias": False},
    harmless=TRAINING_OF_EXPERTS | {"init_method"},
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    ropes=_turn_if_asked,
    scales=GRANITE.scales,
    ends=GRANITE.ends,
    residual_scale=GRANITE.residual_scale,
    states=_read_states,
    feed_forwards=_feed,
    tensors={
        **PLAIN_TENSORS,
        "gate": _SHARED,
        "up": _SHARED,
        "down": Source("model.layers.{}.shared_mlp.output_linear"),
        "shared.gate": _SHARED,
        "shared.up": _SHARED,
        "shared.down": Source("model.layers.{}.shared_mlp.output_linear"),
        **GRANITE_EXPERTS,
        "mixer": Source("model.layers.{}.mamba"),
        "mixer.in": Source("model.layers.{}.mamba.in_proj"),
        "mixer.conv": Source("model.layers.{}.mamba.conv1d", filters=True),
        "mixer.norm": Source("model.layers.{}.mamba.norm"),
        "mixer.out": Source("model.layers.{}.mamba.out_proj"),
    },
)  # fmt: skip
