"""Memory of compiled grammars: what each takes, and whether another one may be compiled ahead of its request's turn.

A compiled grammar is there from its compilation until its request ends, and more requests may wait than memory has room for.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from typing import Final

from cloister.types.request import TENANT_RATIO, Grammar

MIB: Final = 2**20
LIMIT_BYTES: Final = 128 * MIB
"""Of all compiled grammars together: a part of what the memory budget counts as overhead (`engine.memory.OVERHEAD_BYTES`)."""
LARGEST_SHARE: Final = 0.25
"""Part of the limit that one grammar may take: what the largest tenant leaves to others."""
LEAST_BYTES: Final = 64 * 1024
"""Every compiled grammar takes about as much."""
BYTES_PER_CHARACTER: Final = 100
"""Of the source, as schemas of many properties take: 30 to 110 were measured, and 490 of regular expressions without any
operator."""
_METER_SHARE: Final = 0.05
"""Part of its time that the meter may take."""


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


class HeapMeter:
    """Reads how much of this process's heap is allocated. The C library visits each free piece for that, and others wait for it
    meanwhile: it is not read again until `1 / _METER_SHARE` of that time has gone by."""

    def __init__(self) -> None:
        self._read = getattr(ctypes.CDLL(None), "mallinfo2", None)  # GNU only, since 2.33
        if self._read is not None:
            self._read.restype = _Heap
        self._rests_until_s = 0.0

    def begin(self) -> int | None:
        """Returns bytes; None if they cannot be known, or reading them took long not long ago."""
        return None if time.perf_counter() < self._rests_until_s else self.read()

    def read(self) -> int | None:
        """Returns bytes; None if they cannot be known."""
        if self._read is None:
            return None
        began_s = time.perf_counter()
        heap = self._read()
        took_s = time.perf_counter() - began_s
        if took_s > 0.001:
            self._rests_until_s = began_s + took_s / _METER_SHARE
        return int(heap.uordblks + heap.hblkhd)


class NoMeter(HeapMeter):
    """Knows nothing: sizes follow from sources, the same in every run."""

    def __init__(self) -> None:
        self._read = None
        self._rests_until_s = 0.0


class GrammarMemory:
    """What compiled grammars take, by tenant. Called from several threads.

    Args:
        limit_bytes: of all of them.
        meter: measures what a compilation allocates.

    Attributes:
        largest_bytes: what one of them may take.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES, meter: HeapMeter | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.largest_bytes = int(limit_bytes * LARGEST_SHARE)
        self.meter = HeapMeter() if meter is None else meter
        self._lock = threading.Lock()
        self._held: dict[int, tuple[str, int]] = {}
        self._held_bytes = 0
        self._of_tenant: Counter[str] = Counter()
        self._largest_of_tenant: dict[str, int] = {}
        self._gone: deque[int] = deque()

    @property
    def held_bytes(self) -> int:
        """What compiled grammars take."""
        with self._lock:
            self._settle()
            return self._held_bytes

    def has_room(self, tenant: str, grammar: Grammar | None) -> bool:
        """Whether a grammar may be compiled now; its size is estimated. None: one that needs nothing, as its request is gone.

        A tenant's first one may if anything is free at all.
        """
        if grammar is None:
            return True
        with self._lock:
            self._settle()
            free_bytes, own_bytes = self.limit_bytes - self._held_bytes, self._of_tenant.get(tenant, 0)
            needed_bytes = estimate_bytes(grammar)
            return free_bytes > 0 and (not own_bytes or own_bytes + needed_bytes <= TENANT_RATIO * (free_bytes - needed_bytes))

    def measure(self, tenant: str, grammar: Grammar, before: int | None) -> int:
        """Returns what a grammar takes that was compiled just now: what was allocated meanwhile, in any thread.

        Where nothing was measured, it counts as the largest one of its tenant: nobody saves by keeping the meter busy.

        Args:
            before: bytes allocated when its compilation began; None if that is not known.
        """
        after = None if before is None else self.meter.read()
        least_bytes = max(LEAST_BYTES, len(grammar.source))
        if before is not None and after is not None:
            found = max(least_bytes, after - before)
            with self._lock:
                self._largest_of_tenant[tenant] = max(found, self._largest_of_tenant.get(tenant, 0))
            return found
        with self._lock:
            known = max(estimate_bytes(grammar), self._largest_of_tenant.get(tenant, 0))
        return min(known, self.largest_bytes)  # nothing is refused for what was not measured

    def hold(self, number: int, tenant: str, num_bytes: int) -> None:
        """Counts a compiled grammar, until `release`."""
        with self._lock:
            self._held[number] = tenant, num_bytes
            self._of_tenant[tenant] += num_bytes
            self._held_bytes += num_bytes

    def release(self, number: int) -> None:
        """Counts one no longer. It takes no lock: the garbage collector may call it in any thread, at any place."""
        self._gone.append(number)

    def _settle(self) -> None:
        while self._gone:
            tenant, num_bytes = self._held.pop(self._gone.popleft(), ("", 0))
            self._of_tenant[tenant] -= num_bytes
            self._held_bytes -= num_bytes
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
                self._largest_of_tenant.pop(tenant, None)


def estimate_bytes(grammar: Grammar) -> int:
    """Returns what a grammar will take, by the length of its source."""
    return LEAST_BYTES + BYTES_PER_CHARACTER * len(grammar.source)
