"""Memory budget for the bodies of workers: one ceiling, part of which is reserved for smaller bodies.

A node must not distinguish clients. It sees only the length of a body, which honest clients pad to a few lengths
(`trust.sealing.messages`). So each length has a share that longer bodies cannot use: a few large bodies cannot block shorter
ones, and an attacker would need as many short bodies as fit.
"""

from __future__ import annotations

from typing import Final

WORKER_COPIES: Final = 12
"""Largest number of copies of its body that a worker holds: 46 MiB with 4 MB (sealed, opened, parsed, text, tokens)."""
WORKER_CEILING_BYTES: Final = 2**30
"""Ceiling for the bodies of all workers."""
SEAL_BYTES: Final = 4096
"""Upper bound of what sealing adds to a bucket; 1,204 bytes were measured with X-Wing."""
WORKER_FREE_BYTES: Final = 64 * 2**10 + SEAL_BYTES
"""A body of at most this size is not charged to the ceiling: a hundred of them take 80 MiB with their copies."""
LARGE_BUCKETS_BYTES: Final = tuple(4**n * 2**10 + SEAL_BYTES for n in (4, 5, 6))
"""256 KiB, 1 MiB and 4 MiB; a twelfth of the ceiling is reserved at each step for bodies that are not longer."""
_PARTS: Final = 12


class WorkerMemory:
    """Tracks the memory of all workers of one node for their bodies.

    Args:
        max_request_bytes: longest body; it always fits an idle node.
    """

    def __init__(self, max_request_bytes: int) -> None:
        self._ceiling_bytes = max(WORKER_CEILING_BYTES, 2 * WORKER_COPIES * max_request_bytes)
        self._held_bytes = 0

    def has_room(self, body_bytes: int) -> bool:
        """Whether another body of this length fits."""
        if body_bytes <= WORKER_FREE_BYTES:
            return True
        num_smaller = sum(body_bytes > bucket for bucket in LARGE_BUCKETS_BYTES)
        most_bytes = self._ceiling_bytes * (_PARTS - num_smaller) // _PARTS
        return self._held_bytes + WORKER_COPIES * body_bytes <= most_bytes

    def reserve(self, body_bytes: int) -> None:
        """Charges a body for the lifetime of its worker."""
        self._held_bytes += WORKER_COPIES * body_bytes

    def give_back(self, body_bytes: int) -> None:
        """Releases a charge."""
        self._held_bytes -= WORKER_COPIES * body_bytes
