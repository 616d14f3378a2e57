"""Qwen3.5 (Qwen Team 2026), dense and with experts: the layers of Qwen3-Next, stored otherwise.

The models of the hub see images too; of these the decoder is read (`models.text_part`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cloister.backends.spec import MlpSpec, RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.families.qwen import QWEN2_MOE
from cloister.models.families.qwen3_next import HYBRID_TENSORS, QWEN3_NEXT
from cloister.models.family import FeedForwards
from cloister.models.rope import RopeReader
from cloister.models.sources import Source, take_moe

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Which frequencies turn by which of three positions; those of a token of text are all the same."""


def _turn(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    scaling, parameters = fields.take_any("rope_scaling"), fields.take_any("rope_parameters")
    given = scaling or parameters or {}
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if name not in _OF_IMAGES}
    partial = fields.take("partial_rotary_factor", float, None)
    rope = reader.read_parameters(given, fields.take("rope_theta", float, 10000.0), partial=partial)
    return [rope] * len(windows)


def _feed_alike(_fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    return [mlp] * num_layers


def _feed_mixtures(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    shared = replace(mlp, intermediate_size=fields.take_size("shared_expert_intermediate_size"))
    return [take_moe(fields, mlp, shared)] * num_layers


_QKV = Source("model.layers.{}.linear_attn.in_proj_qkv", ("q", "k", "v"))
_TENSORS: Mapping[str, Source] = {
    **QWEN2_MOE.tensors,
    **HYBRID_TENSORS,
    **dict.fromkeys(("mixer.q", "mixer.k", "mixer.v"), _QKV),
    **{f"mixer.{name}": Source(f"model.layers.{{}}.linear_attn.in_proj_{name}") for name in "zba"},
}
_EXPERTS = "model.layers.{}.mlp.experts"
_GATE_UP = Source(f"{_EXPERTS}.gate_up_proj", ("gate", "up"), stacked=True, is_tensor=True)
_STACKS = {"gate": _GATE_UP, "up": _GATE_UP, "down": Source(f"{_EXPERTS}.down_proj", stacked=True, is_tensor=True)}
"""As files of the hub have them; transformers writes those of the decoder alone one by one."""

QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5",
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    defaults={**QWEN3_NEXT.defaults, "num_key_value_heads": 4},
    harmless=frozenset(),
    ropes=_turn,
    feed_forwards=_feed_alike,
    tensors=_TENSORS,
)

QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults={**QWEN3_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
    only={"norm_topk_prob": True},
    widening=1,  # no layer is dense, and a config may say no size of one
    ropes=_turn,
    feed_forwards=_feed_mixtures,
    tensors={
        **_TENSORS,
        **{f"experts.{name}": replace(_TENSORS[f"experts.{name}"], instead=stack) for name, stack in _STACKS.items()},
    },
)
