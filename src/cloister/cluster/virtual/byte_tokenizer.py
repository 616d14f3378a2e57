"""The tokenizer of virtual engines: one token for each byte."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers

from cloister.text import Tokenizer

EOS: Final = 256
VOCAB_SIZE: Final = 257
"""A token for each byte, and one that ends an answer."""


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer with a token for each byte, whose id is the byte, and `<eos>`; returns the folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Encoder(models.BPE({letter: _byte_of(letter) for letter in letters}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _byte_of(letter: str) -> int:
    """GPT-2's byte-level alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    if ord(letter) < 0x100:
        return ord(letter)
    others = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b <= 0xFF)]
    return others[ord(letter) - 0x100]


@cache
def open_tokenizer() -> Tokenizer:
    """Returns the tokenizer of all scenarios."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(write_byte_tokenizer(Path(folder)))
        tokenizer.encode("", parse_special=False)  # it reads its file for the first text, and grammars have it read some
        return tokenizer
