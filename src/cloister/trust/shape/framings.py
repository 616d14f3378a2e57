"""The framings of a shaped answer: our own, or binary HTTP for any RFC 9292 reader. Pure."""

from __future__ import annotations

from typing import Final

FRAMES: Final = "frames"
"""A head in each frame, as in `frames`: what clients get that ask for nothing."""
BINARY_HTTP: Final = "binary-http"
"""Frames that are, one after the other, one Binary HTTP message, as in `binary_http`."""
FRAMINGS: Final = (FRAMES, BINARY_HTTP)
FRAMING_FIELD: Final = b"cloister-framing"
"""Field of the sealed request by which a client asks for one."""
