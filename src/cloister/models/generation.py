"""generation_config.json: end-of-sequence tokens and default sampling parameters; and which tokenizer a model has."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cloister.models.config import read_json
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFArray, read_gguf

GENERATION_FILE = "generation_config.json"
DEFAULT_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation(path: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, ...], dict[str, float]]:
    """Returns (EOS ids of generation_config.json and config.json together, sampling defaults).

    `do_sample: false` is a default temperature of 0. The file may be absent.

    Raises:
        ModelError: a value has the wrong type, or an id lies outside the vocabulary.
    """
    file = path / GENERATION_FILE
    settings = read_json(file) if file.exists() else {}
    ids = dict.fromkeys([*_token_ids(settings, vocab_size), *_token_ids(config, vocab_size)])
    defaults = {name: _number(name, settings[name]) for name in DEFAULT_NAMES if settings.get(name) is not None}
    if settings.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return tuple(ids), defaults


def _token_ids(settings: Mapping[str, Any], vocab_size: int) -> list[int]:
    value = settings.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ModelError("eos_token_id must be a token id below vocab_size, or a list of them", param="eos_token_id")
    return ids


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ModelError(f"{name!r} in generation_config.json must be a finite number", param=name)
    return float(value)


# Identifies a model's tokenizer by its files: token ids of one mean nothing to another.


_FILES: Final = ("tokenizer.json", "tokenizer.model")
_KEYS: Final = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")
"""What decides in a GGUF file which ids a text has."""


def digest_tokenizer(path: Path) -> str:
    """Returns the SHA-256 (hex) of what a model's tokenizer is made of. Copies of a model with other weights have the same.

    Args:
        path: a model directory, or a GGUF file.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    if path.is_file():
        return _digest_gguf(path)
    for name in _FILES:
        try:
            return hashlib.sha256((path / name).read_bytes()).hexdigest()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"{name} cannot be read ({type(error).__name__}); download the model again") from None
    raise ModelError(f"{path} has neither {' nor '.join(_FILES)}; download one of them and put it there")


def _digest_gguf(path: Path) -> str:
    digest, metadata = hashlib.sha256(), read_gguf(path).metadata
    for key in _KEYS:
        value = metadata.get(key)
        content = value.raw if isinstance(value, GGUFArray) else repr(value).encode()
        digest.update(f"{key} {len(content)} ".encode() + content)
    return digest.hexdigest()
