"""One engine's part of the shared pool, and its view of the others' (decisions/0039).

A part begins with a page that says whose it is, and how it is laid out. Then come the last changes, as a ring of places; a
record for each slot, which says what the slot holds; and the slots. A record has the key of its block with it, sealed under the
pool's secret, so what a record's wiping leaves behind cannot be opened. Nothing here is trusted: whatever is torn, stale,
misplaced or forged does not open, which is a miss.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.engine.kv_pool import PAGE_BYTES, PoolSeat
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.locked_keys import lock_keys
from cloister.kv import BlockGroup, KVFormat
from cloister.kv.lent_tier import LendingTierIndex, count_kept
from cloister.kv.shared_tier import SharedTierIndex
from cloister.kv.tier_admission import AdmissionFactory, AdmitAll
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.types.errors import ConfigError

RECORD_BYTES: Final = 192
RING_WORDS: Final = 8192
"""How many changes others may lag behind before they read all records again."""
MAX_FOLLOWED: Final = 256
"""Records to read between two steps: this takes some milliseconds."""
NUMBER_BITS: Final = 40
"""Bits that number the sealings of one engine; the other bits tell engines apart."""
_WORD: Final = 8
_WRITER, _HEAD, _NUM_WORDS = 0, 1, 2
_WANTS, _OFFER = PAGE_BYTES // _WORD - 2, PAGE_BYTES // _WORD - 1
"""Words at the end of a part's first page: whether its engine would borrow; and an odd number while it lends, which grows."""
_RING_BYTES: Final = RING_WORDS * _WORD
_FIXED_BYTES: Final = PAGE_BYTES + _RING_BYTES
_PLACE_BITS: Final = 48
_LENGTH_BYTES: Final = 2

_encode: Final = msgspec.msgpack.Encoder().encode


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """What a part is. `format`: digest of the `KVFormat` of its blocks."""

    format: bytes
    block_bytes: tuple[int, ...]
    num_slots: tuple[int, ...]


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """What a slot holds, as in `TierBlock`, and under which key."""

    root: bytes
    owner: bytes
    key: bytes
    entry: int
    data_key: bytes


_decode_header: Final = msgspec.msgpack.Decoder(_Header).decode
_decode_record: Final = msgspec.msgpack.Decoder(_Record).decode


@dataclass(frozen=True, slots=True)
class LentSlots:
    """Slots that an engine lends.

    Attributes:
        home: its part.
        writer: the engine.
        epoch: grows whenever it takes them back.
        firsts: where those of each group begin.
    """

    home: int
    writer: int
    epoch: int
    firsts: tuple[int, ...]


@dataclass(slots=True)
class _Part:
    """The layout of a part, and how far this engine has followed it.

    Attributes:
        writer: the engine that wrote it.
        is_readable: its blocks have this engine's format.
        head: changes that are known.
        unread: records still to be read; at first all.
    """

    start: int
    layout: TierLayout
    writer: int
    is_readable: bool = True
    head: int = 0
    unread: Iterator[int] = field(default_factory=lambda: iter(()))

    @property
    def num_records(self) -> int:
        return sum(self.layout.num_slots)

    @property
    def slots_start(self) -> int:
        return self.start + _FIXED_BYTES + math.ceil(self.num_records * RECORD_BYTES / PAGE_BYTES) * PAGE_BYTES

    def list_lent(self) -> tuple[int, ...]:
        """Returns where the slots of each group begin that this part's engine lends."""
        kept = count_kept(self.layout)
        return tuple(self.slots_start + self.layout.place(group, num_kept) for group, num_kept in enumerate(kept))

    def record_start(self, place: int) -> int:
        return self.start + _FIXED_BYTES + place * RECORD_BYTES

    def place_of(self, block: TierBlock) -> int:
        """Returns the number of a block's record."""
        return sum(self.layout.num_slots[: block.group]) + block.slot

    def find_slot(self, place: int) -> tuple[int, int]:
        """Returns the group and slot of a record."""
        for group, num_slots in enumerate(self.layout.num_slots):
            if place < num_slots:
                return group, place
            place -= num_slots
        raise IndexError("no such record")


class PoolMember:
    """An engine in the pool.

    Args:
        fd: the pool, which is its own from now on.
        seat: its place in the pool, from the front.
        form: the format of this engine's KV.
        groups: its groups of layers.
        name: of the tier.
        num_shares: owners that may have blocks at once.
        number: of the tier, among those of this engine.
        make_admission: as of `KVTierIndex`.
        lends: the next engine may use a part of this one's slots (`kv.lent_tier`), and this one those of another.

    Raises:
        ConfigError: the part is too small, or there is no memory for it.

    Attributes:
        index: this engine's view of the tier.
        file: the own part and those of others with the same format, as a tier.
    """

    def __init__(
        self,
        fd: int,
        seat: PoolSeat,
        form: KVFormat,
        groups: Sequence[BlockGroup],
        name: str,
        num_shares: int = 1,
        number: int = 0,
        make_admission: AdmissionFactory = AdmitAll,
        *,
        lends: bool = False,
    ) -> None:
        fixed_bytes = _FIXED_BYTES + PAGE_BYTES  # records may end within a page
        layout = TierLayout.plan(
            seat.part_bytes, form.sizes, groups, num_shares, fixed_bytes=fixed_bytes, record_bytes=RECORD_BYTES
        )
        self._seat, self._format = msgspec.structs.replace(seat, secret=b""), form.digest
        self._keys = lock_keys()
        self._secret = self._keys.put(seat.secret)
        self._own = _Part(seat.part * seat.part_bytes, layout, seat.writer)
        self._others: dict[int, _Part] = {}
        self._memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        self._words = self._memory.cast("Q")
        own = mmap.mmap(fd, _FIXED_BYTES, offset=self._own.start)
        self._own_words = memoryview(own).cast("Q")
        first_number = (seat.writer << NUMBER_BITS) + 1
        make_index = LendingTierIndex if lends else SharedTierIndex
        self.index = make_index(name, layout, num_shares, number, first_number=first_number, make_admission=make_admission)
        self.file = TierFile(name, fd, layout, is_memory=True, is_shared=True, start=self._own.slots_start)
        self._open()

    def _open(self) -> None:
        """Writes the owner and layout of the part, which the front has wiped."""
        header = _encode(_Header(self._format, self._own.layout.block_bytes, self._own.layout.num_slots))
        sealed = self._seal(self._seat.writer << NUMBER_BITS, self._seat.part, header)
        # Writes all of it, because touching a mapped page that the system cannot provide ends the process.
        if not self._write(self._own.start, (bytes(_NUM_WORDS * _WORD) + sealed).ljust(_FIXED_BYTES, b"\0")):
            raise ConfigError("there is no memory for the KV tier; give kv_tier a smaller size", param="kv_tier")
        self._own_words[_WRITER] = self._seat.writer

    # What the others shall know

    def announce(self, find_secret: Callable[[bytes], bytes | None]) -> None:
        """Announces what is gone, what was written, and what was used of others. Call it before slots are written again.

        Args:
            find_secret: returns the key of a chain's blocks.
        """
        if isinstance(self.index, LendingTierIndex) and self.index.is_lending != self._own_words[_OFFER] % 2:
            self._own_words[_OFFER] += 1
        for block in self.index.take_withdrawn():
            self._put(block, bytes(RECORD_BYTES))
        for block in self.index.take_news():
            secret = find_secret(block.root)
            if secret is not None:
                record = _encode(_Record(block.root, block.owner, block.key, block.entry, secret))
                self._put(block, self._seal(block.number, (self._seat.part, block.group, block.slot), record))
        for block in self.index.take_used_elsewhere():
            if block.home is not None and (part := self._others.get(block.home)) is not None:
                self._tell(block.home, part.place_of(block))

    def _put(self, block: TierBlock, record: bytes) -> None:
        place = self._own.place_of(block)
        if len(record) <= RECORD_BYTES and self._write(self._own.record_start(place), record):
            self._tell(self._seat.part, place)

    def _write(self, start: int, content: bytes) -> bool:
        """Writes to the own part; returns whether there was memory for it."""
        try:
            return os.pwrite(self.file.fd, content, start) == len(content)
        except OSError:
            return False

    def _tell(self, part: int, place: int) -> None:
        head = self._own_words[_HEAD]
        self._own_words[PAGE_BYTES // _WORD + head % RING_WORDS] = part << _PLACE_BITS | place
        self._own_words[_HEAD] = head + 1

    def _seal(self, number: int, where: object, content: bytes) -> bytes:
        sealed = self._cipher().encrypt(_nonce(number), content, _encode(("cloister/kv-pool/1", where)))
        return number.to_bytes(_WORD, "little") + len(sealed).to_bytes(_LENGTH_BYTES, "little") + sealed

    def _cipher(self) -> AESGCM:
        cipher = self._keys.cipher(self._secret)
        assert cipher is not None  # it is kept for as long as the engine runs
        return cipher

    def _unseal(self, sealed: bytes, where: object) -> tuple[int, bytes] | None:
        """Returns the number and content of what another engine sealed for this place; None if it did not.

        Args:
            sealed: a copy, so that nobody can change it between the check and its use.
        """
        number = int.from_bytes(sealed[:_WORD], "little")
        end = _WORD + _LENGTH_BYTES + int.from_bytes(sealed[_WORD : _WORD + _LENGTH_BYTES], "little")
        if not number or end > len(sealed):
            return None
        try:
            content = self._cipher().decrypt(
                _nonce(number), sealed[_WORD + _LENGTH_BYTES : end], _encode(("cloister/kv-pool/1", where))
            )
        except (InvalidTag, ValueError):
            return None
        return number, content

    # Loans

    def find_offer(self) -> LentSlots | None:
        """Returns what the next engine lends; None if it lends nothing that this engine can use. Each engine is the next of
        exactly one other, so two never borrow the same slots for long."""
        home = self._find_neighbour(1)
        part = None if home is None else self._others.get(home)
        if home is None or part is None or not part.is_readable or part.layout != self._own.layout:
            return None
        epoch = self._word(home, _OFFER)
        if self._word(home, _WRITER) != part.writer or not epoch % 2:
            return None
        return LentSlots(home, part.writer, epoch, part.list_lent())

    @property
    def own_lent(self) -> LentSlots:
        """The slots that this engine lends."""
        return LentSlots(self._seat.part, self._seat.writer, 0, self._own.list_lent())

    def ask_for_loan(self, *, wants: bool) -> None:
        """Tells the next engine whether this one would borrow."""
        self._own_words[_WANTS] = wants

    def is_asked(self) -> bool:
        """Whether the engine before this one would borrow."""
        home = self._find_neighbour(-1)
        return home is not None and bool(self._word(home, _WANTS))

    def _find_neighbour(self, direction: int) -> int | None:
        """Returns the next part in the circle that has an engine."""
        homes = ((self._seat.part + direction * distance) % self._seat.num_parts for distance in range(1, self._seat.num_parts))
        return next((home for home in homes if self._word(home, _WRITER)), None)

    def _word(self, home: int, word: int) -> int:
        return self._words[home * self._seat.part_bytes // _WORD + word]

    # What the others say

    def follow(self) -> bool:
        """Notes what other engines have announced. Returns whether there is more, which the next call reads."""
        budget = MAX_FOLLOWED
        for home in range(self._seat.num_parts):
            if home != self._seat.part and budget > 0:
                budget = self._follow(home, budget)
        return budget <= 0

    def _follow(self, home: int, budget: int) -> int:
        """Follows one part for at most this many records; returns how many are left."""
        first = home * self._seat.part_bytes // _WORD
        writer, part = self._words[first + _WRITER], self._others.get(home)
        if part is None or part.writer != writer:
            if part is not None:
                self.index.forget_part(home)
                del self._others[home]
            part = self._meet(home, writer) if writer else None
        if part is None or not part.is_readable:
            return budget
        for place in islice(part.unread, budget):
            self._look(home, part, place)
            budget -= 1
        ring = first + PAGE_BYTES // _WORD
        while budget > 0 and part.head != self._words[first + _HEAD]:
            told, place = divmod(self._words[ring + part.head % RING_WORDS], 1 << _PLACE_BITS)
            if not 0 <= self._words[first + _HEAD] - part.head < RING_WORDS:  # it may have been overwritten by now
                part.unread, part.head = iter(range(part.num_records)), self._words[first + _HEAD]
                return 0  # the next call goes on
            part.head += 1
            budget -= 1
            if told == home and place < part.num_records:
                self._look(home, part, place)
            elif told == self._seat.part and place < self._own.num_records:
                self.index.note_used(*self._own.find_slot(place))
        return budget

    def _meet(self, home: int, writer: int) -> _Part | None:
        """Returns the part of an engine that is new; None if it cannot be read yet."""
        start = home * self._seat.part_bytes
        sealed = bytes(self._memory[start + _NUM_WORDS * _WORD : start + PAGE_BYTES])
        opened = self._unseal(sealed, home)
        if opened is None or opened[0] != writer << NUMBER_BITS:
            return None
        header = _decode_header(opened[1])
        part = _Part(start, TierLayout(header.block_bytes, header.num_slots), writer)
        part.is_readable = header.format == self._format
        part.head = self._words[start // _WORD + _HEAD]
        part.unread = iter(range(part.num_records))
        self._others[home] = part
        if part.is_readable:
            self.file.add_part(home, part.layout, part.slots_start)
        return part

    def _look(self, home: int, part: _Part, place: int) -> None:
        group, slot = part.find_slot(place)
        found = self._read_record(home, part, group, slot, place)
        block = None
        if found is not None and found[0] >> NUMBER_BITS == part.writer:
            number, record = found
            block = TierBlock(record.root, record.owner, record.key, record.entry, group, slot, number, home=home)
        self.index.note_elsewhere(home, group, slot, block)

    def _read_record(self, home: int, part: _Part, group: int, slot: int, place: int) -> tuple[int, _Record] | None:
        start = part.record_start(place)
        opened = self._unseal(bytes(self._memory[start : start + RECORD_BYTES]), (home, group, slot))
        return None if opened is None else (opened[0], _decode_record(opened[1]))

    def find_cipher(self, block: TierBlock) -> AESGCM | None:
        """Returns the cipher that opens a block of another engine while its record is valid; None after that. For any
        thread.
        """
        part = self._others.get(block.home) if block.home is not None else None
        if part is None:
            return None
        found = self._read_record(block.home or 0, part, block.group, block.slot, part.place_of(block))
        if found is None or found[0] != block.number:
            return None
        return AESGCM(found[1].data_key)


def _nonce(number: int) -> bytes:
    """Returns a 12-byte nonce that is used once: each number belongs to one sealing of one engine."""
    return number.to_bytes(12, "big")
