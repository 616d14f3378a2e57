"""Qwen3.5 (Qwen Team 2026), dense and with experts: the layers of Qwen3-Next, stored otherwise.

The models of the hub see images too; of these the decoder is read, and takes text only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloister.backends.spec import MlpSpec, RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.families.qwen import QWEN2_MOE
from cloister.models.families.qwen3_next import HYBRID_TENSORS, QWEN3_NEXT
from cloister.models.family import Family, FeedForwards, VisionConfig
from cloister.models.rope import RopeReader
from cloister.models.sources import Source, take_moe
from cloister.types.errors import ModelError

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
    tensors=_TENSORS,
)


# The models of the hub: a decoder of text under `text_config`, beside a vision tower that is left out.


_OF_THE_TOWER = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _read_text(config: Mapping[str, Any]) -> VisionConfig:
    outer = ConfigFields(config)
    text = outer.take_any("text_config")
    if not isinstance(text, dict):
        raise ModelError("config.json must have the object text_config", param="text_config")
    tied = outer.take("tie_word_embeddings", bool, False)  # of the whole model, whatever the decoder's part says
    outer.drop(_OF_THE_TOWER)
    return VisionConfig({**text, "tie_word_embeddings": tied}, None, outer.find_unknown())


def _of_the_hub(family: Family, name: str) -> Family:
    return replace(
        family,
        name=name,
        architecture=family.architecture.replace("ForCausalLM", "ForConditionalGeneration"),
        model_type=family.model_type.removesuffix("_text"),
        vision=_read_text,
        tensors={
            module: replace(source, name=source.name.replace("model.", "model.language_model.", 1))
            for module, source in family.tensors.items()
        },
        buffers=re.compile(r"(mtp|model\.visual)\..+"),
    )


QWEN3_5_VL, QWEN3_5_MOE_VL = _of_the_hub(QWEN3_5, "qwen3_5_vl"), _of_the_hub(QWEN3_5_MOE, "qwen3_5_moe_vl")
