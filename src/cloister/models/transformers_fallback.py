"""Models without a spec, which the transformers library runs: what the server needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from cloister.backends.base import Weights
from cloister.backends.factories import FOREIGN_FAMILY
from cloister.backends.spec import DecoderSpec
from cloister.models.families import FAMILIES
from cloister.models.sources import StoredWeights
from cloister.types.errors import ModelError
from cloister.types.extras import install_command

_SIZES: Final[Mapping[str, Sequence[str]]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_MOST_POSITIONS: Final = 4096  # where a config names none


class ForeignWeights(StoredWeights):
    """A model directory that only its own library reads: no tensor is known here.

    Attributes:
        path: of the directory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__({})
        self.path = path


def open_foreign(path: Path, config: Mapping[str, Any]) -> tuple[DecoderSpec, Weights]:
    """Returns what is known of a decoder: no layers that a back end could compute, and where its own library finds it.

    Raises:
        ModelError: transformers is not installed, or the config lacks the size of the vocabulary.
    """
    if find_spec("transformers") is None or find_spec("torch") is None:
        names = ", ".join(map(str, config.get("architectures") or [])) or "none"
        raise ModelError(
            f"config.json names the architecture {names}; supported are: {', '.join(FAMILIES)}. Others run through "
            f"transformers, slowly: {install_command('fallback')}",
            param="architectures",
        )
    vocab_size = _size(config, ("vocab_size",))
    if vocab_size is None:
        raise ModelError("config.json has no 'vocab_size'; the model directory is not complete", param="vocab_size")
    spec = DecoderSpec(
        family=FOREIGN_FAMILY,
        vocab_size=vocab_size,
        hidden_size=_size(config, _SIZES["hidden_size"]) or 0,
        layers=(),
        norm_eps=0.0,
        max_positions=_size(config, _SIZES["max_positions"]) or _MOST_POSITIONS,
    )
    return spec, ForeignWeights(path)


def _size(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((value for name in names if type(value := config.get(name)) is int and value > 0), None)
