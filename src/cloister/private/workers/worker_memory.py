"""Memory that workers may have for their bodies: one ceiling, of which larger bodies leave a part to smaller ones.

A node cannot tell clients apart, and must not. It sees how long a body is, which honest clients pad to a few lengths
(`trust.sealing.messages`). So each of these has room that longer bodies do not get: a few large bodies keep no shorter ones
out, and whoever would needs as many short ones as fit there.
"""

from __future__ import annotations

from typing import Final

WORKER_COPIES: Final = 12
"""How many times its body a worker has in memory at most: 46 MiB with 4 MB (sealed, opened, parsed, text, tokens)."""
WORKER_CEILING_BYTES: Final = 2**30
"""For what all workers have of their bodies."""
SEAL_BYTES: Final = 4096
"""What sealing adds to a bucket at most; 1,204 bytes were measured with X-Wing."""
WORKER_FREE_BYTES: Final = 64 * 2**10 + SEAL_BYTES
"""A body of so much or less needs no room below that ceiling: a hundred of them are 80 MiB with their copies."""
LARGE_BUCKETS_BYTES: Final = tuple(4**n * 2**10 + SEAL_BYTES for n in (4, 5, 6))
"""256 KiB, 1 MiB and 4 MiB; each keeps a twelfth of the ceiling from bodies that are longer."""
_PARTS: Final = 12


class WorkerMemory:
    """What the workers of one node have of their bodies.

    Args:
        max_request_bytes: longest body; it always fits a node without others.
    """

    def __init__(self, max_request_bytes: int) -> None:
        self._ceiling_bytes = max(WORKER_CEILING_BYTES, 2 * WORKER_COPIES * max_request_bytes)
        self._held_bytes = 0

    def has_room(self, body_bytes: int) -> bool:
        """Whether one more body of this length fits."""
        if body_bytes <= WORKER_FREE_BYTES:
            return True
        num_smaller = sum(body_bytes > bucket for bucket in LARGE_BUCKETS_BYTES)
        most_bytes = self._ceiling_bytes * (_PARTS - num_smaller) // _PARTS
        return self._held_bytes + WORKER_COPIES * body_bytes <= most_bytes

    def reserve(self, body_bytes: int) -> None:
        """Charges a body for as long as its worker lives."""
        self._held_bytes += WORKER_COPIES * body_bytes

    def give_back(self, body_bytes: int) -> None:
        """Takes a charge back."""
        self._held_bytes -= WORKER_COPIES * body_bytes
