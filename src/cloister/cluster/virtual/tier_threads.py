"""Threads of the KV tiers of a virtual engine: blocks lie in a dictionary, and are written and read in virtual time.

Reads come in parts and late; slots are torn; disks become full. As where blocks are sealed, what is not the very block that was
stored does not open. Blocks of a pool, which engines share, lie in one dictionary of all of them; the pool in which they say
what they have and lend is the real one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.engine.kv_peer_loans import PEER
from cloister.engine.kv_pool import PAGE_BYTES, KVPool
from cloister.engine.kv_pool_member import RECORD_BYTES, RING_WORDS
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tier_worker import TierArrival
from cloister.kv import KVFormat
from cloister.kv.objects import KVHeader, RestoredEntry
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.scheduler.kv_restores import TierRead

PROBE: Final = (4096, 0.0004)
"""What every tier is said to have brought at the start, and in which time."""
ENTRY_S: Final = 0.0002
PART_ENTRIES: Final = 2
WRITE_S: Final = 0.001
SLOW: Final = 100.0
POOLED: Final = ("shared", PEER)
"""Names of the tiers that lie in a pool."""
_RESERVED_BYTES: Final = 3 * PAGE_BYTES + 8 * RING_WORDS


class _Stored(NamedTuple):
    """What lies in a slot.

    Attributes:
        secret: of the chain, and of the engine that wrote it.
        number: of the block; -1 if it is torn.
    """

    secret: bytes
    number: int
    content: bytes


_Slots = dict[int, _Stored]
"""What lies in the slots of a file, by where each begins."""


class VirtualPool:
    """Memory that the engines of a cluster share.

    Args:
        num_slots: of each engine.
        num_parts: engines that may run at once.

    Attributes:
        memory: what engines tell each other; no block is written there.
        slots: what lies in its slots.
    """

    def __init__(self, num_slots: int, slot_bytes: int, num_parts: int) -> None:
        self.memory = KVPool(_RESERVED_BYTES + num_slots * (slot_bytes + RECORD_BYTES), num_parts)
        self.slots: _Slots = {}


@dataclass(slots=True, eq=False)
class _Job:
    """A read.

    Attributes:
        num_arrived: entries so far.
        measured: (bytes, seconds) of each tier.
        given_up: it was cancelled.
    """

    read: TierRead
    deadline_s: float
    last_s: float
    measured: list[tuple[int, float]]
    objects: list[RestoredEntry] = field(default_factory=list)
    num_arrived: int = 0
    unreadable: TierBlock | None = None
    is_complete: bool | None = None
    given_up: bool = False


class VirtualTierThreads:
    """Writes and reads the blocks of one engine (protocol `engine.kv_tiers.TierThreads`).

    Args:
        files: of its tiers; nothing is written there.
        find_cipher: returns what opens a block of another engine, which that one has announced; None if it has not.
        wake: wakes the engine.
        draw: decides what goes wrong.
        damages: share of the blocks that are torn, of the reads that are late or never end, and of the writes that fail.
        pool: that it shares with other engines; None: it has none.
    """

    def __init__(
        self,
        files: Sequence[TierFile],
        form: KVFormat,
        find_cipher: Callable[[TierBlock], AESGCM | None],
        wake: Callable[[], None],
        draw: random.Random,
        damages: float,
        pool: VirtualPool | None = None,
    ) -> None:
        self.files = files
        self._form, self._wake, self._draw, self._damages = form, wake, draw, damages
        self._find_cipher = find_cipher
        self._loop = asyncio.get_running_loop()
        self._slots: list[_Slots] = [pool.slots if pool is not None and file.name in POOLED else {} for file in files]
        self._secrets: dict[bytes, bytes] = {}
        self._reads: dict[str, _Job] = {}
        self._given_up: set[_Job] = set()
        self._written: list[list[tuple[TierBlock, bool]]] = [[] for _ in files]
        self._free_s = [0.0 for _ in files]

    @property
    def num_open(self) -> int:
        """Number of reads in progress."""
        return len(self._reads)

    def probe(self) -> list[tuple[int, float]]:
        return [PROBE for _ in self.files]

    def on_news(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def choose_level(self, byte_s: float) -> None:
        """Has nothing to choose: nothing is compressed."""

    def take_choice(self) -> bool:
        return False

    def use_layouts(self, layouts: Sequence[TierLayout]) -> None:
        """Has nothing to place."""

    def write(self, block: TierBlock, content: bytes) -> None:
        if block.root not in self._secrets:
            self._secrets[block.root] = self._draw.randbytes(32)
        secret = self._secrets[block.root]
        self._enqueue(block.tier, lambda: self._store(block, secret, content))

    def move(self, block: TierBlock, moved: TierBlock) -> None:
        """Reads a block after what was to be written before to its tier, and then writes it to the other one."""

        def fetch() -> None:
            secret, content = self._secrets.get(moved.root), self._find(block)
            self._enqueue(moved.tier, lambda: self._store(moved, secret, content))

        self._enqueue(block.tier, fetch)

    def read(self, read: TierRead) -> None:
        now_s = self._loop.time()
        job = _Job(read, now_s + read.timeout_s, now_s, [(0, 0.0) for _ in self.files])
        self._reads[read.request_id] = job
        self._plan(job)

    def cancel(self, request_id: str) -> tuple[int, int, float] | None:
        job = self._reads.pop(request_id, None)
        if job is None:
            return None
        job.given_up = True
        if job.is_complete is not None:
            return None
        self._given_up.add(job)
        late_s, slowest = self._loop.time() - job.deadline_s, job.read.slowest
        return (slowest, job.read.tier_bytes[slowest], job.read.timeout_s + late_s) if late_s > 0 else None

    def find_secret(self, root: bytes) -> bytes | None:
        return self._secrets.get(root)

    def forget(self, root: bytes) -> None:
        self._secrets.pop(root, None)

    def is_stuck(self, tier: int) -> bool:
        return any(job.read.slowest == tier for job in self._given_up)

    @property
    def has_read(self) -> bool:
        return any(job.objects or job.is_complete is not None for job in self._reads.values())

    def take_read(self) -> list[TierArrival]:
        taken = []
        for request_id, job in list(self._reads.items()):
            if job.objects or job.is_complete is not None:
                taken.append(self._tell(job))
                job.objects = []
                if job.is_complete is not None:
                    del self._reads[request_id]
        return taken

    def take_written(self, tier: int) -> tuple[list[tuple[TierBlock, bool]], float]:
        written, self._written[tier] = self._written[tier], []
        return written, 0.0

    def close(self) -> None:
        """Forgets all keys and reads."""
        self._secrets.clear()
        self._reads.clear()

    def _fails(self) -> bool:
        return bool(self._damages) and self._draw.random() < self._damages

    def _enqueue(self, tier: int, job: Callable[[], None]) -> None:
        """Does a job of the writer of a tier after those before."""

        def work() -> None:
            job()
            self._wake()

        self._free_s[tier] = max(self._free_s[tier], self._loop.time()) + WRITE_S * (tier + 1)
        self._loop.call_at(self._free_s[tier], work)

    def _store(self, block: TierBlock, secret: bytes | None, content: bytes | None) -> None:
        """Writes a block, unless its chain was forgotten meanwhile, or what is to be moved does not open any more."""
        file, is_written = self.files[block.tier], False
        if secret is None or content is None or self._secrets.get(block.root) != secret or file.is_full:
            pass
        elif self._fails():
            file.is_full = self._draw.random() < 0.2
        else:
            number = -1 if self._fails() else block.number  # torn: it does not open any more
            self._slots[block.tier][file.place(block)] = _Stored(secret, number, content)
            is_written = True
        self._written[block.tier].append((block, is_written))

    def _plan(self, job: _Job) -> None:
        """Has the next part of a read come some time later."""
        slowness = SLOW if self._fails() else 1.0 + 4.0 * job.read.slowest
        self._loop.call_later(slowness * ENTRY_S * PART_ENTRIES, self._read_part, job)

    def _read_part(self, job: _Job) -> None:
        read, now_s = job.read, self._loop.time()
        if job.given_up:
            self._given_up.discard(job)
        elif now_s > job.deadline_s:
            job.is_complete = False
        else:
            part = read.entries[job.num_arrived : job.num_arrived + PART_ENTRIES]
            for entry in part:
                contents: list[bytes] = []
                for block in entry.blocks:
                    content = b"" if block is None else self._find(block)
                    if content is None:
                        job.unreadable, job.is_complete = block, False
                        break
                    contents.append(content)
                else:
                    header = KVHeader(self._form.digest, read.root, entry.key, entry.entry, tuple(map(len, contents)))
                    job.objects.append(RestoredEntry(header, tuple(contents)))
                    job.num_arrived += 1
                    self._measure(job, [block for block in entry.blocks if block is not None], now_s)
                    continue
                break
            if job.is_complete is None and job.num_arrived == len(read.entries):
                job.is_complete = True
            if job.is_complete is None:
                self._plan(job)
        self._wake()

    def _find(self, block: TierBlock) -> bytes | None:
        """Returns a block; None if it does not open."""
        found = self._slots[block.tier].get(self.files[block.tier].place(block))
        if found is None or found.number != block.number:
            return None
        opens = found.secret == self._secrets.get(block.root) if block.home is None else self._find_cipher(block) is not None
        return found.content if opens else None

    def _measure(self, job: _Job, blocks: Sequence[TierBlock], now_s: float) -> None:
        tier = max((block.tier for block in blocks), default=0)
        num_bytes, elapsed_s = job.measured[tier]
        sizes = self.files[tier].layout.block_bytes
        job.measured[tier] = num_bytes + sum(sizes[block.group] for block in blocks), elapsed_s + now_s - job.last_s
        job.last_s = now_s

    def _tell(self, job: _Job) -> TierArrival:
        arrived = sum(num_bytes for num_bytes, _ in job.measured) / max(1, job.read.num_bytes)
        saved_s = arrived * job.read.compute_s - sum(elapsed_s for _, elapsed_s in job.measured)
        return TierArrival(job.read, job.objects, job.num_arrived, job.measured[:], saved_s, job.unreadable, job.is_complete)
