"""Writes and reads the blocks of a tier in threads beside the steps (decisions/0029).

A block is sealed with AES-256-GCM under the key of its chain (scope and adapter), together with what it is: format, root,
prefix key, entry, group and number of its write. Whatever else lies in its slot does not open, so it is a miss.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.kv import KVFormat, KVObject
from cloister.kv.objects import KVHeader
from cloister.kv.tiers import TAG_BYTES, TierBlock, TierLayout
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.scheduler.kv_restores import TierEntry, TierRead
from cloister.types.logs import describe

NUM_READERS: Final = 2
PROBE_TIMEOUT_S: Final = 5.0
_PROBE_BYTES: Final = 2 * 2**20
_PART_BYTES: Final = MAX_STEP_BYTES // 4
"""KV that is handed over at once: steps take the first part while the next one is read."""

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
    """

    def __init__(self, fd: int, layout: TierLayout, form: KVFormat) -> None:
        weakref.finalize(self, os.close, fd)  # not before the last thread that uses it has ended
        self._fd, self._layout, self._format = fd, layout, form.digest
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

    def probe(self) -> tuple[int, float]:
        """Writes some blocks and reads them; returns (bytes, seconds that reading took).

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
        place = self._layout.place(block.group, block.slot)
        try:
            if os.pwrite(self._fd, sealed, place) == len(sealed):
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
        objects: list[KVObject] = []
        num_bytes = 0
        for entry in job.read.entries:
            if job.is_cancelled or time.monotonic() > job.deadline_s:
                break
            found = self._open_entry(job, entry)
            if found is None:
                break
            objects.append(found)
            num_bytes += found.num_bytes
            if num_bytes >= _PART_BYTES:
                self._hand_in(job, objects)
                objects, num_bytes = [], 0
        else:
            self._hand_in(job, objects)
            return True
        self._hand_in(job, objects)
        return False

    def _hand_in(self, job: _Read, objects: list[KVObject]) -> None:
        with self._lock:
            job.objects += objects
        self._wake()

    def _open_entry(self, job: _Read, entry: TierEntry) -> KVObject | None:
        """Returns an entry; None if one of its blocks cannot be opened."""
        started_s = time.perf_counter()
        contents = []
        for block in entry.blocks:
            content = b"" if block is None else self._open(job.cipher, block)
            if content is None:
                job.unreadable = block
                return None
            contents.append(content)
        header = KVHeader(self._format, job.read.root, entry.key, entry.entry, tuple(map(len, contents)))
        found = KVObject(header, tuple(contents), b"")
        job.num_bytes += found.num_bytes
        job.elapsed_s += time.perf_counter() - started_s
        return found

    def _open(self, cipher: AESGCM | None, block: TierBlock) -> bytes | None:
        size = self._layout.block_bytes[block.group]
        try:
            sealed = os.pread(self._fd, size + TAG_BYTES, self._layout.place(block.group, block.slot))
            return None if cipher is None else cipher.decrypt(_nonce(block), sealed, self._describe(block))
        except (OSError, InvalidTag, ValueError):
            return None

    def _describe(self, block: TierBlock) -> bytes:
        """Returns what is authenticated together with the contents of a block."""
        return msgspec.msgpack.encode((b"cloister/kv-tier/1", self._format, block.root, block.key, block.entry, block.group))

    def _probe(self) -> tuple[int, float]:
        cipher, size = AESGCM(AESGCM.generate_key(256)), max(self._layout.block_bytes)
        group = self._layout.block_bytes.index(size)
        num_blocks = min(self._layout.num_slots[group], max(1, _PROBE_BYTES // size))
        places = [self._layout.place(group, slot) for slot in range(num_blocks)]
        for number, place in enumerate(places):
            os.pwrite(self._fd, cipher.encrypt(number.to_bytes(12, "big"), bytes(size), b""), place)
        started_s = time.perf_counter()
        for number, place in enumerate(places):
            cipher.decrypt(number.to_bytes(12, "big"), os.pread(self._fd, size + TAG_BYTES, place), b"")
        return num_blocks * size, time.perf_counter() - started_s


def _nonce(block: TierBlock) -> bytes:
    """Returns 12 bytes that are used once: keys are of one engine, whose writes have numbers."""
    return block.number.to_bytes(12, "big")
