"""From the metadata of a GGUF file to a DecoderSpec: its entries are read as the fields of a config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cloister.backends.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.decoder import read_fields
from cloister.models.gguf.rotation import ROPE_FACTORS, read_factors, read_rotation
from cloister.models.gguf.table import ARCHITECTURES, MIXTRAL_AS_LLAMA, NAMES, SOURCES, Architecture
from cloister.models.sources import Source
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

_MAX_HEAD_DIM = 8192
_SAYS_NOTHING = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length")
_SOFTMAX = 1  # of the ways in which llama.cpp turns a router's outputs into scores
_DEFAULTS = frozenset(
    ("hidden_act", "sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "no_rope_layer_interval")
)
"""Fields of a family that files need not hold; sizes they must."""


def find_architecture(file: GGUFFile) -> tuple[str, Architecture]:
    """Returns the architecture that a file names, and its name.

    Raises:
        ModelError: it is not known (the message lists those that are), or the file holds no model.
    """
    kind = file.get("general.type", str) or "model"
    if kind != "model":
        raise ModelError(f"{file.path.name} holds no model ({kind!r}); give the GGUF file of the model itself")
    if (file.get("split.count", int) or 0) > 1:
        raise ModelError(f"{file.path.name} is one part of a model; join its parts with `llama-gguf-split --merge` first")
    name = file.get("general.architecture", str) or "none"
    if name not in ARCHITECTURES:
        raise ModelError(f"{file.path.name} has the architecture {name!r}; supported are: {', '.join(ARCHITECTURES)}")
    is_mixtral = name == "llama" and (file.get("llama.expert_count", int) or 0) > 0
    return name, MIXTRAL_AS_LLAMA if is_mixtral else ARCHITECTURES[name]


def source_of(architecture: Architecture, name: str) -> Source:
    """Returns where a file has the module of a canonical tensor name (`backends.base`)."""
    parts = name.split(".")[:-1]
    module = ".".join(part for part in parts if part != "layers" and not part.isdigit())
    return architecture.sources.get(module) or SOURCES[module]


def read_spec(file: GGUFFile, max_model_len: int | None = None) -> DecoderSpec:
    """Returns the decoder that a file describes; biases and a head of its own are there if their tensors are.

    Args:
        max_model_len: as in `models.decoder.read_spec`.

    Raises:
        ModelError: an entry is missing, has no meaning, or is one that would have to be ignored.
    """
    name, architecture = find_architecture(file)
    fields = _prepare(file, name, architecture)
    if fields.peek("num_hidden_layers") > len(file.tensors):
        raise ModelError(f"'block_count' in {file.path.name} is greater than its number of tensors; download it again")
    spec = read_fields(architecture.family, fields, max_model_len)
    layers = tuple(_fit_biases(file, number, layer) for number, layer in enumerate(spec.layers))
    if ROPE_FACTORS in file.tensors:
        layers = tuple(_slow(file, layer) for layer in layers)
    return replace(spec, layers=layers)


def count_tokens(file: GGUFFile) -> int:
    """Returns the length of the token list.

    Raises:
        ModelError: the file has none.
    """
    num_tokens = getattr(file.metadata.get("tokenizer.ggml.tokens"), "num_items", 0)
    if num_tokens < 1:
        raise ModelError(f"{file.path.name} has no tokenizer; convert the model again, with its tokenizer beside it")
    return int(num_tokens)


def _prepare(file: GGUFFile, name: str, architecture: Architecture) -> ConfigFields:
    """Returns the file's entries and what they leave unsaid, as fields of the family's config."""
    prefix = f"{name}."
    entries = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = ConfigFields(entries, file.path.name, names={**NAMES, **architecture.names})
    fields.need("max_position_embeddings", "rms_norm_eps")
    head_dim = _check_heads(fields)
    said = {
        **architecture.fixed,
        **read_rotation(file, fields, architecture, head_dim),
        "vocab_size": count_tokens(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture.root_of_head:
        hidden, heads = fields.peek("hidden_size"), fields.peek("num_attention_heads")
        is_largest = fields.peek("num_hidden_layers") == architecture.root_of_head
        said["query_pre_attn_scalar"] = hidden // heads if is_largest else head_dim
    if "num_experts" not in architecture.names:
        fields.require("expert_count", 0)
        fields.require("expert_used_count", 0)
    fields.require("expert_gating_func", _SOFTMAX)
    fields.require("attention.causal", True)
    fields.drop(_SAYS_NOTHING)
    defaults = {key: value for key, value in architecture.family.defaults.items() if key in _DEFAULTS}
    return fields.extended(said, defaults)


def _check_heads(fields: ConfigFields) -> int:
    """Returns the size of a head, after looking at what would make arithmetic of the rest impossible."""
    hidden, num_heads = fields.peek("hidden_size"), fields.peek("num_attention_heads")
    if min(hidden, num_heads) < 1:
        raise ModelError(f"'embedding_length' and 'attention.head_count' in {fields.source} must be positive")
    head_dim = fields.peek("head_dim", hidden // num_heads or 1)
    if head_dim % 2 or not 0 < head_dim <= _MAX_HEAD_DIM:
        raise ModelError(
            f"heads must have an even size up to {_MAX_HEAD_DIM} for rotary positions, not {head_dim}",
            param="attention.key_length",
        )
    if fields.peek("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"'attention.value_length' in {fields.source} must be the size of a head ({head_dim})",
            param="attention.value_length",
        )
    return head_dim


def _fit_biases(file: GGUFFile, number: int, layer: LayerSpec) -> LayerSpec:
    """Returns a layer with biases where the file has any."""

    def has(*names: str) -> bool:
        return any(f"blk.{number}.{name}.bias" in file.tensors for name in names)

    attention: Any = replace(layer.attention, qkv_bias=has("attn_q", "attn_qkv"), output_bias=has("attn_output"))
    mlp = replace(layer.mlp, bias=has("ffn_down")) if isinstance(layer.mlp, MlpSpec) else layer.mlp
    return replace(layer, attention=attention, mlp=mlp)


def _slow(file: GGUFFile, layer: LayerSpec) -> LayerSpec:
    """Divides each frequency by a factor of its own, which is how a file says what Llama 3.1's scaling came to."""
    rope = layer.attention.rope
    if rope is None:
        return layer
    scaled = np.array(rope.inv_freq, np.float32) / read_factors(file, ROPE_FACTORS, len(rope.inv_freq))
    slowed = RopeSpec(tuple(float(frequency) for frequency in scaled), rope.attention_scale)
    return replace(layer, attention=replace(layer.attention, rope=slowed))
