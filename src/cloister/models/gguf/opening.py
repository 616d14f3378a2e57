"""Opens a GGUF file: its spec, weights, tokenizer and chat template."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cloister.backends.spec import DecoderSpec, LayerSpec
from cloister.backends.tensors import Tensor, dequantized
from cloister.models.decoder import list_tensors
from cloister.models.gguf.architecture import entry_of, find_architecture, read_spec, sources_of
from cloister.models.gguf.layout import Architecture, TensorRecipe
from cloister.models.gguf.rotation import OF_ROPE
from cloister.models.gguf.tensors import Reordered, find_entry, names_beside
from cloister.models.location import Digests
from cloister.models.quantized import Stored
from cloister.models.quantized.base import StoredMatrix
from cloister.models.sources import Mapped, Shape, Source, StoredWeights, find_place, num_heads_of
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile, read_gguf

_ENDS = ("eos", "eot", "eom")
_END_TEXTS = frozenset((
    "</s>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>", "[EOT]", "[EOS]", "[e~[",
))  # fmt: skip
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
"""Of gpt-oss, where `<|end|>` ends a message and another may follow."""
_SAMPLING: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "temp": ("temperature", float), "top_p": ("top_p", float), "top_k": ("top_k", int), "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
}  # fmt: skip
_MOST_MISSING = 1000  # tensors, before it is not worth while to name the first
_CONTROL, _USER_DEFINED = 3, 4
_BLOCK_VERSION = 2


@dataclass(frozen=True, slots=True)
class OpenedGGUF:
    """A model in a GGUF file.

    Attributes:
        eos_token_ids: what ends an answer.
        defaults: sampling defaults, by the names of generation_config.json.
        fingerprint: SHA-256 of the file (hex).
    """

    spec: DecoderSpec
    weights: StoredWeights
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    fingerprint: str


def open_gguf(path: Path, digests: Digests, max_model_len: int | None = None) -> OpenedGGUF:
    """Opens a GGUF file; the weights stay on disk, mapped.

    Args:
        max_model_len: as in `models.decoder.read_spec`.

    Raises:
        ModelError: something is missing, damaged, unknown or contradictory; the message names it.
    """
    file = read_gguf(path)
    if file.get("general.quantization_version", int) not in (None, _BLOCK_VERSION):
        raise ModelError(f"{path.name} has quantised blocks of another version than {_BLOCK_VERSION}; convert the model again")
    spec = read_spec(file, max_model_len)
    weights = _open_weights(file, spec)
    ends = tuple(dict.fromkeys(_find_ends(file, spec.vocab_size)))
    return OpenedGGUF(spec, weights, ends, dict(_read_sampling(file)), digests.of(path))


def _open_weights(file: GGUFFile, spec: DecoderSpec) -> StoredWeights:
    architecture = find_architecture(file)[1]
    entries: dict[str, Stored] = {}
    left = set(_list_needed(file, architecture, len(spec.layers)))
    left.difference_update(*(names_beside(file, name) for name in file.tensors))
    shapes = list_tensors(spec, sum(_count_parts(file, tensor.shape) for tensor in file.tensors.values()) + _MOST_MISSING)
    for name in shapes:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        recipe = entry_of(architecture.recipes, name)
        parts = [part.format(*numbers) for part in recipe.names] if recipe else []
        if recipe and parts[0] in file.tensors:
            entries[name] = _compute(file, recipe, parts, shapes[name], spec.layers[numbers[0]])
            left.difference_update(parts)
            continue
        source, stored = _find_stored(file, architecture, name, numbers)
        left.discard(stored)
        place = find_place(source, name, shapes, num_heads_of(spec.layers[numbers[0]]) if source.by_head else 0)
        num_heads = _num_paired_heads(spec, name) if architecture.paired else None
        entry = find_entry(file, stored, num_heads, expert=_place_in_stack(name, numbers))
        if place.stored_shape == (1, *entry.shape):  # a matrix of one row is stored as that row
            entry = replace(entry, shape=place.stored_shape)
        if entry.shape != place.stored_shape:
            raise ModelError(
                f"tensor {stored!r} has the shape {entry.shape}, the metadata of {file.path.name} says {place.stored_shape}"
            )
        entries[name] = entry if source.is_plain else Mapped(entry, place)
    for name, stored_tensor in entries.items():
        if order := entry_of(architecture.orders, name):
            layer = spec.layers[int(name.split(".")[1])]
            entries[name] = Reordered(stored_tensor, order.axis, order.places(layer))
    if left:
        raise ModelError(f"{file.path.name} has a tensor {min(left)!r} that its architecture has no place for")
    return StoredWeights(entries)


def _list_needed(file: GGUFFile, architecture: Architecture, num_layers: int) -> Iterator[str]:
    """Yields the tensors that a decoder must have a place for, but for those of rotation."""
    for name in file.tensors:
        is_buffer = architecture.buffers is not None and architecture.buffers.fullmatch(name)
        if name not in OF_ROPE and not is_buffer and not _predicts_further(file, name, num_layers):
            yield name


def _place_in_stack(name: str, numbers: Sequence[int]) -> int | None:
    """Returns which one of a stored stack a tensor is: that of an expert or of a residual stream; None where it is alone."""
    return numbers[-1] if len(numbers) > 1 or name.startswith("streams_") else None


def _find_stored(file: GGUFFile, architecture: Architecture, name: str, numbers: Sequence[int]) -> tuple[Source, str]:
    """Returns where the file has a tensor, and what it is called there."""
    places = []
    for source in sources_of(architecture, name):
        stored = source.name.format(*numbers) + ("" if source.is_tensor else f".{name.rpartition('.')[2]}")
        if stored in file.tensors:
            return source, stored
        places.append(stored)
    raise ModelError(f"{file.path.name} lacks the tensor {places[0]!r} that its metadata asks for; download or copy it again")


def _compute(file: GGUFFile, recipe: TensorRecipe, parts: Sequence[str], shape: Shape, layer: LayerSpec) -> StoredMatrix:
    """Returns a tensor that is computed from parts when it is read."""
    for part in parts:
        if part not in file.tensors:
            raise ModelError(
                f"{file.path.name} lacks the tensor {part!r} that its metadata asks for; download or copy it again"
            )
    found = [file.tensors[part].shape for part in parts]
    fits = found == recipe.shapes(layer) if recipe.shapes else sum(map(math.prod, found)) == math.prod(shape)
    if not fits:
        raise ModelError(f"tensor {parts[0]!r} in {file.path.name} has the shape {found[0]}, which its metadata contradicts")
    entries = [find_entry(file, part, is_flat=True) for part in parts]

    def read() -> Tensor:
        computed = recipe.compute(layer, [dequantized(entry.read()) for entry in entries])
        if not np.isfinite(computed).all():
            raise ModelError(
                f"tensor {parts[0]!r} in {file.path.name} has numbers without a meaning; download or copy it again"
            )
        return np.ascontiguousarray(computed.reshape(shape))

    return StoredMatrix(shape, lambda: None, read)


def _predicts_further(file: GGUFFile, name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer behind the last that predicts further tokens."""
    has_some = bool(file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers"))
    number = name.split(".")[1] if has_some and name.startswith("blk.") else ""
    return number.isdigit() and int(number) >= num_layers


def _count_parts(file: GGUFFile, shape: tuple[int, ...]) -> int:
    """Returns how many tensors one of a file can be at most: two for each expert, or three where it is fused."""
    return min(2 * shape[0], file.size_bytes) if len(shape) == 3 else 3


def _num_paired_heads(spec: DecoderSpec, name: str) -> int | None:
    parts = name.split(".")
    if parts[0] != "layers" or parts[2] not in ("q", "k"):
        return None
    attention = spec.layers[int(parts[1])].grouped_attention
    return attention.num_heads if parts[2] == "q" else attention.num_kv_heads


def _find_ends(file: GGUFFile, vocab_size: int) -> Iterator[int]:
    """Yields the ids that the metadata names, then control tokens with a text that always ends an answer."""
    for name in _ENDS:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = file.get(key, int)
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise ModelError(f"{key!r} in {file.path.name} is no id of its token list", param=key)
        if token_id is not None:
            yield token_id
    found = file.find_strings("tokenizer.ggml.tokens", _END_TEXTS | _HARMONY_ENDS)
    kinds = file.numbers("tokenizer.ggml.token_type") or []
    texts = {text for _, text in found}
    ends = _END_TEXTS - {"<|end|>"} | _HARMONY_ENDS if texts >= _HARMONY_ENDS else _END_TEXTS
    for token_id, text in found:
        if text in ends and token_id < len(kinds) and kinds[token_id] in (_CONTROL, _USER_DEFINED):
            yield token_id


def _read_sampling(file: GGUFFile) -> Iterator[tuple[str, float]]:
    for stored, (name, kind) in _SAMPLING.items():
        value = file.get(f"general.sampling.{stored}", kind)
        if value is not None:
            yield name, float(value)
