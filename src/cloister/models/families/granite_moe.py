"""Granite 3 with experts (IBM 2024): Granite's multipliers, and a mixture in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.models.config import ConfigFields
from cloister.models.families.llama import GRANITE
from cloister.models.family import PLAIN_TENSORS, Bias, FeedForwards
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts

_GATE_UP = Source("model.layers.{}.block_sparse_moe.input_linear", ("gate", "up"), stacked=True)
GRANITE_EXPERTS: Mapping[str, Source] = {
    "router": Source("model.layers.{}.block_sparse_moe.router.layer"),
    "experts.gate": _GATE_UP,
    "experts.up": _GATE_UP,
    "experts.down": Source("model.layers.{}.block_sparse_moe.output_linear", stacked=True),
}


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    """`intermediate_size` is that of an expert."""
    return [MoeSpec(*take_counts(fields), mlp)] * num_layers


GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    max_positions=2048,
    names={"num_experts": ("num_local_experts",)},
    defaults={"intermediate_size": 11008, "num_experts": 8, "num_experts_per_tok": 2},
    only={"mlp_bias": False},
    harmless=TRAINING_OF_EXPERTS,
    mlp_bias=Bias.NEVER,
    feed_forwards=_feed,
    tensors={**PLAIN_TENSORS, **GRANITE_EXPERTS},
)
