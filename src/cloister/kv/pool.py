"""KV blocks with reference counts (vLLM, Kwon et al. 2023, section 4). Pure bookkeeping: a block is a number.

Every block is free, used or cached: free + used + cached = total (rule 4). A block that leaves used or cached for free is
listed for wiping, and the runner wipes before it copies or writes, so nobody ever reads what another one left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

_KEPT, _PROTECTED = 1, 2

EvictOne = Callable[[], int | None]


class OutOfBlocksError(Exception):
    """Neither free nor evictable blocks are enough; the caller preempts somebody or waits."""


class BlockPool:
    """All KV blocks of one engine.

    Args:
        num_blocks: blocks in the pool, numbered from 0.
        block_size: positions in one block, 1 to 256.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or not 1 <= block_size <= 256:
            raise ValueError("a pool needs at least one block, of 1 to 256 positions")
        self.num_total = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._num_cached = 0
        self._num_protected = 0
        self._wipes: list[int] = []
        self._evict_one: EvictOne = lambda: None
        self._on_unused: Callable[[int], None] = lambda block: None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses but the prefix tree keeps."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_total - len(self._free) - self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may hope for: free ones, and cached ones that are not protected."""
        return len(self._free) + self._num_cached - self._num_protected

    def attach(self, evict_one: EvictOne, on_unused: Callable[[int], None]) -> None:
        """Connects the prefix tree: how to evict one cached block, and what to call when a kept block becomes unused."""
        self._evict_one = evict_one
        self._on_unused = on_unused

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks with one reference each, evicting cached ones if need be.

        Raises:
            OutOfBlocksError: there are not enough; nothing was taken.
        """
        if count > self.num_available:
            raise OutOfBlocksError
        while len(self._free) < count:
            if self._evict_one() is None:
                raise OutOfBlocksError
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to used or cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                if not self._kept[block]:
                    raise ValueError(f"block {block} is free and cannot be shared")
                self._count_cached(block, -1)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one reference from each block; an unused one becomes cached if the tree keeps it, else free."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} was released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._kept[block]:
                    self._count_cached(block, 1)
                    self._on_unused(block)
                else:
                    self._free_and_wipe(block)

    def keep(self, block: int, *, is_protected: bool = False) -> None:
        """The prefix tree holds on to a used block: it becomes cached, not free, when nobody uses it.

        Args:
            is_protected: no allocation counts on it, as the tree does not evict it for others.
        """
        if self._references[block] == 0 or self._kept[block]:
            raise ValueError(f"block {block} cannot be kept: it is not in use, or kept already")
        self._kept[block] = _PROTECTED if is_protected else _KEPT

    def drop(self, block: int) -> None:
        """The prefix tree lets a block go; a cached one becomes free."""
        if not self._kept[block]:
            raise ValueError(f"block {block} is not kept")
        if self._references[block] == 0:
            self._count_cached(block, -1)
        self._kept[block] = 0
        if self._references[block] == 0:
            self._free_and_wipe(block)

    def is_shared(self, block: int) -> bool:
        """True if writing the block would change what somebody else reads."""
        return self._references[block] > 1 or bool(self._kept[block])

    def references(self, block: int) -> int:
        return self._references[block]

    def is_free(self, block: int) -> bool:
        """True if nobody uses the block and the prefix tree does not keep it."""
        return not (self._references[block] or self._kept[block])

    def take_wipes(self) -> list[int]:
        """Returns blocks freed since the last call; the next step wipes them before anything else."""
        wipes, self._wipes = self._wipes, []
        return wipes

    def wipe_again(self, blocks: Iterable[int]) -> None:
        """Lists blocks of a step that was not done; those in use by now are wiped when they become free."""
        self._wipes.extend(block for block in blocks if self.is_free(block))

    def check(self) -> None:
        """Raises AssertionError unless every block is in exactly one state and none is free twice."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        cached = sum(1 for b in range(self.num_total) if self._kept[b] and not self._references[b])
        used = sum(1 for count in self._references if count)
        assert all(not self._references[b] and not self._kept[b] for b in free), "a free block is in use"
        assert cached == self._num_cached, "the count of cached blocks is off"
        protected = sum(1 for b in range(self.num_total) if self._kept[b] == _PROTECTED and not self._references[b])
        assert protected == self._num_protected, "the count of protected blocks is off"
        assert len(free) + used + cached == self.num_total, "a block leaked"

    def _count_cached(self, block: int, change: int) -> None:
        self._num_cached += change
        if self._kept[block] == _PROTECTED:
            self._num_protected += change

    def _free_and_wipe(self, block: int) -> None:
        self._free.appendleft(block)  # the one used last is taken first: memory that nobody touched yet stays untouched
        self._wipes.append(block)
