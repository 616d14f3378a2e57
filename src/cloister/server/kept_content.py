"""Content that a server keeps and a request names: reading it counts as much as if the request had sent it.

The size of a body is known before it is parsed; the size of the content that it names is not. So a reading that finds much kept
content ends, and starts again once its size and its share of the memory for bodies include that content.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

LEAST_BYTES: Final = 16 * 2**10
"""Shorter content is read at once, which takes less time than starting again."""


class KeptContentPending(Exception):
    """A reading cannot continue until `num_bytes` of kept content are charged to it.

    Attributes:
        num_bytes: all kept content that it is known to read.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes


_charged: ContextVar[int | None] = ContextVar("bytes of kept content that this reading may read", default=None)


@contextmanager
def charged(num_bytes: int) -> Iterator[None]:
    """Lets readings inside the context, in other threads too, read this much kept content."""
    token = _charged.set(num_bytes)
    try:
        yield
    finally:
        _charged.reset(token)


def charge_kept(num_bytes: int) -> None:
    """Charges kept content to the reading that is about to read it.

    Raises:
        KeptContentPending: it is not charged yet.
    """
    limit = _charged.get()
    if limit is not None and num_bytes >= LEAST_BYTES and num_bytes > limit:
        raise KeptContentPending(num_bytes)
