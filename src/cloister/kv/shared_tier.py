"""One engine's index of a tier that several engines share. Pure: no I/O, no clock, no arrays.

Each engine writes to a part of its own (`kv.tier_index.KVTierIndex`) and announces the blocks that it has written. The others
load these blocks and do not store them a second time; a load from another engine's part counts as a use there. Announcements
may be late, repeated or lost: a block that is gone does not open, and is computed.
"""

from __future__ import annotations

from typing import Final

from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierBlock
from cloister.types.threat import Requirement, ThreatProfile

SHARED_TIER_THREAT: Final = ThreatProfile(
    row="disk or host offload",
    threats=frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE}),
    residue="KV, encrypted, with its keys, which are encrypted too",
    where=("host memory of all replicas",),
    attack="data leak",
    mitigations=(
        "the memory has no name: only the front and its engines have it, and it ends with them",
        "AES-256-GCM under a key for each engine, scope and adapter, which lies beside the block under a secret of the front",
        "a scope that ends has its keys wiped by each engine, and an engine that ends has all of its part wiped by the front",
        "a block, and what is said of it, is sealed together with what and where it is: another one, or part of one, is a miss",
        "with shares, what one tenant stores takes neither space nor time for storing from another one",
    ),
)

Place = tuple[int, int, int]
"""Part, group and slot of a block of another engine."""


class SharedTierIndex(KVTierIndex):
    """The blocks of an engine's own part, and those that others have announced.

    Attributes:
        first_number: of its sealings; no other engine that shares the tier has these numbers.
        news: blocks to announce, by number.
        withdrawn: announced blocks that are gone; the withdrawal precedes any write to their slots.
        used_elsewhere: blocks of other engines that this one has used; their owners are notified.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.news: dict[int, TierBlock] = {}
        self.withdrawn: list[TierBlock] = []
        self.used_elsewhere: list[TierBlock] = []
        self._announced: dict[tuple[int, int], TierBlock] = {}  # by group and slot
        self._elsewhere: list[dict[bytes, TierBlock]] = [{} for _ in self.layout.num_slots]  # of each group, by key
        self._places: dict[Place, TierBlock] = {}

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not self._places

    @property
    def num_elsewhere(self) -> int:
        """Blocks that others have announced."""
        return len(self._places)

    # Storing

    def offer(self, root: bytes, key: bytes, entry: int, group: int, block: int, owner: bytes | None = None) -> None:
        """Stores a block that the device evicts, as `KVTierIndex.offer`, unless another engine has it."""
        if (found := self._elsewhere[group].get(key)) is not None and not super().has(key, group):
            self.used_elsewhere.append(found)
        else:
            super().offer(root, key, entry, group, block, owner)

    def confirm(self, stored: TierBlock, *, is_written: bool) -> None:
        super().confirm(stored, is_written=is_written)
        if self.find_own(stored.key, stored.group) is stored:
            self.news[stored.number] = stored

    def take_news(self) -> list[TierBlock]:
        """Removes and returns the blocks that are to be announced."""
        news = list(self.news.values())
        self.news.clear()
        self._announced.update({(block.group, block.slot): block for block in news})
        return news

    def take_withdrawn(self) -> list[TierBlock]:
        """Removes and returns the announced blocks that are gone."""
        withdrawn, self.withdrawn = self.withdrawn, []
        return withdrawn

    def take_used_elsewhere(self) -> list[TierBlock]:
        """Removes and returns the blocks of others that were used, each once."""
        used, self.used_elsewhere = dict.fromkeys(self.used_elsewhere), []
        return list(used)

    def _remove(self, stored: TierBlock) -> int:
        if self.news.pop(stored.number, None) is None and self._announced.get((stored.group, stored.slot)) is stored:
            self.withdrawn.append(self._announced.pop((stored.group, stored.slot)))
        return super()._remove(stored)

    # What others say

    def note_elsewhere(self, home: int, group: int, slot: int, block: TierBlock | None) -> None:
        """Notes what a slot of another engine's part holds now; None: nothing that can be loaded."""
        place = (home, group, slot)
        known = self._places.get(place)
        if known is not None:
            self._drop(place, known)
        if block is not None:
            self._places[place] = self._elsewhere[group][block.key] = block

    def note_used(self, group: int, slot: int) -> None:
        """Notes that another engine used the announced block in a slot of this one's part."""
        if (stored := self._announced.get((group, slot))) is not None:
            super().touch(stored)

    def forget_part(self, home: int) -> None:
        """Notes that another engine's part holds nothing any more."""
        for place in [place for place in self._places if place[0] == home]:
            self._drop(place, self._places[place])

    def _drop(self, place: Place, block: TierBlock) -> None:
        del self._places[place]
        known = self._elsewhere[block.group]
        if known.get(block.key) is block:  # else a third engine has it too
            del known[block.key]

    # Loading

    def find(self, key: bytes, group: int) -> TierBlock | None:
        return super().find(key, group) or self._elsewhere[group].get(key)

    def find_own(self, key: bytes, group: int) -> TierBlock | None:
        """As `find`, in this engine's part alone."""
        return super().find(key, group)

    def has(self, key: bytes, group: int) -> bool:
        return super().has(key, group) or key in self._elsewhere[group]

    def touch(self, found: TierBlock, first: KVTierIndex | None = None) -> None:
        if found.home is None:
            super().touch(found, first)
        else:
            self.used_elsewhere.append(found)

    def lose(self, stored: TierBlock) -> None:
        """Forgets a block that cannot be read; of another engine's until that one announces it again."""
        if stored.home is None:
            super().lose(stored)
        elif self._places.get(place := (stored.home, stored.group, stored.slot)) is stored:
            self._drop(place, stored)

    def check(self) -> None:
        super().check()
        for (group, slot), stored in self._announced.items():
            assert self._slots[group].blocks.get(stored.key) is stored, "an announced block is gone"
            assert stored.slot == slot, "an announced block is elsewhere"
        known = {id(block) for group in self._elsewhere for block in group.values()}
        assert known <= {id(block) for block in self._places.values()}, "a block of another engine has no place"
