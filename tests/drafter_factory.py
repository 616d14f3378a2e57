"""Everything that drafters need for a small model: drafts of it, heads, a layer behind its last, a datastore. None of it is
trained to be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from cloister.executor.drafters import DRAFTERS, Drafter, DrafterContext
from cloister.executor.drafters.datastore import write_datastore
from cloister.executor.drafters.heads import HeadsCard, heads_directory, write_heads
from cloister.models import load
from cloister.models.generation import digest_tokenizer
from tests.mtp_layers import add_layer
from tests.speculating import make_like

TREE: Final = [-1, -1, 0, 0, 1, 2, -1, 2]
"""What heads draft: parents as in `Draft.parents`."""
NUM_HEADS: Final = 4


def equip(path: Path, documents: Sequence[Sequence[int]], *, distance: float = 0.3) -> Path:
    """Writes what every drafter needs for a model beside it.

    Args:
        documents: token ids, for the datastore.
        distance: of the small models (`make_like`).
    """
    layers = load(path).mtp
    if layers is not None and not layers.tensors:
        add_layer(path)
    for number in range(2):
        make_like(path / "small" / str(number), path, distance, seed=10 + number)
    for kind in ("medusa", "blockwise"):
        _write_heads(path, kind, distance)
    num_ids = load(path).spec.vocab_size
    write_datastore(path / "drafters" / "rest", documents, num_ids=num_ids, tokenizer=digest_tokenizer(path))
    return path


def _write_heads(path: Path, kind: str, distance: float) -> None:
    model = load(path)
    hidden = model.spec.hidden_size
    rng = np.random.default_rng(len(kind))

    def noise(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) * np.float32(distance * hidden**-0.5)

    if kind == "medusa":
        tensors = {
            "blocks.0.up.weight": noise(NUM_HEADS, hidden, hidden), "blocks.0.up.bias": noise(NUM_HEADS, hidden),
            "blocks.0.down.weight": noise(NUM_HEADS, hidden, hidden),
        }  # fmt: skip
    else:
        tensors = {
            "up.weight": noise(2 * hidden, hidden), "up.bias": noise(2 * hidden),
            "down.weight": noise(NUM_HEADS, hidden, 2 * hidden), "down.bias": noise(NUM_HEADS, hidden),
        }  # fmt: skip
    card = HeadsCard(
        kind=kind,
        hidden_size=hidden,
        vocab_size=model.spec.vocab_size,
        num_heads=NUM_HEADS,
        fingerprint=model.info.fingerprint,
        parents=TREE if kind == "medusa" else [],
    )
    write_heads(heads_directory(path, kind), card, tensors)


FILES: Final = {"draft_model": "small/0", "long_spec": "small/1", "spec_infer": "small/0,small/1"}
"""What the settings would name for a drafter, below the model's directory."""


def drafter_maker(name: str, path: Path) -> Callable[[DrafterContext], Drafter]:
    """Returns what makes a drafter for an equipped model."""

    def make(context: DrafterContext) -> Drafter:
        files = ",".join(str(path / part) for part in FILES[name].split(",")) if name in FILES else None
        return DRAFTERS.get(name)(dataclasses.replace(context, files=files))

    return make
