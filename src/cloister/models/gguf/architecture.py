"""From the metadata of a GGUF file to a DecoderSpec, and the names that its tensors have there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.backends.tensors import dequantized
from cloister.models.config import ConfigFields
from cloister.models.families.llama import LLAMA
from cloister.models.families.qwen2 import QWEN2
from cloister.models.families.qwen3 import QWEN3
from cloister.models.family import Family
from cloister.models.gguf.tensors import find_entry
from cloister.models.rope import read_rope
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
_MAX_HEAD_DIM = 8192

_MODULES: Mapping[str, str] = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "attention_norm": "attn_norm", "q": "attn_q",
    "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """What `general.architecture` stands for.

    Attributes:
        paired: the rows of q and k are stored for rotation of neighbours.
    """

    family: Family
    paired: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(LLAMA, paired=True),
    "qwen2": Architecture(QWEN2, paired=False),
    "qwen3": Architecture(QWEN3, paired=False),
}


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
    return name, ARCHITECTURES[name]


def stored_name(name: str) -> str:
    """Returns the name in a GGUF file for a canonical one (`backends.base`)."""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_MODULES[parts[2]]}.{parts[3]}"
    return f"{_MODULES[parts[0]]}.{parts[1]}"


def read_spec(file: GGUFFile) -> DecoderSpec:
    """Returns the decoder that a file describes; biases and a head of its own are there if their tensors are.

    Raises:
        ModelError: an entry is missing, has no meaning, or is one that would have to be ignored.
    """
    name, architecture = find_architecture(file)
    fields = ConfigFields(_entries_of(file, name), file.path.name)
    hidden, num_layers = fields.take_size("embedding_length"), fields.take_size("block_count")
    if num_layers > len(file.tensors):
        raise ModelError(f"'block_count' in {file.path.name} is greater than its number of tensors; download it again")
    max_positions = fields.take_size("context_length")
    attention = _read_attention(file, fields, architecture.family, hidden, max_positions)
    mlp = MlpSpec(fields.take_size("feed_forward_length"), bias="blk.0.ffn_down.bias" in file.tensors)
    spec = DecoderSpec(
        family=architecture.family.name,
        vocab_size=count_tokens(file),
        hidden_size=hidden,
        layers=(LayerSpec(attention, mlp),) * num_layers,
        norm_eps=fields.take("attention.layer_norm_rms_epsilon", float),
        max_positions=max_positions,
        tied_embeddings="output.weight" not in file.tensors,
    )
    _finish(fields)
    return spec


def count_tokens(file: GGUFFile) -> int:
    """Returns the length of the token list.

    Raises:
        ModelError: the file has none.
    """
    num_tokens = getattr(file.metadata.get("tokenizer.ggml.tokens"), "num_items", 0)
    if num_tokens < 1:
        raise ModelError(f"{file.path.name} has no tokenizer; convert the model again, with its tokenizer beside it")
    return int(num_tokens)


def _entries_of(file: GGUFFile, name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _finish(fields: ConfigFields) -> None:
    """Takes what says nothing new, and refuses what is left."""
    for name in ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"):
        fields.take_any(name)
    for name, only in {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}.items():
        if fields.take_any(name) not in (None, only):
            raise ModelError(f"{name!r} in {fields.source} is only supported as {only!r}", param=name)
    fields.finish()


def _read_attention(file: GGUFFile, fields: ConfigFields, family: Family, hidden: int, max_positions: int) -> AttentionSpec:
    num_heads = fields.take_size("attention.head_count")
    num_kv_heads = fields.take_size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError("attention.head_count must be a multiple of attention.head_count_kv", param="attention.head_count_kv")
    head_dim = fields.take_size("attention.key_length", hidden // num_heads or 1)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.take_size(name, head_dim) != head_dim:
            raise ModelError(f"{name!r} in {fields.source} must be the size of a head ({head_dim})", param=name)
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise ModelError(
            f"heads must have an even size up to {_MAX_HEAD_DIM} for rotary positions, not {head_dim}",
            param="attention.key_length",
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_read_rope(file, fields, head_dim, max_positions),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=family.qk_norm,
    )


def _read_rope(file: GGUFFile, fields: ConfigFields, head_dim: int, max_positions: int) -> RopeSpec:
    """Reads the base and the scaling, which `rope_freqs.weight` does for Llama 3.1: it divides each frequency."""
    theta = fields.take("rope.freq_base", float, 10000.0)
    if not 1 < theta < float("inf"):
        raise ModelError(f"'rope.freq_base' in {fields.source} must be greater than 1, not {theta}", param="rope.freq_base")
    rope = read_rope(ConfigFields({"rope_theta": theta, **_read_scaling(fields)}, fields.source), head_dim, max_positions)
    if ROPE_FACTORS not in file.tensors:
        return rope
    scaled = np.array(rope.inv_freq, np.float32) / _read_factors(file, head_dim // 2)
    return RopeSpec(tuple(float(f) for f in scaled), rope.attention_scale)


def _read_factors(file: GGUFFile, num_frequencies: int) -> npt.NDArray[np.float32]:
    entry = find_entry(file, ROPE_FACTORS)
    factors = dequantized(entry.read())
    if entry.shape != (num_frequencies,) or factors.dtype != np.float32 or not np.all((factors > 0) & np.isfinite(factors)):
        raise ModelError(f"tensor {ROPE_FACTORS!r} in {file.path.name} must hold a positive F32 for each frequency")
    return factors


def _read_scaling(fields: ConfigFields) -> dict[str, Any]:
    """Returns `rope_scaling` as a config.json would have it, none of it where there is no scaling."""
    kind = fields.take("rope.scaling.type", str, "linear")
    factor = fields.take("rope.scaling.factor", float, None) or fields.take("rope.scale_linear", float, None) or 1.0
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise ModelError(
            f"rope scaling {kind!r} in {fields.source} is not supported; known: {known}", param="rope.scaling.type"
        )
    return _SCALINGS[kind](fields, factor)


def _no_scaling(_fields: ConfigFields, _factor: float) -> dict[str, Any]:
    return {}


def _linear_scaling(_fields: ConfigFields, factor: float) -> dict[str, Any]:
    return {} if factor == 1.0 else {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def _yarn_scaling(fields: ConfigFields, factor: float) -> dict[str, Any]:
    named = {"original_max_position_embeddings": fields.take("rope.scaling.original_context_length", int, None)}
    betas = {name: fields.take(f"rope.scaling.yarn_{name}", float, None) for name in ("beta_fast", "beta_slow")}
    return {"rope_scaling": {"rope_type": "yarn", "factor": factor, **named, **betas}}


_SCALINGS: Mapping[str, Callable[[ConfigFields, float], dict[str, Any]]] = {
    "none": _no_scaling,
    "linear": _linear_scaling,
    "yarn": _yarn_scaling,
}
