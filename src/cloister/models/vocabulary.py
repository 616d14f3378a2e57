"""Which tokenizer a model has, told by its files: token ids of one mean nothing to another."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFArray, read_gguf

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
