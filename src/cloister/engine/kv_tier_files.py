"""The file of one tier: where its blocks lie, and how it is written and read. Its contents are sealed
(`engine.kv_tier_worker`)."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

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
from cloister.kv.tier_slots import TAG_BYTES, TierBlock, TierLayout
from cloister.types.logs import describe

FIRST_PATTERN: Final = ReadPattern("pread", 2**18, 2)
"""How a file is read that was not probed."""
PROBE_BLOCKS: Final = (2**20, 2**21)
_SLOW_READ_S: Final = 0.005
"""Reads that take longer are made smaller, so that their contents are used, or given up, earlier."""
_PROBE_DEPTHS: Final = (1, 2, 4)
_PROBE_READS_S: Final = 1.0
_PROBE_CELL_S: Final = 0.03

_logger = logging.getLogger(__name__)


class TierFile:
    """The file of a tier.

    Args:
        name: of the tier.
        fd: the file, which this object owns from now on.
        layout: where each slot lies.
        is_memory: the file is in memory.
        is_shared: other engines have it too. Blocks are copied before they are opened: through a map, bytes could change
            between the check and their use.
        start: where its slots begin.

    Attributes:
        pattern: how it is read.
        is_full: a write has failed, so nothing more is written.
    """

    def __init__(
        self, name: str, fd: int, layout: TierLayout, *, is_memory: bool = False, is_shared: bool = False, start: int = 0
    ) -> None:
        weakref.finalize(self, os.close, fd)  # not before the last thread that uses it has ended
        self.name, self.fd, self.is_memory, self._is_shared = name, fd, is_memory, is_shared
        self.is_full = False
        self._start = start
        self._firsts: dict[int | None, list[int]] = {}  # by part of the tier
        self._place(layout)
        self._use(FIRST_PATTERN)

    def use_layout(self, layout: TierLayout) -> None:
        """Lays out the slots anew. Nothing may be written or read meanwhile, and what was written before is lost."""
        self._place(layout)
        self.extend()
        self._use(self.pattern)

    def _place(self, layout: TierLayout) -> None:
        self.layout, self._slot_bytes = layout, layout.slot_bytes
        self.add_part(None, layout, self._start)

    def _use(self, pattern: ReadPattern) -> None:
        self.pattern, self._reader = pattern, READ_ENGINES[pattern.engine](self.fd)

    def add_part(self, home: int | None, layout: TierLayout, start: int) -> None:
        """Notes where the slots of another engine begin, whose blocks have the same sizes; None: those of this one."""
        self._firsts[home] = [start + layout.place(group, 0) for group in range(len(self._slot_bytes))]

    def move_to(self, firsts: Sequence[int]) -> None:
        """Sets where the slots of each group begin from now on. What was written before is lost."""
        self._firsts[None] = list(firsts)

    def place(self, block: TierBlock) -> int:
        """Returns where a block begins."""
        return self._firsts[block.home][block.group] + block.slot * self._slot_bytes[block.group]

    def count_sealed(self, block: TierBlock) -> int:
        """Returns the bytes of a sealed block."""
        return self.layout.block_bytes[block.group] + TAG_BYTES

    def count_slots(self, blocks: Sequence[TierBlock]) -> int:
        """Returns the bytes of the slots of blocks."""
        return sum(self._slot_bytes[block.group] for block in blocks)

    def write(self, block: TierBlock, sealed: bytes | memoryview) -> bool:
        """Writes a sealed block; returns whether it could. After the first failure nothing is written."""
        if self.is_full:
            return False
        try:
            if os.pwrite(self.fd, sealed, self.place(block)) == len(sealed):
                return True
            reason = "there is no space left"
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else describe(error)
        self.is_full = True
        _logger.warning("the KV tier %s stores nothing more; requests continue without it: %s", self.name, reason)
        return False

    def read_sealed(self, block: TierBlock) -> bytes:
        """Returns a block as it was written; fewer bytes where it was not.

        Raises:
            OSError: it cannot be read.
        """
        return os.pread(self.fd, self.count_sealed(block), self.place(block))

    def list_runs(self, blocks: Sequence[TierBlock]) -> list[list[tuple[int, TierBlock]]]:
        """Groups blocks whose slots are neighbours, each with where it begins."""
        runs: list[list[tuple[int, TierBlock]]] = []
        end, firsts, sizes = -1, self._firsts, self._slot_bytes
        placed = [(firsts[block.home][block.group] + block.slot * sizes[block.group], block) for block in blocks]
        placed.sort(key=itemgetter(0))
        for place, block in placed:
            if place != end:
                runs.append([])
            runs[-1].append((place, block))
            end = place + sizes[block.group]
        return runs

    def read_run(self, run: Sequence[tuple[int, TierBlock]]) -> memoryview:
        """Returns the slots of neighbours, with one read; they are valid until this thread's next one.

        Raises:
            OSError: they cannot be read.
        """
        (first, _), (last, block) = run[0], run[-1]
        return self._reader.read(first, last + self._slot_bytes[block.group] - first)

    def extend(self) -> None:
        """Gives a file in memory its whole length, which a map of it needs; memory is taken when it is written."""
        if self.is_memory and not self._is_shared:
            os.ftruncate(self.fd, max(self.layout.num_bytes, os.fstat(self.fd).st_size))

    def drop_page_cache(self) -> None:
        """Makes the next reads come from the disk."""
        if not self.is_memory:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def choose_pattern(self, num_bytes: int) -> None:
        """Measures reads of this many bytes from the file's beginning, and uses the best pattern from now on. A slow disk keeps
        its first pattern, as does a file that others have. No read may be running."""
        if self._is_shared:
            return
        engines = MEMORY_ENGINES if self.is_memory else DISK_ENGINES
        patterns = [
            pattern for pattern in list_patterns(engines, PROBE_BLOCKS, _PROBE_DEPTHS) if pattern.block_bytes <= num_bytes
        ]
        end_s = time.monotonic() + _PROBE_READS_S
        measured = measure_reads(self.fd, num_bytes, patterns, cell_s=_PROBE_CELL_S, deadline_s=end_s, is_cached=self.is_memory)
        rates: list[ReadRate] = []
        with contextlib.suppress(TimeoutError):
            rates += [rate for rate in measured if rate is not None]
        if rates:
            self._use(_shorten(recommend(rates), max(rate.bytes_s for rate in rates)))


def _shorten(pattern: ReadPattern, bytes_s: float) -> ReadPattern:
    """Returns the pattern, with smaller reads if those of a slow disk would take long."""
    block_bytes = pattern.block_bytes
    while block_bytes > FIRST_PATTERN.block_bytes and block_bytes / bytes_s > _SLOW_READ_S:
        block_bytes //= 2
    return replace(pattern, block_bytes=block_bytes)
