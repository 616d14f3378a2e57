"""KV blocks with reference counts (vLLM, Kwon et al. 2023, section 4). Pure bookkeeping: a block is a number.

Every block is free, used or cached: free + used + cached = total. A block that becomes free is listed for wiping. The runner
wipes before it copies or writes, so residue of another sequence is never read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_KEPT, _PROTECTED = 1, 2
NO_BLOCK: Final = -1
"""Placeholder in a block table: no query sees these positions any more."""

EvictOne = Callable[[int], int | None]


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of layers that share block tables (decisions/0018).

    Attributes:
        num_blocks: number of blocks in the group.
        window: positions that a query of these layers sees, including its own; None: all up to its own.
        max_held: most blocks that one sequence holds at once; None: one for each `block_size` positions.
        is_state: a block holds the whole state of the layers at one position, not KV of `block_size` positions.
    """

    num_blocks: int
    window: int | None = None
    max_held: int | None = None
    is_state: bool = False

    @classmethod
    def of_state(cls, num_blocks: int) -> BlockGroup:
        """Returns the group of layers with a recurrent state: a token reads what the one before it left.

        A sequence holds its running state, and for one step the state that this is a copy of.
        """
        return cls(num_blocks, window=2, max_held=2, is_state=True)


class OutOfBlocksError(Exception):
    """Free and evictable blocks do not suffice; the caller preempts a sequence or waits."""


class BlockPool:
    """All KV blocks of one engine.

    Args:
        groups: blocks of each group, numbered consecutively from 0 across groups; an int means one group without a window.
        block_size: positions in one block, 1 to 256.

    Attributes:
        state_group: number of the group whose blocks hold states; None where there is none.
    """

    def __init__(self, groups: int | Sequence[BlockGroup], block_size: int) -> None:
        self.groups = (BlockGroup(groups),) if isinstance(groups, int) else tuple(groups)
        if any(group.num_blocks < 1 for group in self.groups) or not self.groups or not 1 <= block_size <= 256:
            raise ValueError("a pool needs at least one block in each group, of 1 to 256 positions")
        if sum(group.is_state for group in self.groups) > 1:
            raise ValueError("layers with a state are one group")
        self._ends = list(accumulate(group.num_blocks for group in self.groups))
        self.num_groups = len(self.groups)
        self.state_group = next((number for number, group in enumerate(self.groups) if group.is_state), None)
        self.num_total = self._ends[-1]
        self.block_size = block_size
        self._free = [deque(range(end - group.num_blocks, end)) for group, end in zip(self.groups, self._ends, strict=True)]
        self._references = [0] * self.num_total
        self._kept = bytearray(self.num_total)
        self._num_cached = [0] * self.num_groups
        self._num_protected = [0] * self.num_groups
        self._wipes: list[int] = []
        self._evict_one: EvictOne = lambda group: None
        self._on_unused: Callable[[int], None] = lambda block: None

    @property
    def has_full_attention_only(self) -> bool:
        """Whether every layer sees all positions: no group has a window or states."""
        return self.num_groups == 1 and self.groups[0].window is None and not self.groups[0].is_state

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    @property
    def num_cached(self) -> int:
        """Unused blocks that the prefix cache keeps."""
        return sum(self._num_cached)

    @property
    def num_used(self) -> int:
        return self.num_total - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks available for allocation in every group that has a block for each entry of a block table."""
        if self.num_groups == 1 and self.state_group is None:
            return self.count_available(0)
        counts = [self.count_available(number) for number, group in enumerate(self.groups) if not group.is_state]
        return min(counts, default=2**62)  # a model of states alone takes none for positions

    def count_available(self, group: int) -> int:
        """Returns the number of blocks of a group available for allocation: free ones, and cached ones that are not
        protected."""
        return len(self._free[group]) + self._num_cached[group] - self._num_protected[group]

    def group_of(self, block: int) -> int:
        """Returns the group that a block belongs to."""
        return 0 if self.num_groups == 1 else bisect_right(self._ends, block)

    def max_blocks(self, group: int, num_entries: int, width: int = 1) -> int:
        """Returns the maximum blocks of a group that a sequence of `num_entries` table entries holds at once.

        Args:
            width: number of sequences that share only the blocks of the prompt.
        """
        window, most = self.groups[group].window, self.groups[group].max_held
        if window is None or most is None:
            return width * num_entries
        return min(width * num_entries, max(most, width * (-(-window // self.block_size) + 1)))

    def has_room(self, num_missing: Iterable[int], num_spare: int, promised: Sequence[int] = ()) -> bool:
        """Whether each sequence can grow by the given number of table entries with `num_spare` blocks left in every group.

        Of states one spare block for each sequence will do: none needs another for every entry that it grows by.

        Args:
            promised: blocks of each group that are needed beside those.
        """
        if self.num_groups == 1 and self.groups[0].max_held is None:
            return self.count_available(0) >= sum(num_missing) + num_spare + sum(promised)
        missing = list(num_missing)
        return all(
            self.count_available(number)
            >= sum(missing if group.max_held is None else (min(each, group.max_held) for each in missing))
            + (min(num_spare, len(missing)) if group.is_state else num_spare)
            + (promised[number] if promised else 0)
            for number, group in enumerate(self.groups)
        )

    def attach(self, evict_one: EvictOne, on_unused: Callable[[int], None]) -> None:
        """Connects the prefix cache through callbacks: one evicts a cached block of a group, one is called when a kept block
        becomes unused."""
        self._evict_one = evict_one
        self._on_unused = on_unused

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Returns `count` blocks of a group with one reference each, evicting cached ones if needed.

        Raises:
            OutOfBlocksError: there are not enough; nothing was taken.
        """
        free = self._free[group]
        if count > len(free) and count > self.count_available(group):
            raise OutOfBlocksError
        while len(free) < count:
            if self._evict_one(group) is None:
                raise OutOfBlocksError
        blocks = [free.popleft() for _ in range(count)]
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
        """Drops one reference of each block; an unused block becomes cached if the prefix cache keeps it, else free."""
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
        """Marks a used block as kept by the prefix cache: it becomes cached instead of free once unused.

        Args:
            is_protected: not available for allocation, because the cache does not evict it for other scopes.
        """
        if self._references[block] == 0 or self._kept[block]:
            raise ValueError(f"block {block} cannot be kept: it is not in use, or kept already")
        self._kept[block] = _PROTECTED if is_protected else _KEPT

    def drop(self, block: int) -> None:
        """Marks a block as no longer kept by the prefix cache; a cached one becomes free."""
        if not self._kept[block]:
            raise ValueError(f"block {block} is not kept")
        if self._references[block] == 0:
            self._count_cached(block, -1)
        self._kept[block] = 0
        if self._references[block] == 0:
            self._free_and_wipe(block)

    def is_shared(self, block: int) -> bool:
        """True if another user or the prefix cache reads the block, so that it must be copied before a write."""
        return self._references[block] > 1 or bool(self._kept[block])

    def is_kept(self, block: int) -> bool:
        """True if the prefix cache keeps the block."""
        return bool(self._kept[block])

    def references(self, block: int) -> int:
        return self._references[block]

    def is_free(self, block: int) -> bool:
        """True if the block is unused and the prefix cache does not keep it."""
        return not (self._references[block] or self._kept[block])

    def take_wipes(self) -> list[int]:
        """Returns blocks freed since the last call; the next step wipes them before anything else."""
        wipes, self._wipes = self._wipes, []
        return wipes

    def wipe_again(self, blocks: Iterable[int]) -> None:
        """Lists the blocks of a failed step for wiping again; those in use by now are wiped when they become free."""
        self._wipes.extend(block for block in blocks if self.is_free(block))

    def check(self) -> None:
        """Raises AssertionError unless every block is in exactly one state and none is free twice, in every group."""
        for number, (group, end) in enumerate(zip(self.groups, self._ends, strict=True)):
            first, free = end - group.num_blocks, set(self._free[number])
            assert len(free) == len(self._free[number]), "a block is free twice"
            assert not free or (min(free) >= first and max(free) < end), "a block is free in another group"
            references, kept = self._references[first:end], self._kept[first:end]
            unused = [state for state, count in zip(kept, references, strict=True) if not count]
            cached, used = len(unused) - unused.count(0), len(references) - len(unused)
            assert not any(references[block - first] or kept[block - first] for block in free), "a free block is in use"
            assert cached == self._num_cached[number], "the count of cached blocks is off"
            assert unused.count(_PROTECTED) == self._num_protected[number], "the count of protected blocks is off"
            assert len(free) + used + cached == group.num_blocks, "a block leaked"

    def _count_cached(self, block: int, change: int) -> None:
        group = self.group_of(block)
        self._num_cached[group] += change
        if self._kept[block] == _PROTECTED:
            self._num_protected[group] += change

    def _free_and_wipe(self, block: int) -> None:
        # The block used last is allocated first, so that untouched memory stays untouched.
        self._free[self.group_of(block)].appendleft(block)
        self._wipes.append(block)
