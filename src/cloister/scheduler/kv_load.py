"""One load of KV, from another engine or a tier. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from cloister.kv import KVObject
from cloister.kv.objects import KVHeader, RestoredEntry
from cloister.kv.two_sided import TwoSidedRestore
from cloister.scheduler.sequence import RequestState
from cloister.types.request import Request

KV_LOAD_TIMEOUT_S: Final = 5.0
"""A load ends after this time, whatever has arrived."""
FOLLOW_TIMEOUT_S: Final = 30.0
"""The same for a load that follows a prompt and whose request has not come yet, counted from the last block that arrived: a
step of the source may take long."""


class KVLoad:
    """One load.

    Attributes:
        state: the request that waits for it; None for a prefetch.
        keys: prefix keys of all entries that may be loaded.
        table: blocks by entry, one for each group: those cached when it began, and those loaded.
        num_known: leading entries that were cached when it began, for layers that see all positions.
        next_entry: the entry expected next.
        arrived: objects that are in no plan yet.
        num_in_flight: entries in plans that are not committed.
        is_complete: whether the source has sent all that it had; None while it is sending.
        is_open: it has not ended.
        is_alone: it is from a tier, and no sequence ran when it began.
        transfer_s: seconds of its transfer; None if not measured.
        tier: name of the tier that it comes from; empty for another engine.
        num_promised: blocks of each group that it still needs, if it comes from a tier or follows a prompt.
        follows: it follows a prompt that another engine is computing.
        is_copy: it loads a copy of another engine's leased prefix.
        restore: set if a running sequence computes the front meanwhile. Entries then come in reverse, and that sequence inserts
            them into the prefix cache when it takes them.
        awaited_s: since when its request waits for it, if it follows a prompt.
    """

    __slots__ = (
        "arrived",
        "awaited_s",
        "deadline_s",
        "follows",
        "is_alone",
        "is_complete",
        "is_copy",
        "is_open",
        "keys",
        "next_entry",
        "num_bytes",
        "num_in_flight",
        "num_known",
        "num_promised",
        "owner",
        "request",
        "restore",
        "root",
        "started_s",
        "state",
        "table",
        "tier",
        "transfer_s",
    )

    def __init__(
        self, request: Request, state: RequestState | None, keys: Sequence[bytes], root: bytes, owner: bytes | None, now: float
    ) -> None:
        self.request, self.state = request, state
        self.keys, self.root, self.owner = list(keys), root, owner
        self.table: list[int] = []
        self.num_known = self.next_entry = self.num_bytes = self.num_in_flight = 0
        self.arrived: deque[KVObject | RestoredEntry] = deque()
        self.started_s, self.deadline_s = now, now + KV_LOAD_TIMEOUT_S
        self.is_complete: bool | None = None
        self.is_open, self.is_alone = True, False
        self.transfer_s: float | None = None
        self.tier = ""
        self.num_promised: list[int] = []
        self.follows = self.is_copy = False
        self.awaited_s: float | None = None
        self.restore: TwoSidedRestore | None = None

    def asks_for(self, header: KVHeader) -> bool:
        """Whether an object belongs to this load: its chain, and the key of its entry."""
        entry = header.entry
        return header.root == self.root and 0 <= entry < len(self.keys) and header.key == self.keys[entry]

    def begin_wait(self, state: RequestState, now: float) -> None:
        """Notes that the request has come for which it followed a prompt."""
        self.state, self.awaited_s, self.deadline_s = state, now, now + KV_LOAD_TIMEOUT_S

    def keep_following(self, now: float) -> None:
        """Restarts the timeout of a load that follows a prompt and whose request has not come yet."""
        self.deadline_s = now + FOLLOW_TIMEOUT_S

    @property
    def waits_for_steps(self) -> bool:
        """Whether its tier has sent everything. It then has no deadline: waiting for steps takes no longer than computing."""
        return bool(self.tier) and (bool(self.is_complete) or (self.restore is not None and self.is_complete is not None))

    @property
    def elapsed_from_s(self) -> float | None:
        """When the wait for it began; None if no request waits for it."""
        return self.awaited_s if self.follows else self.started_s
