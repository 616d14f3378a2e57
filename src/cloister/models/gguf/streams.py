"""Decoders with several residual streams in GGUF files: Gemma 3n."""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from cloister.models.config import ConfigFields
from cloister.models.families.gemma3n import GEMMA3N
from cloister.models.gguf.layout import WINDOW, Architecture, take_by_layer
from cloister.models.gguf.windows import PATTERN, read_kinds
from cloister.models.sources import Source
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFArray, GGUFFile

_SPARSITY = "activation_sparsity_scale"
_TABLE, _LOW_RANK = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"


def _translate(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    """What a file does not say in so many words is the shape of a tensor."""
    fields.need("num_kv_shared_layers", "altup_num_inputs", "hidden_size_per_layer_input")
    return {
        **read_kinds(file, fields),
        **_read_sparsity(fields),
        "intermediate_sizes": take_by_layer(fields, "intermediate_sizes"),
        "laurel_rank": _count_rows(file, _LOW_RANK),
        "vocab_size_per_layer_input": _count_rows(file, _TABLE),
    }


def _read_sparsity(fields: ConfigFields) -> dict[str, Any]:
    """A file says by how many deviations a gate must exceed the mean of its row; a config, which part of all gates does not."""
    given = fields.take_any(_SPARSITY)
    if given is None:
        return {}
    try:
        deviations = given.numbers() if isinstance(given, GGUFArray) else ()
    except ValueError:
        deviations = ()
    num_layers = fields.peek("num_hidden_layers")
    if len(deviations) != num_layers or not all(isinstance(each, float) and each < float("inf") for each in deviations):
        raise ModelError(
            f"{_SPARSITY!r} in {fields.source} must hold a number of deviations for each of {num_layers} layers",
            param=_SPARSITY,
        )
    return {"activation_sparsity_pattern": [NormalDist().cdf(each) for each in deviations]}


def _count_rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelError(
            f"{file.path.name} lacks the tensor {name!r} that its architecture asks for; download or copy it again"
        )
    return file.tensors[name].shape[0]


GEMMA3N_FILES = Architecture(
    GEMMA3N,
    names={
        **WINDOW,
        "sliding_window_pattern": (PATTERN,),
        "num_kv_shared_layers": ("attention.shared_kv_layers",),
        "altup_num_inputs": ("altup.num_inputs",),
        "altup_active_idx": ("altup.active_idx",),
        "hidden_size_per_layer_input": ("embedding_length_per_layer_input",),
        "intermediate_sizes": ("feed_forward_length",),
        "intermediate_size": ("intermediate_size_of_all",),
    },
    translate=_translate,
    sources={
        "altup.router": Source("blk.{}.altup_router"),
        "altup.norm": Source("blk.{}.altup_router_norm"),
        "altup.scale": Source("blk.{}.altup_correct_scale.weight", is_tensor=True),
        "altup.predict": Source("blk.{}.altup_predict_coef"),
        "altup.correct": Source("blk.{}.altup_correct_coef"),
        "laurel_left": Source("blk.{}.laurel_l"),
        "laurel_right": Source("blk.{}.laurel_r"),
        "laurel_norm": Source("blk.{}.laurel_post_norm"),
        "layer_input_gate": Source("blk.{}.inp_gate"),
        "layer_input_out": Source("blk.{}.proj"),
        "layer_input_norm": Source("blk.{}.post_norm"),
        "layer_inputs.embed": Source("per_layer_token_embd"),
        "layer_inputs.projection": Source("per_layer_model_proj"),
        "layer_inputs.norm": Source("per_layer_proj_norm"),
        "streams_in": Source("altup_proj"),
        "streams_out": Source("altup_unembd_proj"),
    },
    local_base=10000.0,
    global_base=1000000.0,
    # files may hold what layers that read the KV of others have no use for
    buffers=re.compile(r"blk\.\d+\.attn_(k|v|k_norm)\.weight"),
)
