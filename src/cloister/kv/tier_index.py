"""Index of one KV tier below the device: which blocks it holds, which it stores, and how long loading them takes. Pure: no I/O,
no clock, no arrays.

A block that the prefix cache evicts is stored in a slot of the first tier (`engine.kv_tier_worker` writes it). A block that a
tier evicts moves to the next one (`kv.tiers`). Each group of layers has slots of its own, in proportion to its part of the
device's memory. A full group evicts its least recently used block if the new one is worth more (`kv.tier_admission`). A block
can be found once it is written, and is forgotten if it cannot be read back. With shares, an owner's blocks evict only blocks of
the same owner, as in the prefix cache (`kv.cache_quotas`); otherwise a tenant could infer others' activity from its misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from cloister.kv.kept_blocks import KeptBlocks
from cloister.kv.tier_admission import AdmissionFactory, AdmitAll, TierAdmission
from cloister.kv.tier_slots import GroupSlots, TierBlock, TierLayout
from cloister.types.threat import Requirement, ThreatProfile

MAX_UNWRITTEN_BYTES: Final = 64 * 2**20
"""KV that waits to be written to a tier, in all shares; while there is more, what is evicted is not stored. A slow disk delays
no step."""
TRY_EVERY: Final = 16
"""Every n-th load that is predicted to be slower than computing is made in part, as a trial: the tier may have become
faster."""
MAX_TRIAL_BYTES: Final = 2**20
"""KV that such a trial reads; at least one entry."""
STORE_SHARE: Final = 0.02
"""Storing may take this part of the processor time of steps, and what loads have saved."""
MAX_CREDIT_S: Final = 0.25
"""Time that storing may take beyond that, for each owner: at the start, and at most ever."""


def tier_threat(where: str) -> ThreatProfile:
    """Returns the threat profile of a tier whose blocks are `where`."""
    return ThreatProfile(
        row="disk or host offload",
        threats=frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE}),
        residue="KV, encrypted",
        where=(where,),
        attack="data leak",
        mitigations=(
            "AES-256-GCM under a key for each scope and adapter, which is only in the engine's memory and dies with the scope",
            "no plain text, key, token or prefix key is written; the file has no name, and ends with the engine",
            "a block is sealed together with what it is: another one, a changed one or part of one is a miss",
            "with shares, what one tenant stores takes neither space nor time for storing from another one",
        ),
    )


class TierAccount:
    """An owner's time budget for storing, its write backlog, and its admission policy. Each owner has its own: with a shared
    one, an owner could infer others' activity from which of its blocks are stored.

    Attributes:
        admission: sees the accesses of this owner only.
        credit_s: time that storing may take. It runs out if stored blocks are never used again; storing then pauses until it
            has grown.
        unwritten_bytes: KV that waits to be written.
    """

    __slots__ = ("admission", "credit_s", "is_paused", "unwritten_bytes")

    def __init__(self, admission: TierAdmission) -> None:
        self.admission = admission
        self.credit_s = MAX_CREDIT_S
        self.is_paused = False
        self.unwritten_bytes = 0

    def earn(self, seconds: float) -> None:
        self.credit_s = min(MAX_CREDIT_S, self.credit_s + seconds)
        if self.is_paused and self.credit_s > MAX_CREDIT_S / 4:  # enough for whole prefixes, not only for ends of them
            self.is_paused = False

    def spend(self, seconds: float) -> None:
        self.credit_s -= seconds
        if self.credit_s < 0.0:
            self.is_paused = True


@dataclass(eq=False, repr=False)
class KVTierIndex:
    """The blocks of one tier.

    Attributes:
        name: its name for metrics.
        layout: its slots.
        num_shares: owners that may have blocks at once; 1: all take from one share.
        number: of this tier, among those of its engine.
        first_number: of its sealings (`TierBlock.number`).
        make_admission: creates the admission policy of one owner.
        below: the next slower tier, which gets the blocks that this one evicts; None: they are dropped.
        copies: (source, block of a tier) to be made in this order, before the source is written again: from a block of the
            device to this tier, or from a block of this tier to the one below.
        kept: the blocks of each chain.
        ended_roots: chains of which nothing is left here.
        numbers: of sealings; no other block of this engine gets one that was taken (`TierBlock.number`).
        is_stopped: nothing more is stored; what is there can be loaded.
        is_stuck: a load was given up and the tier has not noticed; until it does, nothing is loaded.
        num_stored_blocks, num_stored_bytes: written so far.
    """

    name: str
    layout: TierLayout
    num_shares: int = 1
    number: int = 0
    first_number: int = field(default=0, kw_only=True)
    make_admission: AdmissionFactory = field(default=AdmitAll, kw_only=True)

    def __post_init__(self) -> None:
        self.below: KVTierIndex | None = None
        self.copies: list[tuple[int | TierBlock, TierBlock]] = []
        self.ended_roots: list[bytes] = []
        self.is_stopped = self.is_stuck = False
        self.num_stored_blocks = self.num_stored_bytes = 0
        self._accounts: dict[bytes, TierAccount] = {}  # of owners that have blocks
        self._slots = [GroupSlots(num_slots, self.num_shares) for num_slots in self.layout.num_slots]
        self.kept = KeptBlocks(len(self.layout.num_slots))
        self._unwritten: dict[int, TierBlock] = {}  # by number
        self.numbers = count(self.first_number)
        self.uses = count()
        self._byte_s = 0.0
        self._num_declined = 0

    def use_layout(self, layout: TierLayout) -> None:
        """Divides the tier anew. It must be empty."""
        assert not len(self), "a tier that has blocks keeps its layout"
        self.layout = layout
        self._slots = [GroupSlots(num_slots, self.num_shares) for num_slots in layout.num_slots]

    def __len__(self) -> int:
        """Blocks that it holds, or that are being written."""
        return sum(len(slots.blocks) for slots in self._slots)

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be loaded."""
        return not len(self)

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        return sum(len(slots.blocks) * size for slots, size in zip(self._slots, self.layout.slot_bytes, strict=True))

    def find_oldest_s(self) -> float | None:
        """Returns when the oldest block was stored; None if there is none. Takes a time for large tiers."""
        firsts = [next(iter(slots.blocks.values())) for slots in self._slots if slots.blocks]
        return min((self.kept.added_s(block.root, block.group, block.key) for block in firsts), default=None)

    # Storing

    def earn(self, seconds: float, owner: bytes | None = None) -> None:
        """Lets storing take more time for an owner; None: for all, in equal parts."""
        if owner is None:
            for account in self._accounts.values():
                account.earn(seconds / self.num_shares)
        elif owner in self._accounts:
            self._accounts[owner].earn(seconds)

    def earn_step(self, seconds: float, owners: Iterable[bytes | None]) -> None:
        """Lets storing take more time for the owners of what a step computed, each an equal part of `seconds`. Other owners get
        none: they could infer from their hits that somebody else is active."""
        for payer in {self._payer(owner) for owner in owners}:
            self.earn(seconds / self.num_shares, payer)

    def spend(self, seconds: float, blocks: Sequence[TierBlock]) -> None:
        """Notes what storing took for each of these blocks."""
        for block in blocks:
            if (account := self._accounts.get(block.owner)) is not None:
                account.spend(seconds / len(blocks))

    def note_accesses(self, keys: Sequence[bytes], owner: bytes | None = None) -> None:
        """Notes that a request of an owner uses the blocks of a chain, wherever they are, or computes them."""
        if (account := self._accounts.get(self._payer(owner))) is not None:
            account.admission.note(keys)

    def offer(self, root: bytes, key: bytes, entry: int, group: int, block: int, owner: bytes | None = None) -> None:
        """Stores a block that the device evicts, unless the tier already has it, has too many unwritten bytes, is paused or
        stopped, or has no free share. A block that is not admitted here is offered to the tier below."""
        slots, payer = self._slots[group], self._payer(owner)
        if key in slots.blocks:
            slots.touch(key, next(self.uses))
        elif root and (account := self._find_account(payer, group)) is not None:
            if not self._admits(key, payer, group):
                if self.below is not None:
                    self.below.offer(root, key, entry, group, block, owner)
                return
            slot = self._take_slot(payer, group)
            stored = TierBlock(root, payer, key, entry, group, slot, next(self.numbers), self.number)
            self._add(stored, account, next(self.uses))
            self.copies.append((block, stored))

    def accept_demoted(self, block: TierBlock, used: int) -> TierBlock | None:
        """Returns where to copy a block that the tier above evicts; None if it is not stored here (as in `offer`).

        Args:
            used: its last use.
        """
        slots = self._slots[block.group]
        if block.key in slots.blocks:
            slots.touch(block.key, used)
            return None
        account = self._find_account(block.owner, block.group)
        if account is None or not self._admits(block.key, block.owner, block.group):
            return None
        moved = msgspec.structs.replace(block, slot=self._take_slot(block.owner, block.group), tier=self.number)
        self._add(moved, account, used)
        return moved

    def _find_account(self, owner: bytes, group: int) -> TierAccount | None:
        """Returns the account of an owner that has a share, and time and room in the queue to write a block; else None."""
        if self.is_stopped or not self._slots[group].has_share(owner):
            return None
        account = self._accounts.get(owner)
        if account is None:
            account = TierAccount(self.make_admission(max(self.layout.num_slots) // self.num_shares))
        num_bytes = account.unwritten_bytes + self.layout.count_content(group)
        return None if account.is_paused or num_bytes > MAX_UNWRITTEN_BYTES / self.num_shares else account

    def _payer(self, owner: bytes | None) -> bytes:
        """Returns whose share an owner's blocks take."""
        return owner if self.num_shares > 1 and owner is not None else b""

    def _admits(self, key: bytes, owner: bytes, group: int) -> bool:
        """Whether a block is worth the slot that it would take."""
        oldest = self._slots[group].oldest(owner)
        return oldest is None or self._accounts[owner].admission.admits(key, oldest.key)

    def _take_slot(self, owner: bytes, group: int) -> int:
        """Returns a slot for a block of an owner; evicts the owner's least recently used block if its share is full."""
        slots = self._slots[group]
        oldest = slots.oldest(owner)
        if oldest is None:
            return slots.take()
        if self.below is not None and (moved := self.below.accept_demoted(oldest, slots.used[oldest.key])) is not None:
            self.copies.append((oldest, moved))
        return self._remove(oldest)

    def _add(self, stored: TierBlock, account: TierAccount, used: int) -> None:
        """Enters a block that will be written."""
        self._slots[stored.group].add(stored, used)
        self.kept.add(stored.root, stored.group, stored.key)
        self._unwritten[stored.number] = stored
        self._accounts[stored.owner] = account
        account.unwritten_bytes += self.layout.count_content(stored.group)

    def confirm(self, stored: TierBlock, *, is_written: bool) -> None:
        """Notes that a block was written, or could not be."""
        if self._unwritten.pop(stored.number, None) is not None:
            self._accounts[stored.owner].unwritten_bytes -= self.layout.count_content(stored.group)
            self._close_account(stored.owner)
        if is_written:
            self.num_stored_blocks += 1
            self.num_stored_bytes += self.layout.block_bytes[stored.group]
        else:
            self.lose(stored)

    def lose(self, stored: TierBlock) -> None:
        """Forgets a block that cannot be read."""
        slots = self._slots[stored.group]
        if slots.blocks.get(stored.key) is stored:
            slots.free.append(self._remove(stored))

    def forget(self, root: bytes) -> None:
        """Forgets all of a scope: its lifetime is over."""
        for group, key in self.kept.blocks_of(root):
            slots = self._slots[group]
            slots.free.append(self._remove(slots.blocks[key]))

    def _remove(self, stored: TierBlock) -> int:
        """Removes a block and returns its slot."""
        self._slots[stored.group].remove(stored)
        self.kept.remove(stored.root, stored.group, stored.key)
        if stored.root not in self.kept:
            self.ended_roots.append(stored.root)
        self._close_account(stored.owner)
        return stored.slot

    def _close_account(self, owner: bytes) -> None:
        """Forgets an owner that has no blocks any more."""
        if not self._accounts[owner].unwritten_bytes and not any(owner in slots.owned for slots in self._slots):
            del self._accounts[owner]

    # Loading

    def find(self, key: bytes, group: int) -> TierBlock | None:
        """Returns a block that can be loaded; None if there is none."""
        found = self._slots[group].blocks.get(key)
        return None if found is None or found.number in self._unwritten else found

    def touch(self, found: TierBlock, first: KVTierIndex | None = None) -> None:
        """Marks a block as its owner's most recently used one, and notes whether it is worth a slot of the first tier."""
        slots = self._slots[found.group]
        if found.key in slots.blocks:
            if first is not None and first is not self and first.would_keep(found, slots.used[found.key]):
                slots.promoted.add(found.key)
            slots.touch(found.key, next(self.uses))
            self.kept.note_use(found.root)

    def would_keep(self, block: TierBlock, used: int) -> bool:
        """Whether a block of a lower tier belongs here: by recency, if it was used after (`used`) the block that would be
        evicted for it; by frequency, if it is used more often."""
        slots = self._slots[block.group]
        oldest = slots.oldest(block.owner)
        if oldest is None:
            return True
        admission = self._accounts[block.owner].admission
        return admission.admits(block.key, oldest.key) if admission.is_by_frequency else used > slots.used[oldest.key]

    def has(self, key: bytes, group: int) -> bool:
        """Whether a block is here, or is being written."""
        return key in self._slots[group].blocks

    def retain(self, key: bytes, group: int) -> bool:
        """Whether this tier has a block that the device evicts and keeps it, as the most recently used one, so that it is not
        stored in the first tier too."""
        slots = self._slots[group]
        if key not in slots.blocks or key in slots.promoted:
            slots.promoted.discard(key)
            return False
        slots.touch(key, next(self.uses))
        return True

    def decline(self) -> bool:
        """Notes that a load was slower than computing. Returns whether to measure the tier by a trial that no request waits
        for."""
        self._num_declined += 1
        return self._num_declined % TRY_EVERY == 0

    def predict_s(self, num_bytes: int) -> float:
        """Returns the predicted seconds of a load; 0 before the first measurement."""
        return num_bytes * self._byte_s

    def learn(self, num_bytes: int, elapsed_s: float) -> None:
        """Adds one measured load.

        A time of less than half of the estimate replaces it at once: other programs only slow loads down, so the estimate was
        too high, and the tier would stay unused for long.
        """
        byte_s = elapsed_s / num_bytes
        if not self._byte_s or 2 * byte_s < self._byte_s:
            self._byte_s = byte_s
        else:
            self._byte_s += (byte_s - self._byte_s) / 4

    def check(self) -> None:
        """Raises AssertionError unless every slot is empty or has one block, and every block is known by its root."""
        for group, slots in enumerate(self._slots):
            used = [stored.slot for stored in slots.blocks.values()]
            assert len({*used, *slots.free}) == len(used) + len(slots.free) <= slots.num_slots, "a slot has two blocks"
            assert sum(map(len, slots.owned.values())) == len(slots.blocks), "a block has no owner"
            assert len(slots.owned) <= slots.num_shares, "more owners than shares"
            share = slots.num_slots // slots.num_shares
            assert all(0 < len(owned) <= share for owned in slots.owned.values()), "a share is overdrawn"
            assert all(self.kept.has(stored.root, group, key) for key, stored in slots.blocks.items()), "a root is lost"
        assert all(slots.used.keys() == slots.blocks.keys() >= slots.promoted for slots in self._slots), "a use is lost"
        assert len(self.kept) == len(self), "a root has a block that is gone"
        sizes = [self.layout.count_content(stored.group) for stored in self._unwritten.values()]
        unwritten_bytes = sum(account.unwritten_bytes for account in self._accounts.values())
        assert sum(sizes) == unwritten_bytes, "the count of unwritten bytes is off"
        assert all(owner in self._accounts for slots in self._slots for owner in slots.owned), "an owner has no account"
