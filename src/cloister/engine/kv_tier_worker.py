"""Writes and reads the blocks of an engine's tiers in threads beside the steps (decisions/0029).

A block is sealed with AES-256-GCM under the key of its chain (scope and adapter), together with its description: format, root,
prefix key, entry, group and number of its sealing. Anything else in its slot does not open, so it is a miss. A block that moves
to another tier stays sealed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import compress
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.engine.buffer_pool import BufferPool
from cloister.engine.kv_tier_codec import TierCodec
from cloister.engine.kv_tier_files import PROBE_BLOCKS, TierFile
from cloister.engine.kv_tier_opener import BlockOpener, describe_block, describe_chain, find_opener, make_nonce, pack_record
from cloister.engine.locked_keys import lock_keys
from cloister.kv import KVFormat
from cloister.kv.objects import KVHeader, RestoredEntry
from cloister.kv.tier_index import MAX_TRIAL_BYTES
from cloister.kv.tier_slots import TAG_BYTES, TierBlock, TierLayout
from cloister.scheduler.kv_restores import TRIAL, TierEntry, TierRead
from cloister.types.errors import ConfigError
from cloister.types.logs import describe

NUM_READERS: Final = 2
"""Number of requests for which each tier reads at once."""
PROBE_TIMEOUT_S: Final = 5.0
_PROBE_BYTES: Final = 8 * 2**20
_PROBE_FILL_S: Final = 0.5
_LEAST_DEPTH: Final = 2
"""One thread opens while another one reads."""
_MOST_FREE_BYTES: Final = 16 * 2**20
"""Memory kept for blocks that will be opened: about as much as can wait for steps."""

_NUM_TRIALS: Final = 5

_logger = logging.getLogger(__name__)


class ReadMeasure:
    """How long a read took, by tier.

    Attributes:
        num_bytes, elapsed_s: of each tier; time counts for the tier whose blocks arrived last.
    """

    def __init__(self, num_tiers: int) -> None:
        self.num_bytes, self.elapsed_s = [0] * num_tiers, [0.0] * num_tiers

    def add(self, tier: int, num_bytes: int, elapsed_s: float) -> None:
        self.num_bytes[tier] += num_bytes
        self.elapsed_s[tier] += elapsed_s


class _Read:
    """One read, shared by its thread and the engine's."""

    def __init__(self, read: TierRead, cipher: AESGCM | None, opener: BlockOpener | None = None) -> None:
        self.read, self.cipher, self.opener = read, cipher, opener
        self.deadline_s = time.monotonic() + read.timeout_s
        self.is_cancelled = False
        self.objects: list[RestoredEntry] = []
        self.measure = ReadMeasure(len(read.tier_bytes))
        self.num_arrived = 0
        self.unreadable: TierBlock | None = None
        self.is_complete: bool | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any longer."""
        return self.is_cancelled or time.monotonic() > self.deadline_s

    def tell(self) -> TierArrival:
        arrived = sum(self.measure.num_bytes) / max(1, self.read.num_bytes)
        return TierArrival(
            self.read,
            self.objects,
            self.num_arrived,
            list(zip(self.measure.num_bytes, self.measure.elapsed_s, strict=True)),
            arrived * self.read.compute_s - sum(self.measure.elapsed_s),
            self.unreadable,
            self.is_complete,
        )


class TierArrival(msgspec.Struct, frozen=True):
    """The new results of a read since the last call.

    Attributes:
        num_arrived: entries of the whole read so far.
        measured: (bytes, seconds) of each tier, of the whole read so far.
        saved_s: how much faster it was than computing is predicted to be.
        unreadable: a block that could not be opened.
        is_complete: whether everything came; None while more may come.
    """

    read: TierRead
    objects: list[RestoredEntry]
    num_arrived: int
    measured: list[tuple[int, float]]
    saved_s: float
    unreadable: TierBlock | None
    is_complete: bool | None

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.measured)


class TierWorker:
    """The files of an engine's tiers, and the keys of what is in them.

    Args:
        files: of each tier.
        form: the format of this engine's KV.
        find_cipher: returns the cipher for a block of another engine, in any thread; None: it can no longer be opened.
        codec: compresses blocks before they are sealed; None: they are stored uncompressed.
    """

    def __init__(
        self,
        files: Sequence[TierFile],
        form: KVFormat,
        find_cipher: Callable[[TierBlock], AESGCM | None] = lambda block: None,
        codec: TierCodec | None = None,
    ) -> None:
        self.files, self._format = list(files), form.digest
        self._codec, self._contents = codec, form.sizes
        self._stored_form = b""  # the codec's part of the authenticated data
        self._is_chosen = False
        self._slot_bytes = self.files[0].layout.slot_bytes  # the same in all of them
        self._keys = lock_keys()
        self._key_of: dict[bytes, int] = {}  # by root
        self._has_warned = False
        self._find_cipher = find_cipher
        self._make_opener = None if codec is not None else find_opener()  # streams are opened one after the other
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._reads: dict[str, _Read] = {}
        self._given_up: set[_Read] = set()
        self._written: list[list[tuple[TierBlock, bool]]] = [[] for _ in files]
        self._busy_s = [0.0] * len(self.files)
        self._unwritten: list[deque[Callable[[], None]]] = [deque() for _ in files]
        self._writers = [ThreadPoolExecutor(1, f"cloister-kv-write-{file.name}") for file in files]
        self._readers = [ThreadPoolExecutor(NUM_READERS, f"cloister-kv-read-{file.name}") for file in files]
        self._openers = ThreadPoolExecutor(_LEAST_DEPTH, "cloister-kv-open")
        self._buffers = BufferPool(_MOST_FREE_BYTES)
        self._sealing = memoryview(bytearray(max(self._slot_bytes)))  # of the first tier's writer, which alone seals

    def probe(self) -> list[tuple[int, float]]:
        """Measures reads of each file, chooses how to read it, and reads some blocks; returns (bytes, seconds that this took).

        Raises:
            ConfigError: a file does not work, or takes very long.
        """
        measured = []
        for tier, readers in enumerate(self._readers):
            try:
                measured.append(readers.submit(self._probe, tier).result(PROBE_TIMEOUT_S))
            except (OSError, TimeoutError) as error:
                slow = f"no answer within {PROBE_TIMEOUT_S:.0f} s"
                why = slow if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
                raise ConfigError(
                    f"the KV tier {self.files[tier].name} cannot be written and read: {why}; "
                    "choose another place, or a smaller size",
                    param="kv_tier",
                ) from error
        depth = max(file.pattern.depth for file in self.files)
        if depth > _LEAST_DEPTH:
            self._openers.shutdown(wait=False)
            self._openers = ThreadPoolExecutor(depth, "cloister-kv-open")
        return measured

    # Called by the engine's thread

    def on_news(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, from any thread, when there is something to take."""
        self._wake = wake

    def choose_level(self, byte_s: float) -> None:
        """Has the codec measure its levels beside the steps, and choose one for a tier that reads a byte in this time;
        `take_choice` reports when it has."""
        self._enqueue(0, partial(self._choose_level, byte_s))

    def take_choice(self) -> bool:
        """Returns, once, that the codec has chosen."""
        is_chosen, self._is_chosen = self._is_chosen, False
        return is_chosen

    def use_layouts(self, layouts: Sequence[TierLayout]) -> None:
        """Divides the files anew, before the first block is written."""
        for file, layout in zip(self.files, layouts, strict=True):
            file.use_layout(layout)
        self._slot_bytes = layouts[0].slot_bytes

    def write(self, block: TierBlock, content: bytes) -> None:
        """Seals and writes a block, after earlier ones; `take_written` reports when."""
        key = self._key_of.get(block.root)
        if key is None:
            try:
                key = self._key_of[block.root] = self._keys.draw()
            except OSError as error:
                self._refuse(block, error)
                return
        self._enqueue(block.tier, partial(self._seal, block, key, content))

    def move(self, block: TierBlock, moved: TierBlock) -> None:
        """Copies a block to another tier, after earlier writes; `take_written` reports when."""
        self._enqueue(block.tier, partial(self._fetch, block, moved))

    def read(self, read: TierRead) -> None:
        """Reads entries in order; `take_read` returns them, and finally `is_complete`; nothing after `cancel`."""
        key = self._key_of.get(read.root)
        cipher = None if key is None else self._keys.cipher(key)
        make = self._make_opener
        job = _Read(read, cipher, None if key is None or make is None else self._keys.use(key, make))
        with self._lock:
            self._reads[read.request_id] = job
        self._readers[read.slowest].submit(self._run, job)

    def cancel(self, request_id: str) -> tuple[int, int, float] | None:
        """Ends a read. Returns (tier, bytes, seconds) of one that is late: its slowest tier would take at least this long."""
        with self._lock:
            job = self._reads.pop(request_id, None)
            if job is None:
                return None
            job.is_cancelled = True
            if job.is_complete is not None:
                return None
            self._given_up.add(job)
            late_s, slowest = time.monotonic() - job.deadline_s, job.read.slowest
            return (slowest, job.read.tier_bytes[slowest], job.read.timeout_s + late_s) if late_s > 0 else None

    def find_secret(self, root: bytes) -> bytes | None:
        """Returns the key of a chain's blocks, to be announced under another key; None if it was forgotten."""
        key = self._key_of.get(root)
        return None if key is None else self._keys.copy(key)

    def forget(self, root: bytes) -> None:
        """Forgets a key: nothing that it sealed can be opened again."""
        key = self._key_of.pop(root, None)
        if key is not None:
            self._keys.forget(key)

    def is_stuck(self, tier: int) -> bool:
        """Whether a cancelled read that needs this tier most still runs."""
        return bool(self._given_up) and any(job.read.slowest == tier for job in list(self._given_up))

    @property
    def has_read(self) -> bool:
        """Whether something has come; anything that comes later wakes the engine."""
        return bool(self._reads) and any(job.objects or job.is_complete is not None for job in list(self._reads.values()))

    def take_read(self) -> list[TierArrival]:
        """Removes and returns what has come."""
        if not self._reads:
            return []
        with self._lock:
            taken = []
            for request_id, job in list(self._reads.items()):
                if job.objects or job.is_complete is not None:
                    taken.append(job.tell())
                    job.objects = []
                    if job.is_complete is not None:
                        del self._reads[request_id]
            return taken

    def take_written(self, tier: int) -> tuple[list[tuple[TierBlock, bool]], float]:
        """Removes and returns blocks that were written to a tier, or could not be, and the processor time that this took."""
        if not self._written[tier]:
            return [], 0.0
        with self._lock:
            written, self._written[tier] = self._written[tier], []
            busy_s, self._busy_s[tier] = self._busy_s[tier], 0.0
            return written, busy_s

    def close(self) -> None:
        """Ends the threads and forgets all keys. The files go with the last thread."""
        with self._lock:
            for job in self._reads.values():
                job.is_cancelled = True
            self._reads.clear()
        for file, unwritten in zip(self.files, self._unwritten, strict=True):
            file.is_full = True
            unwritten.clear()
        self._key_of.clear()
        self._keys.clear()
        self._buffers.close()
        for threads in (*self._writers, *self._readers, self._openers):
            threads.shutdown(wait=False, cancel_futures=True)

    # In threads that write

    def _enqueue(self, tier: int, job: Callable[[], None]) -> None:
        """Gives the writer of a tier a job, after earlier ones. Only one thread gives jobs to a tier."""
        unwritten = self._unwritten[tier]
        unwritten.append(job)
        if len(unwritten) == 1:  # else its thread will come to it
            with contextlib.suppress(RuntimeError):  # it was closed
                self._writers[tier].submit(self._write_all, tier)

    def _write_all(self, tier: int) -> None:
        while True:
            try:
                job = self._unwritten[tier].popleft()
            except IndexError:
                return
            job()

    def _refuse(self, block: TierBlock, error: OSError) -> None:
        """Stores no block of a chain if no memory can be locked for its key."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "the KV tiers store nothing of further conversations: their keys need memory that is not swapped, and no "
                "more may be locked (%s); raise the limit (`ulimit -l`)",
                error.strerror,
            )
        self._note_written(block, 0.0, is_written=False)

    def _seal(self, block: TierBlock, key: int, content: bytes) -> None:
        started_s = time.thread_time()
        stored = content if self._codec is None else self._codec.encode(block.group, content)
        is_written = False
        cipher = self._keys.cipher(key)  # None: it was forgotten meanwhile
        if stored is not None and cipher is not None:
            sealed = self._sealing[: self.files[block.tier].count_sealed(block)]
            cipher.encrypt_into(make_nonce(block), stored, self._describe(block), sealed)
            is_written = self._write(block, sealed)
        self._note_written(block, time.thread_time() - started_s, is_written=is_written)

    def _choose_level(self, byte_s: float) -> None:
        assert self._codec is not None
        try:
            chosen = self._codec.choose(byte_s)
        except Exception as error:  # a thread must not end in silence
            _logger.warning("the KV tiers store nothing, because their codec could not be measured: %s", describe(error))
            return
        self._stored_form = chosen.level.name.encode()
        share = 100 * sum(chosen.stored_bytes) / sum(self._contents)
        _logger.info("the KV tiers store at level %s: %.0f%% of the bytes", chosen.level.name, share)
        self._is_chosen = True
        self._wake()

    def _fetch(self, block: TierBlock, moved: TierBlock) -> None:
        """Reads a block that moves, before its slot is written again; the other tier's thread may have to wait for a disk."""
        started_s = time.thread_time()
        try:
            sealed = self.files[block.tier].read_sealed(block)
        except OSError:
            sealed = b""
        self._enqueue(moved.tier, partial(self._put, moved, sealed, time.thread_time() - started_s))

    def _put(self, moved: TierBlock, sealed: bytes, busy_s: float) -> None:
        started_s = time.thread_time()
        is_written = len(sealed) == self.files[moved.tier].count_sealed(moved) and self._write(moved, sealed)
        self._note_written(moved, busy_s + time.thread_time() - started_s, is_written=is_written)

    def _write(self, block: TierBlock, sealed: bytes | memoryview) -> bool:
        return self.files[block.tier].write(block, sealed)

    def _note_written(self, block: TierBlock, busy_s: float, *, is_written: bool) -> None:
        with self._lock:
            self._written[block.tier].append((block, is_written))
            self._busy_s[block.tier] += busy_s

    # In threads that read

    def _run(self, job: _Read) -> None:
        is_complete = False
        try:
            is_complete = self._read_all(job)
        except Exception as error:  # a thread must not end silently: the request would wait for its deadline
            _logger.warning("the KV tier could not be read: %s", describe(error))
        finally:
            job.cipher = job.opener = None
            with self._lock:
                job.is_complete = is_complete
                self._given_up.discard(job)
            self._wake()

    def _read_all(self, job: _Read) -> bool:
        """Reads parts in order, some at a time: one is read while another one is opened."""
        last_s = time.perf_counter()
        parts = deque(self._divide(job.read.entries, job.read.max_part_bytes))
        opening: deque[tuple[list[TierEntry], int, Future[dict[int, memoryview]]]] = deque()
        while parts or opening:
            while parts and len(opening) < max(_LEAST_DEPTH, self.files[parts[0][1]].pattern.depth):
                part, tier = parts.popleft()
                opening.append((part, tier, self._openers.submit(self._open, job, part)))
            part, tier, opened = opening.popleft()
            found = self._make_objects(job, part, opened.result())
            now_s = time.perf_counter()
            with self._lock:
                job.measure.add(tier, self._count_stored(part[: len(found)]), now_s - last_s)
                job.objects += found
                job.num_arrived += len(found)
            last_s = now_s
            if len(found) < len(part):
                for _, _, other in opening:
                    other.cancel()
                return False
            self._wake()
        return True

    def _divide(self, entries: Sequence[TierEntry], max_part_bytes: int | None = None) -> Iterator[tuple[list[TierEntry], int]]:
        """Divides entries into parts of about the size of a read, each with the slowest tier that it needs."""
        part: list[TierEntry] = []
        num_bytes = tier = 0
        for entry in entries:
            slowest = entry_bytes = 0
            for block in entry.blocks:
                if block is not None:
                    slowest = max(slowest, block.tier)
                    entry_bytes += self._slot_bytes[block.group]
            if part and slowest != tier:
                yield part, tier
                part, num_bytes = [], 0
            tier = slowest
            part.append(entry)
            num_bytes += entry_bytes
            limit_bytes = self.files[tier].pattern.block_bytes
            if num_bytes >= (limit_bytes if max_part_bytes is None else min(limit_bytes, max_part_bytes)):
                yield part, tier
                part, num_bytes = [], 0
        if part:
            yield part, tier

    def _count_stored(self, entries: Sequence[TierEntry]) -> int:
        sizes = self.files[0].layout.block_bytes
        return sum([sizes[block.group] for entry in entries for block in entry.blocks if block is not None])

    def _make_objects(self, job: _Read, part: Sequence[TierEntry], opened: dict[int, memoryview]) -> list[RestoredEntry]:
        """Returns the entries of a part up to the first block that could not be opened, which it notes."""
        objects: list[RestoredEntry] = []
        for entry in part:
            contents: list[bytes | memoryview] = []
            for block in entry.blocks:
                content = b"" if block is None else opened.get(block.number)
                if content is None:
                    job.unreadable = None if job.is_over else block
                    return objects
                contents.append(content)
            header = KVHeader(self._format, job.read.root, entry.key, entry.entry, tuple(map(len, contents)))
            objects.append(RestoredEntry(header, tuple(contents)))
        return objects

    def _open(self, job: _Read, part: Sequence[TierEntry]) -> dict[int, memoryview]:
        """Reads the blocks of a part, neighbours at once, and returns the contents of those that open, by number."""
        opened: dict[int, memoryview] = {}
        blocks = [block for entry in part for block in entry.blocks if block is not None]
        sizes, contents, codec = self.files[0].layout.block_bytes, self._contents, self._codec
        room, num_filled = self._buffers.take(sum([contents[block.group] for block in blocks])), 0
        streams = room if codec is None else self._buffers.take(max(sizes))
        for tier, file in enumerate(self.files):
            for run in file.list_runs([block for block in blocks if block.tier == tier]):
                if job.is_over:
                    return opened
                try:
                    sealed = file.read_run(run)
                except OSError:
                    continue
                filled = room[num_filled:]
                num_filled += sum([contents[block.group] for _, block in run])
                if job.opener is not None and all(block.home is None for _, block in run):
                    opened |= self._open_at_once(job.opener, job.read.root, run, sealed, filled)
                else:
                    opened |= self._open_each(job, run, sealed, filled, streams)
        return opened

    def _open_at_once(
        self, opener: BlockOpener, root: bytes, run: Sequence[tuple[int, TierBlock]], sealed: memoryview, room: memoryview
    ) -> dict[int, memoryview]:
        """Opens neighbours of one chain with one call."""
        contents, first, num_filled = self._contents, run[0][0], 0
        records, filled = [], []
        for place, block in run:
            size = contents[block.group]
            records.append(pack_record(block, place - first, size, num_filled))
            filled.append((block.number, room[num_filled : num_filled + size]))
            num_filled += size
        is_open = opener.open(sealed, describe_chain(self._form, root), b"".join(records), room)
        return dict(compress(filled, is_open))

    def _open_each(
        self, job: _Read, run: Sequence[tuple[int, TierBlock]], sealed: memoryview, room: memoryview, streams: memoryview
    ) -> dict[int, memoryview]:
        """Opens neighbours one after the other."""
        sizes, contents, codec = self.files[0].layout.block_bytes, self._contents, self._codec
        opened: dict[int, memoryview] = {}
        first, num_filled = run[0][0], 0
        for place, block in run:  # this loop is the cost of a small block besides cryptography
            begin, size = place - first, sizes[block.group]
            content = room[num_filled : num_filled + contents[block.group]]
            num_filled += len(content)
            cipher = job.cipher if block.home is None else self._find_cipher(block)
            if cipher is None:
                continue
            is_coded = codec is not None and codec.is_coded(block.group)
            stored = streams[:size] if is_coded else content
            try:
                cipher.decrypt_into(make_nonce(block), sealed[begin : begin + size + TAG_BYTES], self._describe(block), stored)
            except (InvalidTag, ValueError):
                continue
            if codec is None or not is_coded or codec.decode(block.group, stored, content):
                opened[block.number] = content
        return opened

    @property
    def _form(self) -> bytes:
        return self._format + self._stored_form

    def _describe(self, block: TierBlock) -> bytes:
        """Returns the data that are authenticated together with the contents of a block."""
        return describe_chain(self._form, block.root) + describe_block(block)

    # When it starts

    def _probe(self, tier: int) -> tuple[int, float]:
        """Fills a file's beginning with blocks that nobody owns, and reads them as loads do."""
        file = self.files[tier]
        file.extend()
        key = AESGCM.generate_key(256)
        cipher = AESGCM(key)
        blocks = self._fill(tier, cipher)
        size = file.layout.block_bytes[blocks[0].group]
        file.choose_pattern(file.count_slots(blocks))
        file.drop_page_cache()
        blocks = blocks[: max(1, MAX_TRIAL_BYTES // size)]
        opener = None if self._make_opener is None else self._make_opener(memoryview(key))
        if opener is not None and not self._is_worth(opener, cipher, file, blocks):
            opener = self._make_opener = None
        entries = [TierEntry(block.entry, b"", (block,)) for block in blocks]
        tier_bytes = [0] * len(self.files)
        tier_bytes[tier] = len(entries) * size
        job = _Read(TierRead(TRIAL, [], b"", entries, tier_bytes, PROBE_TIMEOUT_S), cipher, opener)
        if not self._read_all(job):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return job.measure.num_bytes[tier], job.measure.elapsed_s[tier]

    def _is_worth(self, opener: BlockOpener, cipher: AESGCM, file: TierFile, blocks: Sequence[TierBlock]) -> bool:
        """Whether opening these with one call is faster than one after the other, as loads do it: in threads that need
        Python's lock at the same time."""
        run = file.list_runs(blocks)[0]
        sealed = memoryview(bytes(file.read_run(run)))
        num_bytes = sum([self._contents[block.group] for _, block in run])
        rooms = [self._buffers.take(num_bytes) for _ in range(_LEAST_DEPTH)]
        job = _Read(TierRead(TRIAL, [], b"", [], [0], 0.0), cipher)
        ways = (
            lambda room: self._open_at_once(opener, b"", run, sealed, room),
            lambda room: self._open_each(job, run, sealed, room, room),
        )
        taken_s = [min([self._time_together(way, rooms) for _ in range(_NUM_TRIALS)]) for way in ways]
        return taken_s[0] <= taken_s[1]

    def _time_together(self, open_all: Callable[[memoryview], object], rooms: Sequence[memoryview]) -> float:
        """Returns the wall-clock time with one thread for each room."""
        started_s = time.perf_counter()
        for opened in [self._openers.submit(open_all, room) for room in rooms]:
            opened.result()
        return time.perf_counter() - started_s

    def _fill(self, tier: int, cipher: AESGCM) -> list[TierBlock]:
        """Writes blocks, as many as a slow disk takes in a while, and returns them."""
        file = self.files[tier]
        sizes = file.layout.block_bytes
        group = sizes.index(max(sizes))
        content, end_s = os.urandom(sizes[group]), time.monotonic() + _PROBE_FILL_S
        blocks: list[TierBlock] = []
        num_unsynced_bytes = 0
        slot_bytes = file.layout.slot_bytes[group]
        for slot in range(min(file.layout.num_slots[group], max(1, _PROBE_BYTES // slot_bytes))):
            block = TierBlock(b"", b"", b"", slot, group, slot, slot, tier)
            os.pwrite(file.fd, cipher.encrypt(make_nonce(block), content, self._describe(block)), file.place(block))
            blocks.append(block)
            num_unsynced_bytes += slot_bytes
            if num_unsynced_bytes >= PROBE_BLOCKS[-1]:
                os.fdatasync(file.fd)
                num_unsynced_bytes = 0
            if time.monotonic() > end_s:
                break
        os.fdatasync(file.fd)
        return blocks
