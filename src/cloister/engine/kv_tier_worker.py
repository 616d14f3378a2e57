"""Writes and reads the blocks of a tier in threads beside the steps (decisions/0029).

A block is sealed with AES-256-GCM under the key of its chain (scope and adapter), together with what it is: format, root,
prefix key, entry, group and number of its write. Whatever else lies in its slot does not open, so it is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.engine.kv_tier_reads import (
    DISK_ENGINES,
    MEMORY_ENGINES,
    READ_ENGINES,
    ReadPattern,
    ReadRate,
    list_patterns,
    measure_reads,
    recommend,
)
from cloister.kv import KVFormat, KVObject
from cloister.kv.objects import KVHeader
from cloister.kv.tiers import MAX_TRIAL_BYTES, TAG_BYTES, TierBlock, TierLayout
from cloister.scheduler.kv_restores import TRIAL, TierEntry, TierRead
from cloister.types.logs import describe

NUM_READERS: Final = 2
"""Requests that are read for at a time."""
PROBE_TIMEOUT_S: Final = 5.0
_PROBE_BYTES: Final = 8 * 2**20
_PROBE_FILL_S: Final = 0.5
_PROBE_READS_S: Final = 1.0
_PROBE_CELL_S: Final = 0.03
_PROBE_BLOCKS: Final = (2**20, 2**21)
_PROBE_DEPTHS: Final = (1, 2, 4)
FIRST_PATTERN: Final = ReadPattern("pread", 2**18, 2)
"""How a tier is read that was not probed."""
_LEAST_DEPTH: Final = 2
"""One thread opens what another one reads."""

_logger = logging.getLogger(__name__)


class _Read:
    """One read, shared by its thread and the engine's."""

    def __init__(self, read: TierRead, cipher: AESGCM | None) -> None:
        self.read, self.cipher = read, cipher
        self.deadline_s = time.monotonic() + read.timeout_s
        self.is_cancelled = False
        self.objects: list[KVObject] = []
        self.num_bytes, self.elapsed_s = 0, 0.0
        self.unreadable: TierBlock | None = None
        self.is_complete: bool | None = None

    def tell(self) -> TierArrival:
        arrived = self.num_bytes / max(1, self.read.num_bytes)
        return TierArrival(
            self.read.request_id,
            self.read.owner,
            self.objects,
            self.num_bytes,
            self.elapsed_s,
            arrived * self.read.compute_s - self.elapsed_s,
            self.unreadable,
            self.is_complete,
        )


class TierArrival(msgspec.Struct, frozen=True):
    """What has come of a read since the last time.

    Attributes:
        owner: whose blocks are read.
        num_bytes, elapsed_s: of the whole read so far.
        saved_s: by how much it was faster than computing is predicted to be.
        unreadable: a block that could not be opened.
        is_complete: whether all came; None while more may come.
    """

    request_id: str
    owner: bytes
    objects: list[KVObject]
    num_bytes: int
    elapsed_s: float
    saved_s: float
    unreadable: TierBlock | None
    is_complete: bool | None


class TierWorker:
    """The file of a tier, and the keys of what is in it.

    Args:
        fd: the file, which is its own from now on.
        layout: where each slot lies.
        form: the format of this engine's KV.
        is_memory: the file is in memory, and nobody else has it.
    """

    def __init__(self, fd: int, layout: TierLayout, form: KVFormat, *, is_memory: bool = False) -> None:
        weakref.finalize(self, os.close, fd)  # not before the last thread that uses it has ended
        self._fd, self._layout, self._format, self._is_memory = fd, layout, form.digest, is_memory
        self._slot_bytes = layout.slot_bytes
        self._firsts = [layout.place(group, 0) for group in range(len(self._slot_bytes))]
        self._keys: dict[bytes, AESGCM] = {}  # by root
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._reads: dict[str, _Read] = {}
        self._given_up: set[_Read] = set()
        self._written: list[tuple[TierBlock, bool]] = []
        self._unwritten: deque[tuple[TierBlock, AESGCM, bytes]] = deque()
        self._is_full = False
        self._busy_s = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cloister-kv-write")
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="cloister-kv-read")
        self._use(FIRST_PATTERN)

    @property
    def pattern(self) -> ReadPattern:
        """How it reads."""
        return self._pattern

    def _use(self, pattern: ReadPattern) -> None:
        """Reads like this from now on. No read may be running."""
        self._pattern, self._reader = pattern, READ_ENGINES[pattern.engine](self._fd)
        self._openers = ThreadPoolExecutor(max(_LEAST_DEPTH, pattern.depth), thread_name_prefix="cloister-kv-open")

    def probe(self) -> tuple[int, float]:
        """Measures reads of the file, chooses how to read it, and reads some blocks; returns (bytes, seconds that this took).

        Raises:
            OSError: it does not work.
            TimeoutError: it takes very long.
        """
        return self._readers.submit(self._probe).result(PROBE_TIMEOUT_S)

    # Called by the engine's thread

    def on_news(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, from any thread, when there is something to take."""
        self._wake = wake

    def write(self, blocks: Sequence[TierBlock], contents: Sequence[bytes]) -> None:
        """Writes blocks in their order; `take_written` says when."""
        for block, content in zip(blocks, contents, strict=True):
            cipher = self._keys.get(block.root)
            if cipher is None:
                cipher = self._keys[block.root] = AESGCM(AESGCM.generate_key(256))
            self._unwritten.append((block, cipher, content))
        self._writer.submit(self._write_all)

    def read(self, read: TierRead) -> None:
        """Reads entries in their order; `take_read` brings them, and in the end `is_complete`; nothing after `cancel`."""
        job = _Read(read, self._keys.get(read.root))
        with self._lock:
            self._reads[read.request_id] = job
        self._readers.submit(self._run, job)

    def cancel(self, request_id: str) -> tuple[int, float] | None:
        """Ends a read. Returns (bytes, seconds) of one that is late: it would take at least so long."""
        with self._lock:
            job = self._reads.pop(request_id, None)
            if job is None:
                return None
            job.is_cancelled = True
            if job.is_complete is not None:
                return None
            self._given_up.add(job)
            late_s = time.monotonic() - job.deadline_s
            return (job.read.num_bytes, job.read.timeout_s + late_s) if late_s > 0 else None

    def forget(self, root: bytes) -> None:
        """Forgets a key: nothing that it sealed can be opened any more."""
        self._keys.pop(root, None)

    @property
    def is_stuck(self) -> bool:
        """Whether a read that was cancelled still runs."""
        return bool(self._given_up)

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

    def take_written(self) -> tuple[list[tuple[TierBlock, bool]], float]:
        """Removes and returns blocks that were written, or could not be, and the processor time that this took."""
        if not self._written:
            return [], 0.0
        with self._lock:
            written, self._written = self._written, []
            busy_s, self._busy_s = self._busy_s, 0.0
            return written, busy_s

    @property
    def is_full(self) -> bool:
        """Whether a write has failed: nothing more is written."""
        return self._is_full

    def close(self) -> None:
        """Has the threads end, and forgets all keys. The file goes with the last of them."""
        self._is_full = True
        with self._lock:
            for job in self._reads.values():
                job.is_cancelled = True
            self._reads.clear()
        self._unwritten.clear()
        self._keys.clear()
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._openers.shutdown(wait=False, cancel_futures=True)

    # In threads

    def _write_all(self) -> None:
        while True:
            started_s = time.thread_time()
            try:
                block, cipher, content = self._unwritten.popleft()
            except IndexError:
                return
            is_written = not self._is_full and self._write(block, cipher, content)
            with self._lock:
                self._written.append((block, is_written))
                self._busy_s += time.thread_time() - started_s

    def _write(self, block: TierBlock, cipher: AESGCM, content: bytes) -> bool:
        sealed = cipher.encrypt(_nonce(block), content, self._describe(block))
        try:
            if os.pwrite(self._fd, sealed, self._place(block)) == len(sealed):
                return True
            reason = "there is no space left"
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else describe(error)
        self._is_full = True
        _logger.warning("the KV tier stores nothing more, and requests go on: %s", reason)
        return False

    def _run(self, job: _Read) -> None:
        is_complete = False
        try:
            is_complete = self._read_all(job)
        except Exception as error:  # a thread must not end in silence: the request would wait for its deadline
            _logger.warning("the KV tier could not be read: %s", describe(error))
        finally:
            with self._lock:
                job.is_complete = is_complete
                self._given_up.discard(job)
            self._wake()

    def _read_all(self, job: _Read) -> bool:
        """Reads parts in their order, some at a time: one is read while another one is opened."""
        started_s = time.perf_counter()
        parts = deque(self._divide(job.read.entries))
        opening: deque[tuple[list[TierEntry], Future[dict[int, bytes]]]] = deque()
        while parts or opening:
            while parts and len(opening) < max(_LEAST_DEPTH, self._pattern.depth):
                part = parts.popleft()
                opening.append((part, self._openers.submit(self._open, job, part)))
            part, opened = opening.popleft()
            found = self._make_objects(job, part, opened.result())
            job.num_bytes += sum(one.num_bytes for one in found)
            job.elapsed_s = time.perf_counter() - started_s
            with self._lock:
                job.objects += found
            if len(found) < len(part):
                for _, other in opening:
                    other.cancel()
                return False
            self._wake()
        return True

    def _divide(self, entries: Sequence[TierEntry]) -> Iterator[list[TierEntry]]:
        """Divides entries into parts of about the size of a read."""
        part: list[TierEntry] = []
        num_bytes = 0
        for entry in entries:
            part.append(entry)
            num_bytes += sum(self._slot_bytes[block.group] for block in entry.blocks if block is not None)
            if num_bytes >= self._pattern.block_bytes:
                yield part
                part, num_bytes = [], 0
        if part:
            yield part

    def _make_objects(self, job: _Read, part: Sequence[TierEntry], opened: dict[int, bytes]) -> list[KVObject]:
        """Returns the entries of a part as far as all of their blocks were opened, and notes the one that could not be."""
        objects: list[KVObject] = []
        for entry in part:
            contents = []
            for block in entry.blocks:
                content = b"" if block is None else opened.get(block.number)
                if content is None:
                    job.unreadable = None if self._is_over(job) else block
                    return objects
                contents.append(content)
            header = KVHeader(self._format, job.read.root, entry.key, entry.entry, tuple(map(len, contents)))
            objects.append(KVObject(header, tuple(contents), b""))
        return objects

    def _is_over(self, job: _Read) -> bool:
        return job.is_cancelled or time.monotonic() > job.deadline_s

    def _open(self, job: _Read, part: Sequence[TierEntry]) -> dict[int, bytes]:
        """Reads the blocks of a part, neighbours at once, and returns the contents of those that open, by number."""
        opened: dict[int, bytes] = {}
        cipher = job.cipher
        if cipher is None:
            return opened
        for run in self._list_runs([block for entry in part for block in entry.blocks if block is not None]):
            if self._is_over(job):
                break
            first = self._place(run[0])
            try:
                sealed = self._reader.read(first, self._place(run[-1]) + self._slot_bytes[run[-1].group] - first)
            except OSError:
                continue
            for block in run:
                begin = self._place(block) - first
                end = begin + self._layout.block_bytes[block.group] + TAG_BYTES
                with contextlib.suppress(InvalidTag, ValueError):
                    opened[block.number] = cipher.decrypt(_nonce(block), sealed[begin:end], self._describe(block))
        return opened

    def _list_runs(self, blocks: Sequence[TierBlock]) -> list[list[TierBlock]]:
        """Groups blocks whose slots are neighbours."""
        runs: list[list[TierBlock]] = []
        end = -1
        for place, block in sorted(((self._place(block), block) for block in blocks), key=itemgetter(0)):
            if place != end:
                runs.append([])
            runs[-1].append(block)
            end = place + self._slot_bytes[block.group]
        return runs

    def _place(self, block: TierBlock) -> int:
        return self._firsts[block.group] + block.slot * self._slot_bytes[block.group]

    def _describe(self, block: TierBlock) -> bytes:
        """Returns what is authenticated together with the contents of a block."""
        return msgspec.msgpack.encode((b"cloister/kv-tier/1", self._format, block.root, block.key, block.entry, block.group))

    def _probe(self) -> tuple[int, float]:
        """Fills the file's beginning with blocks that nobody has, and reads them as loads do."""
        if self._is_memory:
            os.ftruncate(self._fd, self._layout.num_bytes)  # a map needs its whole length; memory is taken when it is written
        cipher = AESGCM(AESGCM.generate_key(256))
        blocks = self._fill(cipher)
        size = self._layout.block_bytes[blocks[0].group]
        self._choose_pattern(len(blocks) * self._slot_bytes[blocks[0].group])
        if not self._is_memory:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        entries = [TierEntry(block.entry, b"", (block,)) for block in blocks[: max(1, MAX_TRIAL_BYTES // size)]]
        job = _Read(TierRead(TRIAL, [], b"", entries, len(entries) * size, PROBE_TIMEOUT_S), cipher)
        if not self._read_all(job):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return job.num_bytes, job.elapsed_s

    def _fill(self, cipher: AESGCM) -> list[TierBlock]:
        """Writes blocks, as many as a slow disk takes in a while, and returns them."""
        group = self._layout.block_bytes.index(max(self._layout.block_bytes))
        content, end_s = os.urandom(self._layout.block_bytes[group]), time.monotonic() + _PROBE_FILL_S
        blocks: list[TierBlock] = []
        num_unsynced_bytes = 0
        for slot in range(min(self._layout.num_slots[group], max(1, _PROBE_BYTES // self._slot_bytes[group]))):
            block = TierBlock(b"", b"", b"", slot, group, slot, slot)
            os.pwrite(self._fd, cipher.encrypt(_nonce(block), content, self._describe(block)), self._place(block))
            blocks.append(block)
            num_unsynced_bytes += self._slot_bytes[group]
            if num_unsynced_bytes >= _PROBE_BLOCKS[0]:
                os.fdatasync(self._fd)
                num_unsynced_bytes = 0
            if time.monotonic() > end_s:
                break
        os.fdatasync(self._fd)
        return blocks

    def _choose_pattern(self, num_bytes: int) -> None:
        """Measures reads of what is not in the page cache, from the file's beginning. A slow disk is read as at first."""
        engines = MEMORY_ENGINES if self._is_memory else DISK_ENGINES
        patterns = [
            pattern for pattern in list_patterns(engines, _PROBE_BLOCKS, _PROBE_DEPTHS) if pattern.block_bytes <= num_bytes
        ]
        end_s = time.monotonic() + _PROBE_READS_S
        measured = measure_reads(
            self._fd, num_bytes, patterns, cell_s=_PROBE_CELL_S, deadline_s=end_s, is_cached=self._is_memory
        )
        rates: list[ReadRate] = []
        with contextlib.suppress(TimeoutError):
            rates += [rate for rate in measured if rate is not None]
        if rates:
            self._openers.shutdown(wait=False)
            self._use(recommend(rates))


def _nonce(block: TierBlock) -> bytes:
    """Returns 12 bytes that are used once: keys are of one engine, whose writes have numbers."""
    return block.number.to_bytes(12, "big")
