"""The block table of one sequence: grows with it, shared by forks, copied on write. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.kv.pool import BlockPool


class BlockTable:
    """Blocks of one sequence in the order of its positions.

    Attributes:
        blocks: block ids; position p lives in blocks[p // block_size].
        num_sent: how many leading entries the runner knows already.
    """

    __slots__ = ("_pool", "blocks", "num_sent")

    def __init__(self, pool: BlockPool, blocks: Sequence[int] = ()) -> None:
        self._pool = pool
        self.blocks = list(blocks)
        self.num_sent = 0

    def num_missing(self, num_positions: int) -> int:
        """Blocks to allocate before `num_positions` fit, copies on write aside."""
        return max(0, -(-num_positions // self._pool.block_size) - len(self.blocks))

    def is_writable(self, start: int, end: int) -> bool:
        """Whether positions [start, end) lie in one block that is there and that nobody else reads: nearly every decode."""
        size = self._pool.block_size
        first = start // size
        return end <= min(first + 1, len(self.blocks)) * size and not self._pool.is_shared(self.blocks[first])

    def grow(self, start: int, end: int) -> list[tuple[int, int]]:
        """Makes positions [start, end) writable and returns the block copies (source, target) that this takes.

        The caller releases the sources to the pool once the plan that copies them has taken its wipes: released
        earlier, a source could be wiped before it is read.

        Raises:
            OutOfBlocksError: the pool has too few blocks; the table is as before.
        """
        if self.is_writable(start, end):
            return []
        pool, size = self._pool, self._pool.block_size
        first = start // size
        shared = [i for i in range(first, min(len(self.blocks), -(-end // size))) if pool.is_shared(self.blocks[i])]
        missing = self.num_missing(end)
        if not shared and not missing:
            return []
        fresh = pool.allocate(len(shared) + missing)
        copies = []
        for i, block in zip(shared, fresh, strict=False):
            copies.append((self.blocks[i], block))
            self.blocks[i] = block
        self.blocks.extend(fresh[len(shared) :])
        if copies:
            self.num_sent = min(self.num_sent, shared[0])
        return copies

    def shrink(self, num_positions: int) -> None:
        """Gives back the blocks behind the first `num_positions` positions; the last of these are its own to write."""
        num_blocks = -(-num_positions // self._pool.block_size)
        if num_blocks < len(self.blocks):
            self._pool.release(reversed(self.blocks[num_blocks:]))
            del self.blocks[num_blocks:]
            self.num_sent = min(self.num_sent, num_blocks)

    def take_unsent(self) -> tuple[int, list[int]]:
        """Returns (index, block ids from there on) that the runner does not know yet, and counts them as sent."""
        start = self.num_sent
        self.num_sent = len(self.blocks)
        return start, self.blocks[start:]

    def fork(self) -> BlockTable:
        """Returns a table that shares every block with this one."""
        self._pool.share(self.blocks)
        child = BlockTable(self._pool, self.blocks)
        child.num_sent = self.num_sent
        return child

    def close(self) -> None:
        """Gives every block back, last one first, so that the prefix tree gets leaves before their parents."""
        self._pool.release(reversed(self.blocks))
        self.blocks = []
        self.num_sent = 0
