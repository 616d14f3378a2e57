"""The slots of a tier: their layout in its file, and the blocks in those of one group. Pure: no I/O."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from cloister.kv.pool import BlockGroup
from cloister.types.errors import ConfigError

_PAGE: Final = 4096
TAG_BYTES: Final = 16
"""What sealing adds to a block (AES-GCM)."""


class TierBlock(msgspec.Struct, frozen=True, gc=False):
    """One block in a tier. There are many, so the garbage collector does not look at them.

    Attributes:
        root: root of its chain: scope and adapter.
        owner: whose share it takes.
        key: prefix key of its entry.
        entry: number of its entry in a block table.
        group: group of layers.
        slot: where it lies, among the slots of its group.
        number: of the sealing; no other one in the life of an engine has it. A block that moves keeps it.
        tier: number of its tier; 0 is the first one.
        home: part of a shared tier where another engine has it (`kv.shared_tier`); None: it is this engine's own.
    """

    root: bytes
    owner: bytes
    key: bytes
    entry: int
    group: int
    slot: int
    number: int
    tier: int = 0
    home: int | None = None

    def __repr__(self) -> str:
        """Shows no key: where a scope has no secret, a key tells whether somebody's text is known."""
        return f"TierBlock(tier={self.tier}, entry={self.entry}, group={self.group}, slot={self.slot})"


@dataclass(frozen=True, slots=True)
class TierLayout:
    """The slots of a tier.

    Attributes:
        block_bytes: bytes of a block of each group, as it is stored.
        num_slots: slots of each group.
        content_bytes: bytes of a block before it is compressed; empty where none is.
    """

    block_bytes: tuple[int, ...]
    num_slots: tuple[int, ...]
    content_bytes: tuple[int, ...] = ()

    @classmethod
    def plan(
        cls,
        limit_bytes: int,
        block_bytes: Sequence[int],
        groups: Sequence[BlockGroup],
        num_shares: int = 1,
        *,
        content_bytes: Sequence[int] = (),
        fixed_bytes: int = 0,
        record_bytes: int = 0,
    ) -> TierLayout:
        """Divides a tier of `limit_bytes` among groups as the device's memory is divided.

        Args:
            fixed_bytes: of the tier that no slot takes.
            record_bytes: what each slot takes besides.

        Raises:
            ConfigError: some group would have no slot for each share.
        """
        layout = cls(tuple(block_bytes), (0,) * len(groups))
        sizes = layout.slot_bytes
        device_bytes = sum(group.num_blocks * (size + record_bytes) for group, size in zip(groups, sizes, strict=True))
        num_slots = tuple((limit_bytes - fixed_bytes) * group.num_blocks // device_bytes for group in groups)
        if min(num_slots) < num_shares:
            least_bytes = fixed_bytes + num_shares * device_bytes / min(group.num_blocks for group in groups)
            least = math.ceil(least_bytes / 2**20)
            shares = "" if num_shares == 1 else f" in each of {num_shares} shares"
            raise ConfigError(
                f"kv_tier is too small for one block of each kind{shares}; give it at least {least}M", param="kv_tier"
            )
        return cls(tuple(block_bytes), num_slots, tuple(content_bytes))

    def count_content(self, group: int) -> int:
        """Returns the bytes of a block before it is compressed."""
        return (self.content_bytes or self.block_bytes)[group]

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of a slot of each group: whole pages, so that writing one never reads."""
        return tuple(math.ceil((size + TAG_BYTES) / _PAGE) * _PAGE for size in self.block_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(num * size for num, size in zip(self.num_slots, self.slot_bytes, strict=True))

    def place(self, group: int, slot: int) -> int:
        """Returns where a slot begins in a file that has all of them, group after group."""
        before = sum(num * size for num, size in zip(self.num_slots[:group], self.slot_bytes[:group], strict=True))
        return before + slot * self.slot_bytes[group]


class GroupSlots:
    """The slots of one group.

    Attributes:
        blocks: by key.
        owned: blocks of each owner by key, least recently used first.
        free: empty slots that were used before.
        used: when each block was last used, as a count of uses in all tiers.
        promoted: keys of blocks that belong in the first tier.
    """

    __slots__ = ("blocks", "free", "num_shares", "num_slots", "owned", "promoted", "used")

    def __init__(self, num_slots: int, num_shares: int) -> None:
        self.blocks: dict[bytes, TierBlock] = {}
        self.owned: dict[bytes, OrderedDict[bytes, TierBlock]] = {}
        self.free: list[int] = []
        self.used: dict[bytes, int] = {}
        self.promoted: set[bytes] = set()
        self.num_slots, self.num_shares = num_slots, num_shares

    def has_share(self, owner: bytes) -> bool:
        """Whether an owner has a share, or a free one is available."""
        return owner in self.owned or len(self.owned) < self.num_shares

    def oldest(self, owner: bytes) -> TierBlock | None:
        """Returns the least recently used block of an owner whose share is full; None if it is not."""
        owned = self.owned.get(owner, ())
        return next(iter(self.owned[owner].values())) if len(owned) >= self.num_slots // self.num_shares else None

    def take(self) -> int:
        """Returns an empty slot; there is one while some share is not full."""
        return self.free.pop() if self.free else len(self.blocks)

    def add(self, stored: TierBlock, used: int) -> None:
        self.blocks[stored.key] = stored
        self.used[stored.key] = used
        self.owned.setdefault(stored.owner, OrderedDict())[stored.key] = stored

    def remove(self, stored: TierBlock) -> None:
        del self.blocks[stored.key], self.used[stored.key]
        self.promoted.discard(stored.key)
        owned = self.owned[stored.owner]
        del owned[stored.key]
        if not owned:
            del self.owned[stored.owner]

    def touch(self, key: bytes, used: int) -> None:
        """Marks a block as its owner's most recently used one."""
        self.used[key] = used
        self.owned[self.blocks[key].owner].move_to_end(key)
