"""`Weights` over the safetensors files of a Hugging Face checkpoint, under canonical tensor names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import dequantized
from cloister.models.config import read_json
from cloister.models.decoder import list_tensors
from cloister.models.family import Family
from cloister.models.location import Digests
from cloister.models.quantized import Scheme, Stored
from cloister.models.quantized.base import StackedMatrices, StackPlace, StackScheme
from cloister.models.safetensors import FLOATS, TensorEntry, read_header
from cloister.models.sources import Mapped, Source, StoredWeights, TensorSlice, find_place, module_of, num_heads_of
from cloister.models.text_part import keep_text_part
from cloister.types.errors import ModelError

_MOST_PARTS = 3  # of a fused tensor
_MOST_MISSING = 1000  # before it is not worth while to name the first
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def open_checkpoint(found: dict[str, TensorEntry], family: Family, spec: DecoderSpec, scheme: Scheme | None) -> StoredWeights:
    """Maps the tensors of a model.

    Args:
        found: what its files hold (`read_headers`); nothing is left in it.
        scheme: how matrices that are not plain are stored.

    Raises:
        ModelError: a tensor is missing, is one too many, or has another shape than the config says.
    """
    weights = take_tensors(family, spec, found, scheme)
    _refuse_extra(found, family)
    return weights


def take_tensors(family: Family, spec: DecoderSpec, found: dict[str, TensorEntry], scheme: Scheme | None) -> StoredWeights:
    """Takes the tensors of a decoder out of what files hold (errors as in `open_checkpoint`)."""
    shapes = list_tensors(spec, _MOST_PARTS * len(found) + _MOST_MISSING)
    stored: dict[str, Stored | StackedMatrices] = {}
    entries: dict[str, Stored] = {}
    for name in shapes:
        source = _choose_source(source_of(family, name), name, found, stored)
        place, whole = find_place(source, name, shapes, _num_heads(spec, name)), source.name_of(name)
        if place.source.either_way and (held := found.get(whole) or stored.get(whole)) is not None:
            place = place.fitted_to(held.shape)
        if whole not in stored:
            stored[whole] = _take(whole, place, found, scheme)
        entries[name] = _cut(stored[whole], place)
    if spec.tied_embeddings and "embed.weight" in entries:
        _check_tied(found.pop(f"{family.tensors['head'].name}.weight", None), entries["embed.weight"])
    return StoredWeights(entries)


def _choose_source(source: Source, name: str, found: Mapping[str, TensorEntry], taken: Mapping[str, object]) -> Source:
    """Returns where a checkpoint has a tensor that lies in a stack in some, and alone in others."""
    if source.instead is None:
        return source
    stack, alone = (source, source.instead) if source.stacked else (source.instead, source)
    whole = stack.name_of(name)
    return replace(stack if whole in found or whole in taken else alone, instead=None)


def _take(stored: str, place: TensorSlice, found: dict[str, TensorEntry], scheme: Scheme | None) -> Stored | StackedMatrices:
    """Takes one tensor, or the parts of one, out of what the files hold."""
    shape = place.stored_shape
    if place.expert is not None and len(shape) == 3 and isinstance(scheme, StackScheme):  # the protocol takes longest to see
        stack = scheme.take_stack(_place_stack(stored, place), found)
        if stack is not None:
            return stack
    if scheme is not None and len(shape) == 2:
        matrix = scheme.take(stored.removesuffix(".weight"), (shape[0], shape[1]), found)
        if matrix is not None:
            _check_cut(stored, place)
            return matrix
    if stored not in found:
        raise ModelError(f"the checkpoint lacks the tensor {stored!r} that config.json asks for")
    entry = found.pop(stored)
    if entry.dtype not in FLOATS:
        if scheme is not None and len(shape) == 3:  # codes of all experts in one tensor
            _check_cut(stored, place)
        raise ModelError(f"tensor {stored!r} has the type {entry.dtype}; supported are: {', '.join(FLOATS)}")
    if entry.shape != shape:
        raise ModelError(f"tensor {stored!r} has the shape {entry.shape}, config.json asks for {shape}")
    return entry


def _place_stack(stored: str, place: TensorSlice) -> StackPlace:
    num_experts, *matrix = place.stored_shape
    num_out, num_in = reversed(matrix) if place.source.transposed else matrix
    layouts = (True, False) if place.source.either_way and place.source.transposed else (place.source.transposed,)
    return StackPlace(stored, (num_experts, num_out, num_in), layouts)


def _cut(stored: Stored | StackedMatrices, place: TensorSlice) -> Stored:
    """Returns one tensor of what was taken."""
    if isinstance(stored, StackedMatrices):
        step = len(place.source.parts) if place.source.by_row else 1
        start = place.start // place.num_heads if place.source.by_row else place.start
        return stored.take(place.expert or 0, slice(start, start + step * place.shape[0], step))
    return stored if place.source.is_plain else Mapped(stored, place)


def _check_cut(stored: str, place: TensorSlice) -> None:
    if not place.source.keeps_rows:
        raise ModelError(
            f"the quantised matrix {stored!r} is stored in an order that codes cannot be cut into; use the model's unquantised "
            "checkpoint, and quantise it while it is loaded (--quant)"
        )


def source_of(family: Family, name: str) -> Source:
    """Returns where a family's checkpoint has the module of a canonical tensor name."""
    module = module_of(name)
    return family.tensors.get(f"{module}.{name.rpartition('.')[2]}") or family.tensors[module]


def stored_name(family: Family, name: str) -> str:
    """Returns the name in a family's checkpoint of what holds the tensor of a canonical name."""
    return source_of(family, name).name_of(name)


def _num_heads(spec: DecoderSpec, name: str) -> int:
    parts = name.split(".")
    return num_heads_of(spec.layers[int(parts[1])]) if parts[0] == "layers" else 0


def digest_files(path: Path, digests: Digests, others: Sequence[Path] = ()) -> str:
    """Returns the SHA-256 of config.json, every checkpoint file and `others`, names included (hex)."""
    digest = hashlib.sha256()
    for file in (path / "config.json", *_files(path), *others):
        digest.update(file.name.encode() + b"\0" + bytes.fromhex(digests.of(file)))
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if not (path / _INDEX).exists():
        return [path / _SINGLE]
    placed = read_json(path / _INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{_INDEX} has no weight_map; download or copy it again")
    names = sorted({str(name) for name in placed.values()})
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{_INDEX} names a file outside the model directory; download or copy it again")
    return [path / name for name in names]


def read_headers(path: Path, family: Family) -> dict[str, TensorEntry]:
    """Returns what the files of a model directory hold, by the names of a whole model: a checkpoint of the bare decoder lacks
    the prefix.

    Raises:
        ModelError: there is no checkpoint, or it is damaged.
    """
    found: dict[str, TensorEntry] = {}
    for file in _files(path):
        for name, entry in read_header(file).items():
            if name in found:
                raise ModelError(f"tensor {name!r} is in two files of the checkpoint; download or copy it again")
            found[name] = entry
    found = keep_text_part(found, has_tower=family.vision is not None)
    if any(name.startswith(family.prefix) for name in found):
        return found
    head = family.tensors["head"].name
    return {name if name.startswith(head) else family.prefix + name: entry for name, entry in found.items()}


def _check_tied(head: TensorEntry | None, embedding: Stored) -> None:
    """A head may be stored beside the embedding that it is tied to, as long as the two are the same."""
    if head is None:
        return
    same_form = isinstance(embedding, TensorEntry) and (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same_form or not np.array_equal(head.read(), dequantized(embedding.read())):
        raise ModelError(
            "config.json ties the head to the embedding, but the checkpoint has a head of its own; set "
            "tie_word_embeddings to false if the head is meant",
            param="tie_word_embeddings",
        )


def _refuse_extra(found: Mapping[str, TensorEntry], family: Family) -> None:
    """The buffers of old exports may lie in a file unused; nothing else may."""
    for name in found:
        if not family.buffers.fullmatch(name):
            raise ModelError(f"the checkpoint has a tensor {name!r} that config.json has no place for")
