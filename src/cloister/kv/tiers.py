"""The KV tiers below the device, fastest first: each evicts to the next one. Pure: no I/O, no clock, no arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from cloister.kv.kept_blocks import StepTime
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierBlock


class KVTiers:
    """All tiers of one engine.

    Args:
        indexes: one for each tier, fastest first.
    """

    def __init__(self, indexes: Sequence[KVTierIndex]) -> None:
        self.indexes = tuple(indexes)
        for above, below in pairwise(self.indexes):
            above.below = below
            below.uses = above.uses
            below.numbers = above.numbers  # a chain has one key in all tiers, and no number may seal twice under it
        self._forgotten: list[bytes] = []

    def __len__(self) -> int:
        """Blocks that they hold, or that are being written."""
        return sum(map(len, self.indexes))

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be loaded."""
        return all(index.is_empty for index in self.indexes)

    @property
    def num_groups(self) -> int:
        return len(self.indexes[0].layout.block_bytes)

    def use_time(self, time: StepTime) -> None:
        """Makes all tiers take their time from `time`."""
        for index in self.indexes:
            index.kept.time = time

    def check(self) -> None:
        """Raises AssertionError unless every index is consistent."""
        for index in self.indexes:
            index.check()

    # Storing

    def earn(self, seconds: float, owner: bytes | None = None) -> None:
        """Lets storing take more time, in each tier the same (`KVTierIndex.earn`)."""
        for index in self.indexes:
            index.earn(seconds / len(self.indexes), owner)

    def earn_step(self, seconds: float, owners: Sequence[bytes | None]) -> None:
        """Lets storing take more time for the owners of what a step computed (`KVTierIndex.earn_step`)."""
        for index in self.indexes:
            index.earn_step(seconds / len(self.indexes), owners)

    def note_accesses(self, keys: Sequence[bytes], owner: bytes | None = None) -> None:
        """Notes that a request uses the blocks of a chain (`KVTierIndex.note_accesses`)."""
        for index in self.indexes:
            index.note_accesses(keys, owner)

    def offer(self, root: bytes, key: bytes, entry: int, group: int, block: int, owner: bytes | None = None) -> None:
        """Stores a block that the device evicts (`KVTierIndex.offer`). A block that only a slower tier has is promoted to the
        first one if `KVTierIndex.would_keep` said so when it was last used."""
        first, *others = self.indexes
        if first.has(key, group) or not any(other.retain(key, group) for other in others):
            first.offer(root, key, entry, group, block, owner)

    def lose(self, stored: TierBlock) -> None:
        """Forgets a block that cannot be read."""
        self.indexes[stored.tier].lose(stored)

    def forget(self, root: bytes) -> None:
        """Forgets all of a scope: its lifetime is over, or it was dropped."""
        for index in self.indexes:
            index.forget(root)
        self._forgotten.append(root)

    def take_ended_roots(self) -> list[bytes]:
        """Removes and returns the chains whose keys shall be forgotten: they were dropped, or no tier has anything left."""
        ended = dict.fromkeys(self._forgotten)
        for index in self.indexes:
            ended |= dict.fromkeys(root for root in index.ended_roots if not any(root in other.kept for other in self.indexes))
            index.ended_roots.clear()
        self._forgotten.clear()
        return list(ended)

    # Loading

    def find(self, key: bytes, group: int) -> TierBlock | None:
        """Returns the block from the fastest tier that has it; None if there is none. Stuck tiers are skipped."""
        for index in self.indexes:
            if not index.is_stuck and (found := index.find(key, group)) is not None:
                return found
        return None

    def holds(self, key: bytes, num_tiers: int | None = None) -> list[bool]:
        """Returns for each group whether its block of this key can be loaded from the first `num_tiers` tiers."""
        indexes = [index for index in self.indexes[:num_tiers] if not index.is_stuck]
        return [any(index.find(key, group) is not None for index in indexes) for group in range(self.num_groups)]

    def touch(self, blocks: Iterable[TierBlock]) -> None:
        """Marks blocks as most recently used, the last one most."""
        for found in blocks:
            self.indexes[found.tier].touch(found, self.indexes[0])

    def count_bytes(self, blocks: Iterable[TierBlock]) -> list[int]:
        """Returns the bytes of blocks by tier."""
        counts = [0] * len(self.indexes)
        for block in blocks:
            counts[block.tier] += self.indexes[block.tier].layout.block_bytes[block.group]
        return counts

    def predict_s(self, num_bytes: Sequence[int]) -> float:
        """Returns the predicted seconds of a load of `num_bytes` from each tier; 0 before the first measurement."""
        return sum(index.predict_s(num) for index, num in zip(self.indexes, num_bytes, strict=True))
