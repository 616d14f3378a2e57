"""Encoders in GGUF files: BERT and ModernBERT, for embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloister.models.config import ConfigFields
from cloister.models.families.encoders import BERT, MODERN_BERT
from cloister.models.gguf.layout import GATE_UP, QKV, Architecture
from cloister.models.sources import Source
from cloister.types.gguf import GGUFFile

_POOLING = frozenset(("pooling_type", "classifier.pooling_type"))
"""Read in `models.pooling`; the second is of a head that these files do not hold."""


def _translate_bert(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.require("attention.causal", False)
    return {"type_vocab_size": file.get("tokenizer.ggml.token_type_count", int) or 1}


BERT_FILES = Architecture(
    BERT,
    translate=_translate_bert,
    sources={
        "token_types": Source("token_types"),
        "embed_norm": Source("token_embd_norm"),
        "attention_norm": Source("blk.{}.attn_output_norm"),
        "mlp_norm": Source("blk.{}.layer_output_norm"),
    },
    unread=_POOLING,
)


def _translate_modern_bert(file: GGUFFile, fields: ConfigFields) -> Mapping[str, Any]:
    fields.require("attention.causal", False)
    return {"norm_bias": "output_norm.bias" in file.tensors}


MODERN_BERT_FILES = Architecture(
    MODERN_BERT,
    names={
        "hidden_act": ("hidden_activation",),
        "local_attention": ("attention.sliding_window",),
        "global_attn_every_n_layers": ("attention.sliding_window_pattern",),
    },
    translate=_translate_modern_bert,
    sources={**QKV, **GATE_UP, "embed_norm": Source("token_embd_norm")},
    local_base=10000.0,
    global_base=160000.0,
    unread=_POOLING,
)
