"""Decoders with a state in GGUF files: Mamba 2, Granite 4, Falcon-H1, Nemotron-H, LFM2, Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import GatedDeltaNetSpec, LayerSpec
from cloister.models.config import ConfigFields
from cloister.models.families.falcon_h1 import FALCON_H1
from cloister.models.families.granite_hybrid import GRANITE_HYBRID
from cloister.models.families.lfm2 import LFM2, LFM2_MOE
from cloister.models.families.mamba2 import MAMBA2
from cloister.models.families.nemotron_h import NEMOTRON_H
from cloister.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from cloister.models.families.qwen3_next import QWEN3_NEXT
from cloister.models.gguf.layout import (
    EXPERTS,
    GRANITE_NAMES,
    QKV,
    SIGMOID,
    Architecture,
    Array,
    Names,
    Order,
    TensorRecipe,
    has_tensor,
    take_by_layer,
)
from cloister.models.gguf.mixtures import ROUTED, default_routing
from cloister.models.mixers import FULL, LINEAR
from cloister.models.sources import Source
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

# Mamba 2: converters write the decay -exp(A_log), and what is one number for each head, or for each of a group, with an axis
# more than checkpoints have.


def _undo_exponential(_layer: LayerSpec, parts: Sequence[Array]) -> Array:
    """Returns `A_log` of the decay -exp(A_log)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(-parts[0].astype(np.float64)).astype(np.float32)


def _as_it_is(_layer: LayerSpec, parts: Sequence[Array]) -> Array:
    return parts[0]


_DECAY: Mapping[str, TensorRecipe] = {"mixer.A_log": TensorRecipe(("blk.{}.ssm_a",), _undo_exponential)}
_MAMBA_RECIPES: Mapping[str, TensorRecipe] = {
    **_DECAY,
    "mixer.D": TensorRecipe(("blk.{}.ssm_d",), _as_it_is),
    "mixer.norm": TensorRecipe(("blk.{}.ssm_norm.weight",), _as_it_is),
}
_MIXER_SOURCES: Mapping[str, Source] = {
    "mixer.A_log": Source("blk.{}.ssm_a", is_tensor=True),
    "mixer.D": Source("blk.{}.ssm_d", is_tensor=True),
    "mixer.dt_bias": Source("blk.{}.ssm_dt.bias", is_tensor=True),
    **{f"mixer.{name}": Source(f"blk.{{}}.ssm_{name}") for name in ("in", "norm", "out")},
    "mixer.conv": Source("blk.{}.ssm_conv1d"),
}
_MAMBA_NAMES: Names = {
    "mamba_n_heads": ("ssm.time_step_rank",), "mamba_n_groups": ("ssm.group_count",), "mamba_d_state": ("ssm.state_size",),
    "mamba_d_conv": ("ssm.conv_kernel",),
}  # fmt: skip


def _read_mamba2(file: GGUFFile, fields: ConfigFields) -> tuple[int, dict[str, Any]]:
    """Returns the numbers of x, and what files need not say of a Mamba 2 mixer."""
    return fields.take_size("ssm.inner_size"), {
        "mamba_chunk_size": 256,  # changes no answer
        "mamba_conv_bias": has_tensor(file, "ssm_conv1d.bias"),
    }


def _read_expanded(file: GGUFFile, fields: ConfigFields) -> dict[str, Any]:
    """As `_read_mamba2`, where x is a multiple of the hidden size."""
    inner, said = _read_mamba2(file, fields)
    hidden = fields.peek("hidden_size")
    if hidden < 1 or inner % hidden:
        raise ModelError(
            f"'ssm.inner_size' in {fields.source} must be a multiple of 'embedding_length'", param="ssm.inner_size"
        )
    return {**said, "mamba_expand": inner // hidden}


def _translate_mamba2(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.drop(("feed_forward_length", "attention.head_count"))  # both are 0
    return _read_expanded(file, fields)


MAMBA2_FILES = Architecture(
    MAMBA2,
    names=_MAMBA_NAMES,
    translate=_translate_mamba2,
    sources=_MIXER_SOURCES,
    recipes=_MAMBA_RECIPES,
    head_size=None,
)


def _list_kinds(fields: ConfigFields) -> dict[str, Any]:
    """Returns the kind of each layer and the KV heads of those with attention: others have none."""
    counts = take_by_layer(fields, "num_key_value_heads")
    return {"layer_types": [FULL if count else LINEAR for count in counts], "num_key_value_heads": max([1, *counts])}


# Granite 4: each layer has a feed-forward or a mixture; rotation where the file says that it was trained so.


def _translate_granite(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    said = _list_kinds(fields) | {"position_embedding_type": "nope"}
    if fields.take("rope.scaling.finetuned", bool, True):
        said["position_embedding_type"] = "rope"
    if LINEAR in said["layer_types"]:
        said |= _read_expanded(file, fields)
    else:
        said |= _NO_MAMBA
        fields.drop(["ssm.inner_size", *(stored for names in _MAMBA_NAMES.values() for stored in names)])
    if fields.peek("num_experts", 0) > 0:
        return said
    fields.drop(map(fields.name_of, ("num_experts", "num_experts_per_tok")))
    size = fields.peek("shared_intermediate_size", fields.peek("intermediate_size"))
    return {**said, "num_experts": 0, "shared_intermediate_size": size}


_NO_MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 1, "mamba_n_groups": 1, "mamba_d_state": 1, "mamba_d_conv": 1, "mamba_expand": 1, "mamba_chunk_size": 1,
}  # fmt: skip
"""Of a decoder whose layers all attend (`granitemoe`, and `granite` where it is Granite 4)."""

GRANITE_HYBRID_FILES = Architecture(
    GRANITE_HYBRID,
    paired=True,
    names={
        **GRANITE_NAMES,
        **_MAMBA_NAMES,
        "num_experts": EXPERTS["num_experts"],
        "num_experts_per_tok": EXPERTS["num_experts_per_tok"],
        "shared_intermediate_size": EXPERTS["shared_expert_intermediate_size"],
    },
    translate=_translate_granite,
    sources=_MIXER_SOURCES,
    recipes=_MAMBA_RECIPES,
)


# Falcon-H1: converters multiply the matrices by the model's multipliers.


def _translate_falcon(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    inner, said = _read_mamba2(file, fields)
    return {**said, "mamba_d_ssm": inner, "mamba_expand": 1, "mamba_rms_norm": has_tensor(file, "ssm_norm.weight")}


FALCON_H1_FILES = Architecture(
    FALCON_H1,
    names=_MAMBA_NAMES,
    fixed={"mamba_norm_before_gate": False},
    translate=_translate_falcon,
    sources={**_MIXER_SOURCES, "mlp_norm": Source("blk.{}.ffn_norm", is_tensor=True)},
    other_sources={"mlp_norm": Source("blk.{}.ffn_norm")},
    recipes=_MAMBA_RECIPES,
)


# Nemotron-H: the tensors of a layer say of what kind it is.

_KINDS = {"ssm_in": LINEAR, "attn_q": FULL, "ffn_gate_inp": "moe", "ffn_up": "mlp"}


def _kind_of(file: GGUFFile, number: int) -> str:
    found = [kind for name, kind in _KINDS.items() if f"blk.{number}.{name}.weight" in file.tensors]
    if len(found) != 1:
        raise ModelError(f"layer {number} of {file.path.name} has tensors of no known kind of layer; download or copy it again")
    return found[0]


def _translate_nemotron(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.require("expert_gating_func", SIGMOID)
    inner, said = _read_mamba2(file, fields)
    num_heads, num_layers = fields.peek("mamba_n_heads"), fields.peek("num_hidden_layers")
    if num_heads < 1 or inner % num_heads:
        raise ModelError(f"'ssm.inner_size' in {fields.source} must be a multiple of its heads", param="ssm.inner_size")
    kinds = [_kind_of(file, number) for number in range(min(num_layers, len(file.tensors)))]
    sizes = take_by_layer(fields, "intermediate_size")
    dense = [file.tensors[f"blk.{number}.ffn_up.weight"].shape[0] for number, kind in enumerate(kinds) if kind == "mlp"]
    routing = {name: value for name, value in default_routing(fields).items() if name != "first_k_dense_replace"}
    unused = {name: NEMOTRON_H.defaults[name] for name in _OF_EXPERTS if fields.peek_any(name) is None}
    return {
        **said, **routing, **unused,
        "layer_types": kinds,
        "intermediate_size": max([1, *dense, *sizes]),
        "num_key_value_heads": max([1, *take_by_layer(fields, "num_key_value_heads")]),
        "mamba_d_head": inner // num_heads,
    }  # fmt: skip


_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size")

NEMOTRON_H_FILES = Architecture(
    NEMOTRON_H,
    names={
        **{name: stored for name, stored in ROUTED.items() if name != "first_k_dense_replace"},
        **_MAMBA_NAMES,
        "moe_shared_expert_intermediate_size": EXPERTS["shared_expert_intermediate_size"],
    },
    translate=_translate_nemotron,
    sources={**_MIXER_SOURCES, "mlp_norm": Source("blk.{}.attn_norm")},
    recipes=_MAMBA_RECIPES,
    head_size=None,
)


# LFM2: the layers without KV heads are convolutions; the size of the feed-forwards is the one that the converter computed.


def _translate_lfm2(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    said = _list_kinds(fields)
    return {
        **said,
        "layer_types": [FULL if kind == FULL else "conv" for kind in said["layer_types"]],
        "conv_bias": has_tensor(file, "shortconv.conv.bias"),
    }


LFM2_FILES = Architecture(
    LFM2,
    names={"conv_L_cache": ("shortconv.l_cache",)},
    fixed={"block_auto_adjust_ff_dim": False},
    translate=_translate_lfm2,
    sources={
        "norm": Source("token_embd_norm"),
        "mixer.in": Source("blk.{}.shortconv.in_proj"),
        "mixer.conv": Source("blk.{}.shortconv.conv"),
        "mixer.out": Source("blk.{}.shortconv.out_proj"),
    },
    other_sources={"norm": Source("output_norm")},
)


def _translate_lfm2_moe(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.require("expert_gating_func", SIGMOID)
    return {"num_dense_layers": fields.take("leading_dense_block_count", int, 0), **_translate_lfm2(file, fields)}


LFM2_MOE_FILES = replace(
    LFM2_FILES,
    family=LFM2_MOE,
    names={**LFM2_FILES.names, **EXPERTS, "routed_scaling_factor": ("expert_weights_scale",)},
    fixed={},
    translate=_translate_lfm2_moe,
)


# Qwen3-Next: one was added to the norms already.


def _translate_qwen3_next(_file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    num_heads, inner = fields.peek("linear_num_value_heads"), fields.take_size("ssm.inner_size")
    if num_heads < 1 or inner % num_heads:
        raise ModelError(f"'ssm.inner_size' in {fields.source} must be a multiple of its heads", param="ssm.inner_size")
    said: dict[str, Any] = {"linear_value_head_dim": inner // num_heads}
    if fields.peek_any("attention.recurrent_layers") is not None:
        has_state = take_by_layer(fields, "attention.recurrent_layers")
        said["layer_types"] = [LINEAR if state else FULL for state in has_state]
    return said


_DELTA_NET_NAMES: Names = {
    "linear_num_key_heads": ("ssm.group_count",), "linear_num_value_heads": ("ssm.time_step_rank",),
    "linear_key_head_dim": ("ssm.state_size",), "linear_conv_kernel_dim": ("ssm.conv_kernel",),
}  # fmt: skip
_GATED_Q = Source("blk.{}.attn_q", ("q", "q_gate"), by_head=True)
_BA = Source("blk.{}.ssm_ba", ("b", "a"), by_head=True)
_QKVZ = Source("blk.{}.ssm_in", ("q", "k", "v", "z"), by_head=True)

QWEN3_NEXT_FILES = Architecture(
    QWEN3_NEXT,
    names={**EXPERTS, **_DELTA_NET_NAMES},
    translate=_translate_qwen3_next,
    sources={
        **_MIXER_SOURCES,
        **{f"mixer.{module}": source for module, source in QKV.items()},
        "mixer.z": Source("blk.{}.attn_gate"),
        "mixer.b": _BA,
        "mixer.a": _BA,
        "q": _GATED_Q,
        "q_gate": _GATED_Q,
        "mlp_norm": Source("blk.{}.post_attention_norm"),
    },
    other_sources=dict.fromkeys(("mixer.q", "mixer.k", "mixer.v", "mixer.z"), _QKVZ),
    recipes=_DECAY,
)


# Qwen3.5: the value heads of a key head do not follow one another; first comes one of each key head, then the next of each.


def _delta_net(layer: LayerSpec) -> GatedDeltaNetSpec:
    if not isinstance(layer.state, GatedDeltaNetSpec):
        raise TypeError("only gated delta nets have value heads in this order")
    return layer.state


def _place_heads(spec: GatedDeltaNetSpec, size: int) -> npt.NDArray[np.int32]:
    """Returns where each of `size` numbers of each value head lies, [num_value_heads * size]."""
    heads = np.arange(spec.num_value_heads, dtype=np.int32).reshape(-1, spec.num_key_heads).T.reshape(-1, 1)
    return np.asarray(heads * size + np.arange(size, dtype=np.int32), np.int32).ravel()


def _place_values(layer: LayerSpec) -> npt.NDArray[np.int32]:
    spec = _delta_net(layer)
    return _place_heads(spec, spec.value_head_dim)


def _place_numbers(layer: LayerSpec) -> npt.NDArray[np.int32]:
    return _place_heads(_delta_net(layer), 1)


def _place_channels(layer: LayerSpec) -> npt.NDArray[np.int32]:
    """Returns where each channel of the convolution lies: those of q and of k, then those of v."""
    before = 2 * _delta_net(layer).key_size
    return np.concatenate([np.arange(before, dtype=np.int32), before + _place_values(layer)])


_PLACES: Mapping[str, Callable[[LayerSpec], npt.NDArray[np.int32]]] = {
    "mixer.v": _place_values, "mixer.z": _place_values, "mixer.b": _place_numbers, "mixer.a": _place_numbers,
    "mixer.A_log": _place_numbers, "mixer.dt_bias": _place_numbers, "mixer.conv": _place_channels,
}  # fmt: skip

QWEN3_5_FILES = replace(
    QWEN3_NEXT_FILES,
    family=QWEN3_5,
    names=_DELTA_NET_NAMES,
    sources={**QWEN3_NEXT_FILES.sources, "mixer.b": Source("blk.{}.ssm_beta"), "mixer.a": Source("blk.{}.ssm_alpha")},
    other_sources={},
    orders={**{module: Order(0, places) for module, places in _PLACES.items()}, "mixer.out": Order(1, _place_values)},
    unread=frozenset(("rope.dimension_sections",)),  # which of an image's positions turns what; those of text are all the same
)
QWEN3_5_MOE_FILES = replace(QWEN3_5_FILES, family=QWEN3_5_MOE, names=QWEN3_NEXT_FILES.names)
