"""A checkpoint as `Weights`: the tensors of one or many safetensors files under canonical names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import QuantizedTensor, Tensor, dequantized
from cloister.models.config import read_json
from cloister.models.decoder import tensor_shapes
from cloister.models.digest import Digests
from cloister.models.family import Family
from cloister.models.quantized import Scheme, Stored
from cloister.models.safetensors import FLOATS, TensorEntry, read_header
from cloister.types.errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OLD_ROPE_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class Checkpoint:
    """Weights on disk (protocol `backends.base.Weights`); nothing is in memory before it is read."""

    def __init__(self, entries: Mapping[str, Stored]) -> None:
        self._entries = dict(entries)

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def form(self, name: str) -> QuantizedTensor | None:
        return self._entries[name].form()

    def read(self, name: str) -> Tensor:
        return self._entries[name].read()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, entry.read()) for name, entry in self._entries.items())


def open_checkpoint(path: Path, family: Family, spec: DecoderSpec, scheme: Scheme | None = None) -> Checkpoint:
    """Maps the checkpoint in a model directory.

    Args:
        scheme: how matrices that are not plain are stored.

    Raises:
        ModelError: there is none, or a tensor is missing, is one too many, or has another shape than the config says.
    """
    found = _read_headers(path)
    entries: dict[str, Stored] = {}
    for name, shape in tensor_shapes(spec):
        entries[name] = _take(stored_name(family, name), shape, found, scheme)
    if spec.tied_embeddings:
        _check_tied(found.pop(f"{family.tensors['head']}.weight", None), entries["embed.weight"])
    _refuse_extra(found)
    return Checkpoint(entries)


def _take(stored: str, shape: tuple[int, ...], found: dict[str, TensorEntry], scheme: Scheme | None) -> Stored:
    """Takes one tensor, or the parts of one, out of what the files hold."""
    if scheme is not None and len(shape) == 2:
        matrix = scheme.take(stored.removesuffix(".weight"), (shape[0], shape[1]), found)
        if matrix is not None:
            return matrix
    if stored not in found:
        raise ModelError(f"the checkpoint lacks the tensor {stored!r} that config.json asks for")
    entry = found.pop(stored)
    if entry.dtype not in FLOATS:
        raise ModelError(f"tensor {stored!r} has the type {entry.dtype}; supported are: {', '.join(FLOATS)}")
    if entry.shape != shape:
        raise ModelError(f"tensor {stored!r} has the shape {entry.shape}, config.json asks for {shape}")
    return entry


def stored_name(family: Family, name: str) -> str:
    """Returns a family's name in the checkpoint for a canonical one."""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"{family.tensors[parts[2]].format(parts[1])}.{parts[3]}"
    return f"{family.tensors[parts[0]]}.{parts[1]}"


def digest_files(path: Path, digests: Digests) -> str:
    """Returns the SHA-256 of config.json and every checkpoint file, names included (hex)."""
    digest = hashlib.sha256()
    for file in (path / "config.json", *_files(path)):
        digest.update(file.name.encode() + b"\0" + bytes.fromhex(digests.of(file)))
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if not (path / _INDEX).exists():
        return [path / _SINGLE]
    placed = read_json(path / _INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{_INDEX} has no weight_map; download it again")
    names = sorted({str(name) for name in placed.values()})
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{_INDEX} names a file outside the model directory; download it again")
    return [path / name for name in names]


def _read_headers(path: Path) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for file in _files(path):
        for name, entry in read_header(file).items():
            if name in found:
                raise ModelError(f"tensor {name!r} is in two files of the checkpoint; download it again")
            found[name] = entry
    return found


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


def _refuse_extra(found: Mapping[str, TensorEntry]) -> None:
    """The rotary buffers of old exports may lie in a file unused; nothing else may."""
    for name in found:
        if not _OLD_ROPE_BUFFER.fullmatch(name):
            raise ModelError(f"the checkpoint has a tensor {name!r} that config.json has no place for")
