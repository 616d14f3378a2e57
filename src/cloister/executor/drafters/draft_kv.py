"""What a small model's KV holds where it lies in blocks with the numbers of the served model's. Pure.

So prefix hits, forks, copies and wipes carry over by themselves: a block that is shared is shared with both, and one that is
wiped is wiped in both. What does not carry over is that both were computed: a prefix hit may bring a block whose KV the small
model never saw, and a step without drafts leaves it behind. Hence a count for each block.
"""

from __future__ import annotations

from collections.abc import Sequence

from cloister.backends.base import KVLayout


class DraftKV:
    """Counts, for each block, the leading positions with KV of tokens that are known to stand there.

    KV of drafts is written without being counted: it lies behind everything that is known, and counts once its tokens do.
    """

    def __init__(self, kv: KVLayout) -> None:
        self.block_size = kv.block_size
        self._filled = [0] * kv.num_blocks
        self._is_written = bytearray(kv.num_blocks)
        self._num_full: dict[int, int] = {}  # of a sequence: leading blocks that were found full

    def reach(self, seq_id: int, blocks: Sequence[int]) -> int:
        """Returns how many leading positions of a sequence have KV.

        What was found full is not looked at again: blocks of a running sequence are not wiped, and a full one is not written.
        """
        filled, size, full = self._filled, self.block_size, min(self._num_full.get(seq_id, 0), len(blocks))
        while full < len(blocks) and filled[blocks[full]] == size:
            full += 1
        self._num_full[seq_id] = full
        return full * size + (filled[blocks[full]] if full < len(blocks) else 0)

    def fill(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Counts positions [start, end): their KV is there, and so is that of all before them."""
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            block, count = blocks[number], min(size, end - number * size)
            if self._filled[block] < count:
                self._filled[block] = count
                self._is_written[block] = 1

    def touch(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Remembers that something is written into [start, end), known or drafted."""
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            self._is_written[blocks[number]] = 1

    def wipe(self, block_ids: Sequence[int]) -> list[int]:
        """Counts blocks as empty; returns those that something was written into."""
        written = [block for block in block_ids if self._is_written[block]]
        for block in written:
            self._filled[block] = self._is_written[block] = 0
        return written

    def copy(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Counts targets as their sources; returns the pairs whose source has something to copy."""
        for source, target in pairs:
            self._filled[target] = self._filled[source]
            self._is_written[target] |= self._is_written[source]
        return [pair for pair in pairs if self._is_written[pair[0]]]

    def forget(self, seq_id: int) -> None:
        """A sequence left; its blocks keep what they hold until they are wiped."""
        self._num_full.pop(seq_id, None)
