"""Decoders with a window in some layers in GGUF files: Cohere 2, OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cloister.models.config import ConfigFields
from cloister.models.families.cohere2 import COHERE2
from cloister.models.families.olmo3 import OLMO3
from cloister.models.gguf.layout import WINDOW, Architecture, take_by_layer
from cloister.models.sources import Source
from cloister.types.gguf import GGUFArray, GGUFFile

PATTERN = "attention.sliding_window_pattern"


def read_kinds(_file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    """A pattern is a list with true for each layer with a window, or says after how many layers one has none."""
    if not isinstance(fields.peek_any(PATTERN), GGUFArray):
        return {}
    kinds = ["sliding_attention" if is_local else "full_attention" for is_local in take_by_layer(fields, PATTERN)]
    return {"layer_types": kinds}


OLMO3_FILES = Architecture(OLMO3, names={**WINDOW, "sliding_window_pattern": (PATTERN,)}, translate=read_kinds, local_base=0.0)
COHERE2_FILES = replace(
    OLMO3_FILES,
    family=COHERE2,
    names={
        **OLMO3_FILES.names,
        "rms_norm_eps": ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    },
    sources={"mlp_norm": Source("blk.{}.attn_norm")},
    local_base=None,
)
