"""Lengths of requests in buckets of 4^n KiB, so that a length tells little. Pure."""

from __future__ import annotations

from typing import Final

from cloister.types.errors import RequestTooLargeError

SMALLEST_BUCKET_BYTES: Final = 1024
LARGEST_BUCKET_BYTES: Final = SMALLEST_BUCKET_BYTES * 4**7
"""16 MiB."""


def bucket_bytes(num_bytes: int) -> int:
    """Returns the length of the smallest bucket that holds `num_bytes`: 1, 4, 16, 64, 256 KiB, 1, 4 or 16 MiB.

    Raises:
        RequestTooLargeError: there is none.
    """
    bucket = SMALLEST_BUCKET_BYTES
    while bucket < num_bytes:
        bucket *= 4
    if bucket > LARGEST_BUCKET_BYTES:
        raise RequestTooLargeError(f"A sealed request holds {LARGEST_BUCKET_BYTES // 2**20} MiB; make it shorter.")
    return bucket
