"""Qwen2-VL (Wang et al. 2024, arXiv:2409.12191), Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923) and Qwen3-VL (Bai et al. 2025,
arXiv:2511.21631): a tower for images of any size before Qwen2 or Qwen3, dense or with experts, whose tokens turn by time, row
and column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloister.backends.spec import RopeSpec
from cloister.backends.vision import QwenVisionSpec
from cloister.models.config import ConfigFields
from cloister.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from cloister.models.family import Family, VisionConfig
from cloister.models.rope import RopeReader, see_everything
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_MOST_LAYERS = 10000
_ACTIVATIONS = {
    "silu": "silu", "quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
_OUTER = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
_IGNORED = ("in_chans", "tokens_per_second", "spatial_patch_size")
"""Of `vision_config`: another name of `in_channels`, the pace of videos, and another name of `patch_size`."""
_LAYER = "visual.blocks.{}"


# Rotation


def _read_sections(given: Mapping[str, Any], num_frequencies: int, default: Sequence[int]) -> list[int]:
    sections = given.get("mrope_section") or list(default)
    is_list = isinstance(sections, list) and len(sections) == 3 and all(type(size) is int and size >= 0 for size in sections)
    if not is_list or sum(sections) != num_frequencies:
        raise ModelError(f"mrope_section must be three numbers whose sum is {num_frequencies}", param="mrope_section")
    return list(sections)


def _in_runs(sections: Sequence[int]) -> tuple[int, ...]:
    """First all frequencies of time, then those of rows, then those of columns."""
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def _in_turns(sections: Sequence[int]) -> tuple[int, ...]:
    """Time, row and column take turns as long as rows and columns have frequencies left; the rest turn by time."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[place] = axis
    return tuple(axes)


def _turn(
    default_theta: float, default_sections: Sequence[int], arrange: Callable[[Sequence[int]], tuple[int, ...]]
) -> Callable[[ConfigFields, RopeReader, Sequence[int | None]], Sequence[RopeSpec | None]]:
    def turn(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
        scaling, parameters = fields.take_any("rope_scaling"), fields.take_any("rope_parameters")
        given = scaling or parameters or {}
        if not isinstance(given, dict):
            raise ModelError("rope_scaling in config.json must be an object", param="rope_scaling")
        axes = arrange(_read_sections(given, reader.head_dim // 2, default_sections))
        rest = {name: value for name, value in given.items() if name not in ("mrope_section", "mrope_interleaved")}
        rope = reader.read_parameters(rest, fields.take("rope_theta", float, default_theta))
        return [replace(rope, axes=axes)] * len(windows)

    return turn


# The tower


def _take_parts(
    config: Mapping[str, Any], defaults: Mapping[str, object]
) -> tuple[Mapping[str, Any], ConfigFields, tuple[str, ...]]:
    """Returns the decoder's fields, those of the tower, and unknown ones outside; old configs have the decoder's outside."""
    text, vision = config.get("text_config"), config.get("vision_config")
    if not isinstance(vision, dict) or not (text is None or isinstance(text, dict)):
        raise ModelError("config.json must have the object vision_config", param="vision_config")
    fields = ConfigFields(vision, "vision_config of config.json", defaults=defaults)
    if text is None:
        return {name: value for name, value in config.items() if name not in ("vision_config", *_OUTER)}, fields, ()
    outer = ConfigFields({name: value for name, value in config.items() if name not in ("vision_config", "text_config")})
    outer.drop((*_OUTER, "tie_word_embeddings"))
    tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings") or False
    return {**text, "tie_word_embeddings": tied}, fields, tuple(outer.find_unknown())


def _read_vision(
    config: Mapping[str, Any], defaults: Mapping[str, object], read_own: Callable[[ConfigFields, int], dict[str, Any]]
) -> VisionConfig:
    """Returns the parts of a config; `read_own` reads what differs, of the tower's fields and the decoder's hidden size."""
    text, fields, unknown = _take_parts(config, defaults)
    for name, only in (("in_channels", 3), ("in_chans", 3)):
        fields.require(name, only)
    activation = fields.take("hidden_act", str, "silu")
    if activation not in _ACTIVATIONS:
        raise ModelError(f"hidden_act {activation!r} of vision_config is not supported", param="vision_config")
    parameters = fields.take_any("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ModelError("rope_parameters of vision_config must be an object", param="rope_parameters")
    rope = ConfigFields(parameters, "rope_parameters of vision_config")
    rope.require("rope_type", "axial")
    own = read_own(fields, text["hidden_size"] if type(text.get("hidden_size")) is int else 0)
    spec = QwenVisionSpec(
        patch_size=fields.take_size("patch_size", 14),
        temporal_patch_size=fields.take_size("temporal_patch_size", 2),
        merge=fields.take_size("spatial_merge_size", 2),
        num_layers=fields.take_size("depth", 32),
        num_heads=fields.take_size("num_heads", 16),
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        rope_theta=rope.take("rope_theta", float, 10000.0),
        **own,
    )
    fields.drop(_IGNORED)
    if spec.hidden_size % spec.num_heads or spec.hidden_size // spec.num_heads % 4 or spec.num_layers > _MOST_LAYERS:
        raise ModelError("the heads or layers of vision_config do not fit together", param="vision_config")
    if spec.rope_theta <= 0:
        raise ModelError("rope_theta of vision_config must be positive", param="rope_theta")
    inside = (*fields.find_unknown(), *rope.find_unknown())
    return VisionConfig(text, spec, (*unknown, *(f"vision_config.{name}" for name in inside)))


def _check_output(fields: ConfigFields, name: str, hidden: int) -> None:
    if fields.take_size(name, hidden or 1) != hidden:
        raise ModelError(f"{name} of vision_config must be the decoder's hidden_size", param=name)


def _take_layers(fields: ConfigFields, name: str, default: Sequence[int], num_layers: int) -> list[int]:
    layers = fields.take_any(name)
    layers = [number for number in default if number < num_layers] if layers is None else layers
    is_list = isinstance(layers, list) and all(type(number) is int and 0 <= number < num_layers for number in layers)
    if not is_list or len(set(layers)) < len(layers):
        raise ModelError(f"{name} of vision_config must list numbers of its layers", param=name)
    return list(layers)


def _read_qwen2_5(fields: ConfigFields, hidden: int) -> dict[str, Any]:
    _check_output(fields, "out_hidden_size", hidden)
    merge, patch_size = fields.peek("spatial_merge_size", 2), fields.peek("patch_size", 14)
    window = fields.take_size("window_size", 112) // max(merge, 1) // max(patch_size, 1)
    if window < 1:
        raise ModelError("window_size of vision_config must be one token at least", param="window_size")
    return {
        "hidden_size": fields.take_size("hidden_size", 3584),
        "intermediate_size": fields.take_size("intermediate_size", 3420),
        "norm": "rms",
        "gated": True,
        "window": window,
        "full_layers": frozenset(_take_layers(fields, "fullatt_block_indexes", (7, 15, 23, 31), fields.peek("depth", 32))),
    }


def _read_qwen2(fields: ConfigFields, hidden: int) -> dict[str, Any]:
    _check_output(fields, "hidden_size", hidden)
    size = fields.take_size("embed_dim", 1280)
    return {"hidden_size": size, "intermediate_size": fields.take_size("mlp_ratio", 4) * size}


def _read_qwen3(fields: ConfigFields, hidden: int) -> dict[str, Any]:
    _check_output(fields, "out_hidden_size", hidden)
    num_positions = fields.take_size("num_position_embeddings", 2304)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise ModelError("num_position_embeddings of vision_config must be a square", param="num_position_embeddings")
    return {
        "hidden_size": fields.take_size("hidden_size", 1152),
        "intermediate_size": fields.take_size("intermediate_size", 4304),
        "patch_bias": True,
        "grid_size": math.isqrt(num_positions),
        "deepstack": tuple(_take_layers(fields, "deepstack_visual_indexes", (8, 16, 24), fields.peek("depth"))),
    }


def read_qwen2_vision(config: Mapping[str, Any]) -> VisionConfig:
    """Returns the decoder's config and the tower of Qwen2-VL.

    Raises:
        ModelError: a part is missing, or of a shape that nothing here computes.
    """
    return _read_vision(config, {"hidden_act": "quick_gelu"}, _read_qwen2)


def read_qwen3_vision(config: Mapping[str, Any]) -> VisionConfig:
    """Returns the decoder's config and the tower of Qwen3-VL.

    Raises:
        ModelError: a part is missing, or of a shape that nothing here computes.
    """
    return _read_vision(config, {"hidden_act": "gelu_pytorch_tanh", "patch_size": 16, "depth": 27}, _read_qwen3)


def read_qwen2_5_vision(config: Mapping[str, Any]) -> VisionConfig:
    """Returns the decoder's config and the tower of Qwen2.5-VL.

    Raises:
        ModelError: a part is missing, or of a shape that nothing here computes.
    """
    return _read_vision(config, {}, _read_qwen2_5)


_QKV = Source(f"{_LAYER}.attn.qkv", ("q", "k", "v"))
_OF_ALL: Mapping[str, Source] = {
    "vision.patch": Source("visual.patch_embed.proj"),
    "vision.attention_norm": Source(f"{_LAYER}.norm1"),
    "vision.mlp_norm": Source(f"{_LAYER}.norm2"),
    "vision.q": _QKV,
    "vision.k": _QKV,
    "vision.v": _QKV,
    "vision.o": Source(f"{_LAYER}.attn.proj"),
}
_OF_QWEN2: Mapping[str, Source] = {
    **QWEN2.tensors,
    **_OF_ALL,
    "vision.merger.norm": Source("visual.merger.ln_q"),
    "vision.merger.up": Source("visual.merger.mlp.0"),
    "vision.merger.down": Source("visual.merger.mlp.2"),
}

QWEN2_VL: Family = replace(
    QWEN2,
    name="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    other_model_types=("qwen2_vl_text",),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80},
    rope_types={"mrope": "default"},
    ropes=_turn(1000000.0, (16, 24, 24), _in_runs),
    tensors={
        **_OF_QWEN2,
        "vision.up": Source(f"{_LAYER}.mlp.fc1"),
        "vision.down": Source(f"{_LAYER}.mlp.fc2"),
    },
    vision=read_qwen2_vision,
)

QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    other_model_types=("qwen2_5_vl_text",),
    tensors={
        **_OF_QWEN2,
        "vision.gate": Source(f"{_LAYER}.mlp.gate_proj"),
        "vision.up": Source(f"{_LAYER}.mlp.up_proj"),
        "vision.down": Source(f"{_LAYER}.mlp.down_proj"),
    },
    vision=read_qwen2_5_vision,
)

QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    other_model_types=("qwen3_vl_text",),
    max_positions=128000,
    rope_types={"mrope": "default"},
    windows=see_everything,
    ropes=_turn(500000.0, (24, 20, 20), _in_turns),
    tensors={
        **QWEN3.tensors,
        **_OF_ALL,
        "vision.positions": Source("visual.pos_embed"),
        "vision.up": Source(f"{_LAYER}.mlp.linear_fc1"),
        "vision.down": Source(f"{_LAYER}.mlp.linear_fc2"),
        "vision.merger.norm": Source("visual.merger.norm"),
        "vision.merger.up": Source("visual.merger.linear_fc1"),
        "vision.merger.down": Source("visual.merger.linear_fc2"),
        "vision.deepstack.norm": Source("visual.deepstack_merger_list.{}.norm"),
        "vision.deepstack.up": Source("visual.deepstack_merger_list.{}.linear_fc1"),
        "vision.deepstack.down": Source("visual.deepstack_merger_list.{}.linear_fc2"),
    },
    vision=read_qwen3_vision,
)

_EXPERTS = "model.layers.{}.mlp.experts"
_GATE_UP = Source(f"{_EXPERTS}.gate_up_proj", ("gate", "up"), transposed=True, stacked=True, is_tensor=True, either_way=True)
_DOWN = Source(f"{_EXPERTS}.down_proj", transposed=True, stacked=True, is_tensor=True, either_way=True)

QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    other_model_types=("qwen3_vl_moe_text",),
    names=QWEN3_MOE.names,
    defaults={
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
    },
    only={**QWEN3_VL.only, "norm_topk_prob": True},  # transformers ignores it here
    harmless=QWEN3_MOE.harmless,
    feed_forwards=QWEN3_MOE.feed_forwards,
    tensors={
        **QWEN3_VL.tensors,
        "router": Source("model.layers.{}.mlp.gate"),
        "experts.gate": replace(_GATE_UP, instead=Source(f"{_EXPERTS}.{{}}.gate_proj")),
        "experts.up": replace(_GATE_UP, instead=Source(f"{_EXPERTS}.{{}}.up_proj")),
        "experts.down": replace(_DOWN, instead=Source(f"{_EXPERTS}.{{}}.down_proj")),
    },
)  # fmt: skip
