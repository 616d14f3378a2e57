"""How a vocabulary spells bytes: the byte alphabet of byte-level BPE, or SentencePiece's `▁` and `<0x0A>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cloister.types.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """Turns the text of a vocabulary entry into the bytes that it stands for.

    Attributes:
        num_leading_spaces: how many spaces at the very start of a text the tokenizer put there itself.
    """

    @property
    def num_leading_spaces(self) -> int: ...

    def to_bytes(self, token: str) -> bytes: ...

    def added_bytes(self, token: str) -> bytes:
        """Returns the bytes of an added token, which is spelled as it is written, save for SentencePiece's spaces."""
        ...


class ByteLevelSpelling:
    """GPT-2's alphabet: every byte is one printable character (Radford et al. 2019, section 2.2)."""

    num_leading_spaces = 0

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(0x100 + place): byte for place, byte in enumerate(others)}

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._bytes[char] for char in token])
        except KeyError:
            return token.encode()

    def added_bytes(self, token: str) -> bytes:
        return token.encode()


@dataclass(frozen=True, slots=True)
class SentencePieceSpelling:
    """Text with replacements, and byte tokens for what the vocabulary has no letters for (Kudo and Richardson 2018).

    Attributes:
        replacements: (written in the vocabulary, meant), such as ("▁", " ").
        byte_fallback: `<0x0A>` is a byte.
    """

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    num_leading_spaces: int

    def to_bytes(self, token: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self.added_bytes(token)

    def added_bytes(self, token: str) -> bytes:
        for written, meant in self.replacements:
            token = token.replace(written, meant)
        return token.encode()


def read_spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """Reads the `decoder` of tokenizer.json.

    Raises:
        ModelError: a decoder of a kind that no supported family uses.
    """
    steps = _flat(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelSpelling()
    unknown = sorted(set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    if unknown or not kinds:
        named = ", ".join(unknown) or "none"
        raise ModelError(f"tokenizer.json has a decoder that is not supported ({named}); use ByteLevel or SentencePiece")
    return SentencePieceSpelling(
        replacements=tuple(pair for step in steps for pair in _replacement(step)),
        byte_fallback="ByteFallback" in kinds,
        num_leading_spaces=sum(_stripped(step) for step in steps),
    )


def _flat(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat(part)]
    return [decoder]


def _replacement(step: Mapping[str, Any]) -> list[tuple[str, str]]:
    if step["type"] == "Metaspace":
        return [(step.get("replacement", "▁"), " ")]
    if step["type"] != "Replace":
        return []
    if "String" not in step["pattern"]:
        raise ModelError("tokenizer.json has a decoder that replaces by a pattern, which is not supported")
    return [(step["pattern"]["String"], step["content"])]


def _stripped(step: Mapping[str, Any]) -> int:
    if step["type"] == "Metaspace":
        return int(step.get("prepend_scheme", "always") != "never")
    return int(step.get("start", 0)) if step["type"] == "Strip" and step.get("content") == " " else 0
