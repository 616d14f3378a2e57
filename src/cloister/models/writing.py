"""A quantised model as a directory that `load` opens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cloister.backends.tensors import Tensor
from cloister.models.checkpoint import source_of, stored_name
from cloister.models.config import read_json
from cloister.models.decoder import find_family
from cloister.models.quantized.encoding import Encoder
from cloister.models.safetensors import write_tensors
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_COPIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


def check_place(source: Path, out: Path) -> None:
    """Says whether a model can be written from `source` to `out`, before any work is done.

    Raises:
        ModelError: the source is no directory of a Hugging Face model, its family's matrices are stored in another order, or
            there is something in `out` already.
    """
    if not (source / "config.json").is_file():
        raise ModelError(f"{source} is not a model directory with a config.json; a GGUF file has its few bits already")
    family = find_family(read_json(source / "config.json"))
    if not all(_is_writable(place) for place in family.tensors.values()):
        raise ModelError(
            f"models of the family {family.name!r} store matrices fused or turned round, and are not written in few bits; give "
            "the unquantised model to `serve --quant` instead, which writes its weights in few bits while it loads them"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists already; name a directory that does not, or an empty one")


def write_model(source: Path, out: Path, tensors: Iterable[tuple[str, Tensor]], calibration: str) -> None:
    """Writes a model directory: tensors in compressed-tensors' layout, QoQ's in ours, and everything else from the source.

    Args:
        source: the directory that the tensors came from.
        tensors: (canonical name, tensor); taken one after another, and packed before the next is asked for.
        calibration: how the codes were found, for people who read the config.

    Raises:
        ModelError: as `check_place`.
    """
    check_place(source, out)
    config = read_json(source / "config.json")
    family, encoder = find_family(config), Encoder()
    for name, tensor in tensors:
        encoder.add(stored_name(family, name), _as_stored(tensor, source_of(family, name).added))
    config.pop("compression_config", None)
    config["quantization_config"] = encoder.describe(calibration)
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)
    write_tensors(out / "model.safetensors", encoder.parts)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")  # last: now it is a model


def _is_writable(place: Source) -> bool:
    return place == Source(place.name, added=place.added)


def _as_stored(tensor: Tensor, added: float) -> Tensor:
    """Takes away what reading adds."""
    return tensor.astype(np.float32) - np.float32(added) if added and isinstance(tensor, np.ndarray) else tensor
