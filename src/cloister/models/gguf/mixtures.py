"""Decoders with many small experts in GGUF files: GLM-4.5, MiniMax-M2, Llama 4, Granite 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloister.models.config import ConfigFields
from cloister.models.families.glm import GLM4_MOE
from cloister.models.families.granite_moe import GRANITE_MOE
from cloister.models.families.llama4 import LLAMA4
from cloister.models.families.minimax import MINIMAX_M2
from cloister.models.gguf.layout import EXPERTS, GRANITE_NAMES, SIGMOID, Architecture, Names, has_tensor
from cloister.models.sources import Source
from cloister.types.gguf import GGUFFile

ROUTED: Names = {
    "num_experts": ("expert_count",), "num_experts_per_tok": ("expert_used_count",),
    "moe_intermediate_size": ("expert_feed_forward_length",), "n_shared_experts": ("expert_shared_count",),
    "first_k_dense_replace": ("leading_dense_block_count",), "routed_scaling_factor": ("expert_weights_scale",),
    "norm_topk_prob": ("expert_weights_norm",), "n_group": ("expert_group_count",), "topk_group": ("expert_group_used_count",),
}  # fmt: skip


def default_routing(fields: ConfigFields) -> dict[str, Any]:
    """Returns what a file need not say of its experts, as llama.cpp understands it."""
    silent = {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
    return {name: value for name, value in silent.items() if fields.peek_any(name) is None}


def _translate_glm(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.require("expert_gating_func", SIGMOID)
    return {**default_routing(fields), "use_qk_norm": has_tensor(file, "attn_q_norm.weight")}


GLM4_MOE_FILES = Architecture(
    GLM4_MOE, names=ROUTED, translate=_translate_glm, sources={"mlp_norm": Source("blk.{}.post_attention_norm")}
)


def _translate_minimax(_file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.require("expert_gating_func", SIGMOID)
    return {}


MINIMAX_M2_FILES = Architecture(
    MINIMAX_M2,
    names={**EXPERTS, "intermediate_size": ("expert_feed_forward_length",)},
    translate=_translate_minimax,
    unread=frozenset(("feed_forward_length",)),
)


_MAVERICK = 128
"""Experts of the size of Llama 4 that normalises neither q nor k."""


def _translate_llama4(_file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    """Files do not say which size has norms of q and k."""
    fields.require("expert_gating_func", SIGMOID)
    return {"use_qk_norm": fields.peek("num_experts") != _MAVERICK}


# Neither do they say how long chunks are and by what queries grow; llama.cpp has the numbers of the published models.
LLAMA4_FILES = Architecture(
    LLAMA4,
    names={
        **EXPERTS,
        "intermediate_size": ("expert_feed_forward_length",),
        "intermediate_size_mlp": ("feed_forward_length",),
    },
    fixed={"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
    translate=_translate_llama4,
)


GRANITE_MOE_FILES = Architecture(GRANITE_MOE, paired=True, names={**GRANITE_NAMES, **EXPERTS})
