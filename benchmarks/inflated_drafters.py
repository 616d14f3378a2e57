"""What was trained for a small model, for the same model in a large one's shape (`benchmarks.inflated`).

The last hidden state of the large model is the small one's and zeros behind it. Heads get zeros where they read and write one,
so they guess what they did; inside they stay as wide as they were trained. Draft models and datastores stay as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.harness import MODEL
from cloister.executor.drafters.draft_files import TRAINED
from cloister.executor.drafters.heads import CARD, TENSORS, read_card, write_heads
from cloister.models import load, locate
from cloister.models.safetensors import read_header

DRAFT_MODEL = "cloister-draft"
MARK = "inflated.txt"
"""Says in a directory that it is all made up."""
Array = npt.NDArray[Any]


def write_drafters(folder: Path, source: str = MODEL) -> None:
    """Puts drafters beside an inflated model; those that are there already are written anew.

    Raises:
        ValueError: the directory is no inflated model's, so what is trained there is not to be touched.
    """
    if not (folder / MARK).exists():
        raise ValueError(f"{folder} holds a model that was not inflated; name another directory")
    trained, found = locate(source) / "drafters", folder / "drafters"
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir()
    if source == MODEL:
        shutil.copytree(locate(DRAFT_MODEL), found / TRAINED)
    for place in sorted(trained.iterdir()) if trained.is_dir() else ():
        if (place / CARD).is_file():
            _write_wide_heads(place, found / place.name, folder)
        elif not (found / place.name).exists():
            shutil.copytree(place, found / place.name)


def _write_wide_heads(small: Path, large: Path, model_path: Path) -> None:
    model, card = load(model_path), read_card(small)
    ratio = model.spec.hidden_size // card.hidden_size
    tensors = {name: np.asarray(entry.read()) for name, entry in read_header(small / TENSORS).items()}
    card = msgspec.structs.replace(card, hidden_size=model.spec.hidden_size, fingerprint=model.info.fingerprint)
    write_heads(large, card, widen(tensors, ratio))


_HIDDEN_AXIS = {"up.weight": -1, "down.weight": -2, "down.bias": -1}
"""Ends of tensors' names -> where they are as wide as the hidden state."""


def widen(tensors: Mapping[str, Array], ratio: int) -> dict[str, Array]:
    """Returns heads for a hidden state `ratio` times as wide; what they have inside stays as wide as it was."""
    wide = {}
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        axis = next((axis for end, axis in _HIDDEN_AXIS.items() if name.endswith(end)), None)
        if axis is not None:
            shape[axis] *= ratio
        wide[name] = np.zeros(shape, tensor.dtype)
        wide[name][tuple(slice(0, size) for size in tensor.shape)] = tensor
    return wide
