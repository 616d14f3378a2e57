"""Calibrated 4-bit weights at load: the first start calibrates and caches, later ones read the cache.

Rounding to nearest costs small models a quarter of their perplexity in 4 bits, GPTQ a few per cent (docs/quantization.md).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from cloister.backends.base import Weights
from cloister.backends.tensors import Tensor
from cloister.launch.loading import Loading
from cloister.models import LoadedModel, load
from cloister.models.quantized.encoding import check_place, write_model
from cloister.quant import HeldWeights, NumberFormat, is_projection
from cloister.quant.calibration import CALIBRATORS, calibrate
from cloister.quant.forward import check_forward
from cloister.quant.passages import CALIBRATION, read_passages
from cloister.quant.quality import IntArray
from cloister.text import Tokenizer
from cloister.types.errors import CloisterError, ConfigError

WINDOW: Final = 512
"""Tokens in a window of text, for calibration and for measuring perplexity."""
VERSION: Final = 2
"""Increment it when calibration encodes the same weights differently."""
_FEWEST_TOKENS: Final = 4096
_MOST_TOKENS: Final = 8192
_TOKENS_BY_WEIGHTS: Final = 1_200_000_000_000
"""Target of tokens times projection weights, within the limits: small models lose most, and get more text."""
_MOST_WEIGHTS: Final = 600_000_000
"""Most projection weights for `auto`."""
_FOLDER: Final = "calibrated"

_logger = logging.getLogger(__name__)


def cut_windows(model: LoadedModel, text: str, num_tokens: int, tokenizer: Tokenizer | None = None) -> IntArray:
    """Returns windows [num_windows, length] of a text's tokens, `num_tokens` of them at most, spread evenly over the text.

    Raises:
        ConfigError: the text is too short for one.
    """
    length = min(WINDOW, model.spec.max_positions)
    ids = (tokenizer or Tokenizer(model.path)).encode(text, parse_special=False)
    count = min(len(ids), num_tokens) // length
    if not count:
        raise ConfigError(f"the text has {len(ids)} tokens; give one of at least {length}", param="text")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.array([ids[start : start + length] for start in starts], np.int32)


def choose_method(wanted: str, model: LoadedModel, number_format: NumberFormat) -> str:
    """Returns the calibration method for a model that is quantized on load.

    `auto` rounds to nearest, and logs it, if calibration is not possible or would take long. It also logs if there is nothing
    to quantize.

    Raises:
        ConfigError: the chosen method does not support this model.
    """
    num_weights = _count_weights(model)
    if not num_weights:
        _logger.warning(
            "%s is stored in few bits and its projections stay as they are; quant = %s changes embeddings and KV cache at most",
            model.info.name,
            number_format.name,
        )
    if wanted == "rtn" or not num_weights or (wanted == "auto" and not number_format.wants_calibration):
        return "rtn"
    try:
        check_forward(model.spec)
    except ConfigError as error:
        if wanted != "auto":
            raise ConfigError(f"quant_method {wanted}: {error.message}", param="quant_method") from None
        why = "text cannot be run through a model of its shape here"
    else:
        if wanted != "auto" or num_weights <= _MOST_WEIGHTS:
            return "gptq"
        why = f"it has {num_weights / 1e9:.1f} billion weights, and calibration would take long (quant_method = gptq does it)"
    _logger.warning(
        "%s in %s is rounded to nearest, which costs small models more than a quarter of their perplexity: %s; int8 loses next "
        "to nothing, and `cloister quantize` writes a calibrated checkpoint once",
        model.info.name,
        number_format.name,
        why,
    )
    return "rtn"


def _count_weights(model: LoadedModel) -> int:
    """Returns the number of projection weights that are not already quantized."""
    weights = model.weights
    return sum(prod(weights.shape(name)) for name in weights.names() if is_projection(name) and weights.form(name) is None)


def calibrate_on_load(
    model: LoadedModel,
    number_format: NumberFormat,
    tokenizer: Tokenizer | None = None,
    cache: Path | None = None,
    most_bytes: int = 64 << 30,
    loading: Loading | None = None,
) -> LoadedModel:
    """Returns the model with quantized weights, calibrated by GPTQ on shipped text.

    The fingerprint becomes that of the codes: another machine's arithmetic may give slightly different ones.

    Args:
        cache: cache directory for results; None, or a full disk, keeps them in memory only.
        most_bytes: size limit of the cache; the least recently used entries are removed.
        loading: reports progress in tensors.
    """
    num_tokens = min(max(_TOKENS_BY_WEIGHTS // _count_weights(model), _FEWEST_TOKENS), _MOST_TOKENS)
    windows = cut_windows(model, read_passages(CALIBRATION), num_tokens, tokenizer)
    options = [f"{field.name} {getattr(number_format.options, field.name)}" for field in fields(number_format.options)]
    parts = (model.info.fingerprint, number_format.name, *options, "gptq", str(VERSION))
    identity = hashlib.sha256("\0".join(parts).encode() + windows.tobytes()).hexdigest()[:32]
    place = None if cache is None else cache / _FOLDER / identity
    if place is not None and (found := _read(place, model)) is not None:
        return found
    found_codes = calibrate(model.spec, model.weights, windows, number_format, CALIBRATORS.get("gptq"))
    if loading is not None:
        found_codes = loading.track(found_codes, "choosing codes by text, once", len(model.weights.names()))
    tensors = dict(found_codes)
    if place is not None and _write(place, model, tensors, most_bytes) and (found := _read(place, model)) is not None:
        return found
    return _replace(model, HeldWeights(tensors), _digest(tensors))


def _read(place: Path, model: LoadedModel) -> LoadedModel | None:
    """Returns the model with cached weights; None if there are no usable ones."""
    if not (place / "config.json").is_file():
        return None
    try:
        found = load(place, model.info.name, place.parent.parent / "digests.json")
        with suppress(OSError):
            os.utime(place)
    except (CloisterError, OSError):
        return None
    same = set(found.weights.names()) == set(model.weights.names())
    return _replace(model, found.weights, found.info.fingerprint) if same else None


def _replace(model: LoadedModel, weights: Weights, fingerprint: str) -> LoadedModel:
    return replace(model, weights=weights, info=msgspec.structs.replace(model.info, fingerprint=fingerprint))


def _write(place: Path, model: LoadedModel, tensors: dict[str, Tensor], most_bytes: int) -> bool:
    """Caches the result as a model directory; returns False if there is no space or permission."""
    scratch = place.with_suffix(f".{os.getpid()}")
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_place(model.path, scratch)
        write_model(model.path, scratch, tensors.items(), "gptq on load")
        shutil.rmtree(place, ignore_errors=True)  # has an older layout, or is truncated
        scratch.replace(place)
        _make_room(place, most_bytes)
    except (OSError, CloisterError):
        return place.is_dir()  # another process was faster
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _make_room(newest: Path, most_bytes: int) -> None:
    """Removes the least recently used entries until the rest fits into `most_bytes`; keeps the newest."""
    others = [folder for folder in newest.parent.iterdir() if folder.is_dir() and folder != newest]
    room = most_bytes - _size(newest) - sum(map(_size, others))
    for folder in sorted(others, key=lambda folder: folder.stat().st_mtime_ns):
        if room >= 0:
            return
        room += _size(folder)
        shutil.rmtree(folder, ignore_errors=True)  # mapped files remain readable until they are closed


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _digest(tensors: dict[str, Tensor]) -> str:
    """Returns a SHA-256 (hex) of the content of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        parts = [tensor] if isinstance(tensor, np.ndarray) else [getattr(tensor, part.name) for part in fields(tensor)]
        for part in parts:
            digest.update(f"{name} {part.dtype} {part.shape}".encode() if isinstance(part, np.ndarray) else f"{part}".encode())
            digest.update(np.ascontiguousarray(part).view(np.uint8).data if isinstance(part, np.ndarray) else b"")
    return digest.hexdigest()
