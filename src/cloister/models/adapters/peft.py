"""LoRA adapters (Hu et al. 2021) as PEFT saves them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from cloister.backends.adapters import AdapterWeights
from cloister.backends.base import FloatArray
from cloister.backends.spec import DecoderSpec
from cloister.models.adapters.settings import AdapterSettings, read_settings
from cloister.models.adapters.targets import AdapterTarget, find_targets
from cloister.models.safetensors import FLOATS, TensorEntry, read_header
from cloister.types.errors import ModelError

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_NAME: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, read into memory.

    Attributes:
        digest: SHA-256 of the updates (hex): what prefix keys and requests know it by, whatever name it has.
    """

    weights: AdapterWeights
    digest: str


def read_adapter(path: Path, spec: DecoderSpec, *, max_rank: int) -> Adapter:
    """Reads an adapter's directory.

    Args:
        spec: of the model that it shall change.
        max_rank: memory is there for adapters up to it.

    Raises:
        ModelError: something is missing, damaged or not supported, or does not fit the model; the message names it.
    """
    settings = read_settings(path)
    if settings.rank > max_rank:
        raise ModelError(
            f"the adapter has the rank {settings.rank}, and there is room for {max_rank}; raise --max-lora-rank",
            param="max_lora_rank",
        )
    entries, targets = _entries(path), find_targets(spec)
    updates: dict[str, tuple[FloatArray, FloatArray]] = {}
    for module in sorted({module for module, _ in entries}):
        for target in _targets_of(module, targets):
            updates[target.product] = _update(module, target, entries, settings)
    if not updates:
        raise ModelError(f"{WEIGHTS_FILE} has no low-rank update; save the adapter again")
    return Adapter(AdapterWeights(updates), _digest(updates))


def read_rank(path: Path) -> int:
    """Returns an adapter's rank (`read_settings` says what is raised)."""
    return read_settings(path).rank


def _entries(path: Path) -> Mapping[tuple[str, str], TensorEntry]:
    """Returns the tensors by (module in the checkpoint, "A" or "B")."""
    if not (path / WEIGHTS_FILE).is_file():
        raise ModelError(f"the adapter's directory has no {WEIGHTS_FILE}; save the adapter in the safetensors format")
    found = {}
    for name, entry in read_header(path / WEIGHTS_FILE).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"the adapter has a tensor {name!r}, which is no low-rank update; only plain LoRA is supported")
        if entry.dtype not in FLOATS:
            raise ModelError(f"the adapter's tensor {name!r} has the type {entry.dtype}; supported are: {', '.join(FLOATS)}")
        found[match["module"], match["side"]] = entry
    return found


def _targets_of(module: str, targets: Mapping[str, tuple[AdapterTarget, ...]]) -> tuple[AdapterTarget, ...]:
    if module not in targets:
        raise ModelError(
            f"the adapter changes {module!r}, which is none of the model's products that an adapter may change (q, k, v, o "
            "and the feed-forward of its layers)",
            param="target_modules",
        )
    return targets[module]


def _update(
    module: str, target: AdapterTarget, entries: Mapping[tuple[str, str], TensorEntry], settings: AdapterSettings
) -> tuple[FloatArray, FloatArray]:
    """Returns A and B of one product, the scale in B."""
    sides = [entries.get((module, side)) for side in "AB"]
    shapes = [None if side is None else side.shape for side in sides]
    wanted = [(settings.rank, target.inputs), (target.stored_outputs, settings.rank)]
    if shapes != wanted:
        raise ModelError(f"the adapter's tensors for {module!r} have the shapes {shapes}, the model asks for {wanted}")
    a, b = (np.ascontiguousarray(side.read(), np.float32) for side in sides if side is not None)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ModelError(f"the adapter's tensors for {module!r} have values that are not finite numbers; train it again")
    return a, np.ascontiguousarray(target.rows_of(b)) * np.float32(settings.scale)


def _digest(updates: Mapping[str, tuple[FloatArray, FloatArray]]) -> str:
    digest = hashlib.sha256(b"cloister/adapter/1\0")
    for product, pair in sorted(updates.items()):
        for matrix in pair:
            digest.update(f"{product} {matrix.shape}\0".encode() + matrix.tobytes())
    return digest.hexdigest()
