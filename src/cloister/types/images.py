"""Images in a prompt, on their way from the front to the program that encodes them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import msgspec

MAX_REQUEST_PIXELS_BYTES: Final = 128 * 2**20
"""Pixels of all images of one request, as the model takes them: one message between front and engine."""
TOO_MANY_PIXELS: Final = f"the images of a request may take {MAX_REQUEST_PIXELS_BYTES >> 20} MiB of pixels; send fewer"
MAX_PIXELS_BYTES: Final = 2 * MAX_REQUEST_PIXELS_BYTES
"""Pixels of all requests that an engine has at once."""


class ImageTile(msgspec.Struct, frozen=True, kw_only=True):
    """An image, or a part of one, whose embeddings stand at some positions of a prompt.

    Attributes:
        offset, num_tokens: the positions [offset, offset + num_tokens).
        digest: SHA-256 of its pixels, by which prefix keys know it.
        pixels: RGB, one byte each, [height, width, 3] of the size that the model's tower takes.
        bidirectional: its positions see each other in the decoder, so one step computes all of them.
        grid: rows and columns in which its positions stand, for models whose images differ in size; `digest` covers them too.
    """

    offset: int
    num_tokens: int
    digest: bytes
    pixels: bytes
    bidirectional: bool = False
    grid: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """One past its last position."""
        return self.offset + self.num_tokens

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"ImageTile(num_tokens={self.num_tokens})"


def has_pillow() -> bool:
    """Whether images can be decoded here."""
    return find_spec("PIL") is not None
