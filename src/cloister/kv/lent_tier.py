"""A tier that lends slots to another engine while its own engine does not need them (Aqua, Vijaya Kumar et al. 2025). Pure: no
I/O, no clock, no arrays.

An engine lends the last three quarters of its slots. It takes them back, without asking or waiting, when it has no other slot
for a block of its own. The borrower then fails to open its blocks and computes them again.
"""

from __future__ import annotations

from typing import Final

from cloister.kv.shared_tier import SHARED_TIER_THREAT, SharedTierIndex
from cloister.kv.tier_index import KVTierIndex, TierAccount
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.types.threat import ThreatProfile

LENT_SHARE: Final = 0.75
"""Part of its slots that an engine lends."""
QUIET_S: Final = 10.0
"""An engine lends again, on request, after this time without storing anything."""

PEER_TIER_THREAT: Final = ThreatProfile(
    row=SHARED_TIER_THREAT.row,
    threats=SHARED_TIER_THREAT.threats,
    residue="KV, encrypted, also in memory that belongs to another engine, until that one writes there again",
    where=SHARED_TIER_THREAT.where,
    attack="data leak; tell from what has to be computed again that another replica needs its memory",
    mitigations=(
        *SHARED_TIER_THREAT.mitigations,
        "what is kept in borrowed memory is announced to nobody, and no key lies beside it",
        "profiles that hide tenants from each other refuse it, as a lender takes its memory back when its own tenants need it",
    ),
)


def count_kept(layout: TierLayout) -> tuple[int, ...]:
    """Returns the slots of each group that an engine keeps for itself while it lends the others."""
    return tuple(num - int(num * LENT_SHARE) for num in layout.num_slots)


def count_lent(layout: TierLayout) -> TierLayout:
    """Returns the slots that an engine lends."""
    return TierLayout(layout.block_bytes, tuple(int(num * LENT_SHARE) for num in layout.num_slots))


class LendingTierIndex(SharedTierIndex):
    """An engine's own part, of which it may lend slots.

    Attributes:
        is_lending: another engine may use the last slots.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_lending = False
        self._stored_s = 0.0
        if self.can_lend:
            self.lend()

    @property
    def needs_more(self) -> bool:
        """Whether some owner's share is full."""
        return any(slots.oldest(owner) is not None for slots in self._slots for owner in slots.owned)

    @property
    def can_lend(self) -> bool:
        """Whether each owner has a slot then, here and in what is lent."""
        return min(*count_kept(self.layout), *count_lent(self.layout).num_slots) >= self.num_shares

    def may_lend(self, now: float) -> bool:
        """Whether nothing was stored for a while."""
        return self.can_lend and not self.is_lending and now - self._stored_s >= QUIET_S

    def lend(self) -> None:
        """Leaves the last slots to another engine. Blocks there, and those beyond an owner's smaller share, are
        forgotten."""
        self.is_lending = True
        for slots, num_kept in zip(self._slots, count_kept(self.layout), strict=True):
            slots.num_slots = num_kept
            for stored in list(slots.blocks.values()):
                if stored.slot >= num_kept:
                    self._remove(stored)
            slots.free = [slot for slot in slots.free if slot < num_kept]
            for owned in list(slots.owned.values()):
                for stored in list(owned.values())[: max(0, len(owned) - num_kept // slots.num_shares)]:
                    self.lose(stored)

    def take_back(self) -> None:
        """Uses all slots again, from now on."""
        self.is_lending = False
        for slots, num_slots in zip(self._slots, self.layout.num_slots, strict=True):
            slots.num_slots = num_slots

    def _take_room(self, owner: bytes, group: int) -> None:
        if self.is_lending and self._slots[group].oldest(owner) is not None:
            self.take_back()

    def offer(self, root: bytes, key: bytes, entry: int, group: int, block: int, owner: bytes | None = None) -> None:
        """As `SharedTierIndex.offer`. Takes lent slots back before it evicts a block of this engine."""
        if root and not self.has(key, group):
            self._take_room(self._payer(owner), group)
        super().offer(root, key, entry, group, block, owner)

    def _add(self, stored: TierBlock, account: TierAccount, used: int) -> None:
        self._stored_s = self.kept.time.now_s
        super()._add(stored, account, used)

    def check(self) -> None:
        super().check()
        most = count_kept(self.layout) if self.is_lending else self.layout.num_slots
        for slots, num_slots in zip(self._slots, most, strict=True):
            used = [stored.slot for stored in slots.blocks.values()]
            assert all(slot < num_slots for slot in (*used, *slots.free)), "a slot is lent and in use"
            assert sorted((*used, *slots.free)) == list(range(len(used) + len(slots.free))), "a slot is lost"


class BorrowedTierIndex(KVTierIndex):
    """The blocks that an engine keeps in slots borrowed from another one: those that its own part evicts."""

    def lose_all(self) -> None:
        """Forgets all blocks: the lender has taken its memory back, or is gone."""
        for stored in [stored for slots in self._slots for stored in slots.blocks.values()]:
            self.lose(stored)
