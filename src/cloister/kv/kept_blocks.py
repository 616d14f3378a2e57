"""Blocks kept of each chain (one scope and adapter), and since when. Pure: it is given the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

DEVICE: Final = "device"
"""Name of the place above all tiers."""


class StepTime:
    """The current time, set by the scheduler and shared by its prefix cache and tiers."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0


@dataclass(frozen=True, slots=True)
class KeptUsage:
    """What is kept of some chains.

    Attributes:
        num_blocks: blocks of each group.
        oldest_s: when the oldest of them was added; None if there are none.
        used_s: when one was last added or found; None if there are none.
    """

    num_blocks: tuple[int, ...]
    oldest_s: float | None
    used_s: float | None


class _Chain:
    __slots__ = ("blocks", "used_s")

    def __init__(self, num_groups: int) -> None:
        self.blocks: list[dict[bytes, float]] = [{} for _ in range(num_groups)]  # when each was added, the oldest first
        self.used_s = 0.0


class KeptBlocks:
    """The prefix keys whose blocks are kept, by the root of their chain and by group.

    Args:
        num_groups: groups of layers.

    Attributes:
        time: the time of additions and uses.
    """

    def __init__(self, num_groups: int) -> None:
        self.time = StepTime()
        self._num_groups = num_groups
        self._chains: dict[bytes, _Chain] = {}

    def __contains__(self, root: bytes) -> bool:
        return root in self._chains

    def __len__(self) -> int:
        """Blocks of all chains."""
        return sum(len(keys) for chain in self._chains.values() for keys in chain.blocks)

    def add(self, root: bytes, group: int, key: bytes) -> None:
        """Adds a block, which counts as a use of its chain."""
        chain = self._chains.get(root)
        if chain is None:
            chain = self._chains[root] = _Chain(self._num_groups)
        chain.blocks[group][key] = chain.used_s = self.time.now_s

    def remove(self, root: bytes, group: int, key: bytes) -> None:
        """Removes a block; a chain ends with its last one."""
        chain = self._chains[root]
        del chain.blocks[group][key]
        if not any(chain.blocks):
            del self._chains[root]

    def note_use(self, root: bytes) -> None:
        """Notes that blocks of a chain were found."""
        if (chain := self._chains.get(root)) is not None:
            chain.used_s = self.time.now_s

    def blocks_of(self, root: bytes) -> list[tuple[int, bytes]]:
        """Returns group and key of each block of a chain, in each group the oldest first."""
        chain = self._chains.get(root)
        return [] if chain is None else [(group, key) for group, keys in enumerate(chain.blocks) for key in keys]

    def has(self, root: bytes, group: int, key: bytes) -> bool:
        """Whether a block is among those of a chain."""
        return root in self._chains and key in self._chains[root].blocks[group]

    def added_s(self, root: bytes, group: int, key: bytes) -> float:
        """Returns when a block was added."""
        return self._chains[root].blocks[group][key]

    def report(self, roots: Iterable[bytes]) -> KeptUsage:
        """Returns what is kept of these chains together, in a time that does not grow with it."""
        chains = [self._chains[root] for root in roots if root in self._chains]
        firsts = [next(iter(keys.values())) for chain in chains for keys in chain.blocks if keys]
        return KeptUsage(
            num_blocks=tuple(sum(len(chain.blocks[group]) for chain in chains) for group in range(self._num_groups)),
            oldest_s=min(firsts, default=None),
            used_s=max((chain.used_s for chain in chains), default=None),
        )
