"""The block table of one sequence: it grows with the sequence, forks share it, writes copy. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.kv.pool import NO_BLOCK, BlockPool, OutOfBlocksError


class BlockTable:
    """Blocks of one sequence in the order of its positions.

    An entry holds `block_size` positions, and has one block for each group of layers.

    Of the group of states, the block of the last entry is the running state: steps change it in place. One before it is a
    snapshot of the state at its entry's end, to be offered to the prefix cache; nearly all entries have none.

    Attributes:
        blocks: block ids, entry after entry; of group g position p lives in blocks[p // block_size * num_groups + g].
            `NO_BLOCK` if no query of the group sees these positions any more, and where there is no snapshot.
        num_sent: number of leading entries that the runner has received.
        num_scratch: last of its blocks that are scratch memory in place of KV (`add_scratch`).
    """

    __slots__ = ("_num_groups", "_passed", "_pool", "_state", "blocks", "num_scratch", "num_sent")

    def __init__(self, pool: BlockPool, blocks: Sequence[int] = ()) -> None:
        self._pool = pool
        self._num_groups = pool.num_groups
        self._state = pool.state_group
        self.blocks = list(blocks)
        self.num_sent = self.num_scratch = 0
        self._passed = [0] * pool.num_groups  # leading entries of each group whose blocks were released

    @property
    def num_entries(self) -> int:
        return len(self.blocks) // self._num_groups

    def num_missing(self, num_positions: int) -> int:
        """Number of entries to add for `num_positions`, without copies on write."""
        if self.num_scratch:
            return 0
        return max(0, -(-num_positions // self._pool.block_size) - len(self.blocks) // self._num_groups)

    def count_held(self, group: int) -> int:
        """Returns its blocks of a group."""
        return sum(block != NO_BLOCK for block in self.blocks[group :: self._num_groups])

    def is_writable(self, start: int, end: int) -> bool:
        """Whether positions [start, end) are in one existing, unshared entry, as in nearly every decode."""
        if self.num_scratch:
            return True
        size, num_groups = self._pool.block_size, self._num_groups
        first = start // size
        if end > (first + 1) * size:
            return False
        blocks = self.blocks
        if self._state is not None and first != self.num_entries - 1:
            return False
        if num_groups == 1:
            return first < len(blocks) and not self._pool.is_shared(blocks[first])
        entry = blocks[first * num_groups : (first + 1) * num_groups]
        return bool(entry) and not any(map(self._pool.is_shared, entry))

    def grow(self, start: int, end: int, snapshots: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Makes positions [start, end) writable and returns the necessary block copies (source, target).

        The caller releases the sources to the pool after the plan that copies them has collected its wipes; otherwise a source
        could be wiped before it is read.

        Args:
            snapshots: entries that end inside of [start, end), and get a block for the state at their end.

        Raises:
            OutOfBlocksError: the pool has too few blocks; the table is unchanged.
        """
        if self.is_writable(start, end):
            return []
        pool, num_groups, state = self._pool, self._num_groups, self._state
        first = start // pool.block_size
        num_entries, num_needed = len(self.blocks) // num_groups, -(-end // pool.block_size)
        last = min(num_entries, num_needed)
        shared = [
            i
            for i in range(first * num_groups, last * num_groups)
            if i % num_groups != state and pool.is_shared(self.blocks[i])
        ]
        missing = num_needed - last
        if state is None and not shared and not missing:
            return []
        new = list(range(len(self.blocks), len(self.blocks) + missing * num_groups))
        running = self.blocks[(num_entries - 1) * num_groups + state] if state is not None and num_entries else NO_BLOCK
        states = []
        if state is not None:
            new = [i for i in new if i % num_groups != state]
            states = [entry * num_groups + state for entry in snapshots]
            if running == NO_BLOCK or pool.is_shared(running):
                states.append((num_needed - 1) * num_groups + state)
        places = shared + new + states
        fresh = pool.allocate(len(places)) if num_groups == 1 else self._allocate(places)
        copies = []
        for i, block in zip(shared, fresh, strict=False):
            copies.append((self.blocks[i], block))
            self.num_sent = min(self.num_sent, i // num_groups)
        self.blocks.extend([NO_BLOCK] * (missing * num_groups))
        if state is not None and running != NO_BLOCK:
            self._move_state(num_entries - 1, num_needed - 1)
            target = fresh[-1] if len(states) > len(snapshots) else running
            if target != running:
                copies.append((running, target))
        for place, block in zip(places, fresh, strict=True):
            self.blocks[place] = block
        return copies

    def add_scratch(self, num_kept: int, num_scratch: int) -> None:
        """Adds all that a prompt needs that is computed layer by layer (`types.layerwise`): KV for `num_kept` more entries, and
        blocks of scratch memory. The table does not grow any more.

        Raises:
            OutOfBlocksError: the pool has too few blocks; the table is unchanged.
        """
        self.blocks.extend(self._pool.allocate(num_kept + num_scratch))
        self.num_scratch = num_scratch

    def _move_state(self, source: int, target: int) -> None:
        """Makes the running state that of another entry, whose state block is overwritten in the table."""
        assert self._state is not None
        block = self.blocks[source * self._num_groups + self._state]
        self.blocks[source * self._num_groups + self._state] = NO_BLOCK
        self.blocks[target * self._num_groups + self._state] = block
        self.num_sent = min(self.num_sent, source, target)

    def _allocate(self, places: Sequence[int]) -> list[int]:
        """Allocates a block for each given place of the table, all or none."""
        pool, num_groups = self._pool, self._num_groups
        counts = [sum(place % num_groups == group for place in places) for group in range(num_groups)]
        if any(count > pool.count_available(group) for group, count in enumerate(counts)):
            raise OutOfBlocksError
        fresh = [iter(pool.allocate(count, group)) for group, count in enumerate(counts)]
        return [next(fresh[place % num_groups]) for place in places]

    def release_behind_windows(self, num_positions: int) -> None:
        """Releases the blocks behind the windows: those that no query from position `num_positions` on sees."""
        for number, group in enumerate(self._pool.groups):
            if group.window is None:
                continue
            first = min(first_seen(num_positions, group.window) // self._pool.block_size, self.num_entries)
            places = range(
                self._passed[number] * self._num_groups + number, first * self._num_groups + number, self._num_groups
            )
            blocks = [self.blocks[place] for place in places if self.blocks[place] != NO_BLOCK]
            for place in places:
                self.blocks[place] = NO_BLOCK
            self._pool.release(blocks)
            self._passed[number] = max(self._passed[number], first)

    def shrink(self, num_positions: int) -> None:
        """Releases the blocks after the first `num_positions` positions, at least one; the last of these are its own to
        write. The running state, which drafts do not change, is that of what is left."""
        num_entries = -(-num_positions // self._pool.block_size)
        if num_entries < self.num_entries:
            if self._state is not None:
                self._move_state(self.num_entries - 1, num_entries - 1)
            self._release(self.blocks[num_entries * self._num_groups :])
            del self.blocks[num_entries * self._num_groups :]
            self.num_sent = min(self.num_sent, num_entries)

    def adopt(self, entry: int, group: int, block: int) -> None:
        """Takes a block with the same contents in place of its own, which is given back."""
        place = entry * self._num_groups + group
        self._pool.share([block])
        self._pool.release([self.blocks[place]])
        self.blocks[place] = block
        self.num_sent = min(self.num_sent, entry)

    def take_unsent(self) -> tuple[int, list[int]]:
        """Returns (first entry, block ids) that the runner has not received yet, and marks them as sent."""
        start = self.num_sent
        self.num_sent = len(self.blocks) // self._num_groups
        return start, self.blocks[start * self._num_groups :]

    def fork(self) -> BlockTable:
        """Returns a table that shares every block with this one."""
        child = BlockTable(self._pool, self.blocks)
        self._pool.share(block for block in self.blocks if block != NO_BLOCK)
        child.num_sent, child._passed = self.num_sent, self._passed[:]
        return child

    def close(self) -> None:
        """Releases every block, last one first, so that the prefix cache gets leaves before their parents."""
        self._release(self.blocks)
        self.blocks = []
        self.num_sent = self.num_scratch = 0

    def _release(self, blocks: Sequence[int]) -> None:
        self._pool.release(block for block in reversed(blocks) if block != NO_BLOCK)


def first_seen(position: int, window: int | None) -> int:
    """Returns the first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)
