"""DeepSeek's decoders in GGUF files, with latent attention (`deepseek2`): V2, V3, R1, Kimi K2.

llama.cpp computes the absorbed form, in which all heads share one key. So its converter describes a head of `kv_lora_rank +
qk_rope_head_dim` numbers and cuts `kv_b_proj` in two, that of keys turned around; files of before describe and hold what the
checkpoint has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cloister.backends.spec import LatentAttentionSpec, LayerSpec
from cloister.models.config import ConfigFields
from cloister.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from cloister.models.gguf.layout import LOG_MULTIPLIER, MAX_HEAD_DIM, SIGMOID, SOFTMAX, Architecture, Array, TensorRecipe
from cloister.models.gguf.mixtures import ROUTED, default_routing
from cloister.models.sources import Shape, Source
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile


def _read_turned(fields: ConfigFields) -> int:
    """Returns how many numbers of a query and of a key are turned."""
    size = fields.peek("qk_rope_head_dim")
    if size % 2 or not 0 < size <= MAX_HEAD_DIM:
        raise ModelError(
            f"'rope.dimension_count' in {fields.source} must be even and up to {MAX_HEAD_DIM}, not {size}",
            param="rope.dimension_count",
        )
    return size


def _translate(_file: GGUFFile, fields: ConfigFields) -> dict[str, Any]:
    turned = _read_turned(fields)
    absorbed = fields.peek_any("attention.key_length_mla") is not None
    key, value = "attention.key_length", "attention.value_length"
    key_size, value_size = (fields.take_size(f"{name}_mla" if absorbed else name) for name in (key, value))
    fields.drop((key, value, fields.name_of("num_key_value_heads")))  # of the one key, where it is absorbed
    if key_size <= turned:
        raise ModelError(f"heads in {fields.source} must have more numbers than the {turned} that are turned", param=key)
    return {
        **default_routing(fields),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key_size - turned,
        "v_head_dim": value_size,
    }


def _translate_v2(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    """The groups of a file without `expert_group_count` are not known; llama.cpp knows of none."""
    fields.require("expert_gating_func", SOFTMAX)
    said = _translate(file, fields)
    if fields.peek("n_group", 1) > 1:
        return {**said, "topk_method": "group_limited_greedy"}
    groups = ("n_group", "topk_group")
    fields.drop(map(fields.name_of, groups))
    return {name: value for name, value in said.items() if name not in groups}


def _translate_v3(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.require("expert_gating_func", SIGMOID)
    return _translate(file, fields)


def _shapes_of_halves(layer: LayerSpec) -> Sequence[Shape]:
    attention = _latent(layer)
    heads, rank = attention.num_heads, attention.kv_lora_rank
    return [(heads, rank, attention.qk_nope_head_dim), (heads, attention.v_head_dim, rank)]


def _join_halves(layer: LayerSpec, halves: Sequence[Array]) -> Array:
    """Returns `kv_b_proj`, in which the rows of each head's keys and of its values follow one another."""
    shapes = _shapes_of_halves(layer)
    keys, values = (half.reshape(shape).astype(np.float32) for half, shape in zip(halves, shapes, strict=True))
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1)


def _latent(layer: LayerSpec) -> LatentAttentionSpec:
    if not isinstance(layer.attention, LatentAttentionSpec):
        raise TypeError("only latent attention has halves of kv_b")
    return layer.attention


DEEPSEEK_V3_FILES = Architecture(
    DEEPSEEK_V3,
    names={
        **ROUTED,
        "q_lora_rank": ("attention.q_lora_rank",),
        "kv_lora_rank": ("attention.kv_lora_rank",),
        "qk_rope_head_dim": ("rope.dimension_count",),
    },
    translate=_translate_v3,
    sources={
        "q_a": Source("blk.{}.attn_q_a"),
        "q_a_norm": Source("blk.{}.attn_q_a_norm"),
        "q_b": Source("blk.{}.attn_q_b"),
        "kv_a": Source("blk.{}.attn_kv_a_mqa"),
        "kv_a_norm": Source("blk.{}.attn_kv_a_norm"),
        "kv_b": Source("blk.{}.attn_kv_b"),
    },
    recipes={"kv_b": TensorRecipe(("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"), _join_halves, _shapes_of_halves)},
    head_size=_read_turned,
    rope_entries=dict.fromkeys(("mscale", "mscale_all_dim"), (LOG_MULTIPLIER, 10.0)),
)
DEEPSEEK_V2_FILES = replace(DEEPSEEK_V3_FILES, family=DEEPSEEK_V2, translate=_translate_v2)


def choose_deepseek(file: GGUFFile) -> Architecture:
    """Returns V3's where the experts' scores are sigmoids, else V2's."""
    return DEEPSEEK_V3_FILES if file.get("deepseek2.expert_gating_func", int) == SIGMOID else DEEPSEEK_V2_FILES
