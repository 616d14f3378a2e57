"""Recognises bodies that are read faster than a thread starts: short ones that ask for text and nothing else."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_BYTES: Final = 2048
"""Size limit of a plain body; reading one of text takes 0.1 to 0.7 ms."""


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _PlainBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fields whose values are quick to read. All others, such as schemas, tools, images and documents, may take longer than
    their length suggests."""

    messages: list[_PlainMessage] = []
    prompt: str = ""
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    user: str | None = None


_decode: Final = msgspec.json.Decoder(_PlainBody).decode


def is_plain(raw: bytes) -> bool:
    """Whether a body is short and has plain fields only. Its parser reports any mistake in it."""
    if len(raw) > MAX_BYTES:
        return False
    try:
        _decode(raw)
    except (msgspec.MsgspecError, UnicodeError):
        return False
    return True
