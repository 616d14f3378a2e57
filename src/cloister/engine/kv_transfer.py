"""KV from and to other engines, between two steps: connects the scheduler's loads and exports, the program's blocks, and the
links to other engines (decisions/0022).

Everything here runs on the engine's thread, and takes a bounded time in each step. Links wait for other
engines, in threads of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloister.backends.kv_planes import KVPlane
from cloister.kv import NO_BLOCK, KVFormat, KVObject, KVQuery
from cloister.scheduler import Scheduler
from cloister.scheduler.kv_exports import KVEntry
from cloister.scheduler.kv_loads import KV_LOAD_TIMEOUT_S, MAX_STEP_BYTES
from cloister.types.events import KVSource, PrefetchKV


@dataclass(frozen=True, slots=True)
class PulledKV:
    """What a pull has brought so far.

    Attributes:
        objects: genuine ones, in the order of their entries.
        is_complete: whether the other engine has sent all it had; None while more may come.
    """

    request_id: str
    objects: list[KVObject]
    is_complete: bool | None = None


@dataclass(frozen=True, slots=True)
class KVDemand:
    """A request of another engine for KV.

    Attributes:
        peer: number of its connection.
        query: what it asks for; None: the next part of that.
        is_sent: the connection has ended: whether all was sent. None: it has not.
    """

    peer: int
    query: KVQuery | None = None
    is_sent: bool | None = None


@dataclass(frozen=True, slots=True)
class EntryContents:
    """A copy of one entry, as `KVSealer.seal` takes it."""

    root: bytes
    key: bytes
    entry: int
    contents: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """The KV of a program.

    Attributes:
        form: its format.
        export: copies blocks (`backends.base.Program.export_blocks`); called between two steps.
        planes: where the numbers of a block of each group lie (`backends.base.Program.list_planes`).
    """

    form: KVFormat
    export: Callable[[Sequence[int]], list[bytes]]
    planes: Sequence[Sequence[KVPlane]] = ()


class KVLinks(Protocol):
    """Connections to other engines, in threads of their own.

    Attributes:
        endpoint: where others find this engine.
    """

    endpoint: str

    def on_news(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, from any thread, when there is something to take."""
        ...

    def pull(self, query: KVQuery, endpoint: str, timeout_s: float) -> None:
        """Asks another engine. `take_pulled` brings what comes, and in the end `is_complete`; nothing after `cancel`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a pull."""
        ...

    def take_pulled(self) -> list[PulledKV]:
        """Removes and returns what has come."""
        ...

    def take_demands(self) -> list[KVDemand]:
        """Removes and returns what other engines want, oldest first."""
        ...

    def reply(self, peer: int, entries: list[EntryContents], *, is_complete: bool | None = None) -> None:
        """Sends a part of what a peer asked for. With `is_complete` it is the last one: whether the peer has all then."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...


class KVTransfer:
    """The exchange of KV of one engine.

    Args:
        blocks: the KV of its program.
        links: connections to other engines.
        step_bytes: KV that is copied for others between two steps; at least one entry.
    """

    def __init__(self, scheduler: Scheduler, blocks: KVBlocks, links: KVLinks, step_bytes: int = MAX_STEP_BYTES) -> None:
        self.links = links
        self._loads, self._exports = scheduler.kv_loads, scheduler.kv_exports
        self._blocks = blocks
        self._num_at_once = max(1, step_bytes // sum(blocks.form.sizes))
        self._sources: dict[str, str] = {}
        self._demands: deque[KVDemand] = deque()
        self._numbers: dict[int, int] = {}  # by peer

    def load_from(self, request_id: str, source: KVSource) -> None:
        """Says where KV of a request is, before its load begins."""
        self._sources[request_id] = source.endpoint

    def prefetch(self, message: PrefetchKV, now: float) -> None:
        """Begins to load KV for a request that may come later."""
        self.load_from(message.request.request_id, message.source)
        self._loads.prefetch(message.request, message.token_ids, now)

    @property
    def has_demands(self) -> bool:
        """Whether others wait for a copy."""
        return bool(self._demands)

    def serve(self, now: float) -> None:
        """Takes what has come, and copies what others want, as much as one step may."""
        if self._loads.num_waiting_bytes < 2 * MAX_STEP_BYTES:
            for pulled in self.links.take_pulled():
                self._loads.arrive(pulled.request_id, pulled.objects)
                if pulled.is_complete is not None:
                    self._loads.finish(pulled.request_id, now, is_complete=pulled.is_complete)
        self._demands += self.links.take_demands()
        num_left = self._num_at_once
        while self._demands and num_left > 0:
            num_left -= self._answer(self._demands.popleft(), num_left, now)

    def dispatch(self) -> None:
        """Tells the links which transfers begin, and which are not wanted any more."""
        cancelled, self._loads.cancelled = self._loads.cancelled, []
        for request_id in cancelled:
            self.links.cancel(request_id)
        queries, self._loads.queries = self._loads.queries, []
        for query in queries:
            self.links.pull(query, self._sources[query.request_id], KV_LOAD_TIMEOUT_S)
        if not len(self._loads):
            self._sources.clear()

    def _answer(self, demand: KVDemand, num_most: int, now: float) -> int:
        """Answers one demand, and returns the number of entries copied."""
        if demand.is_sent is not None:
            self._end(demand.peer, is_complete=demand.is_sent)
            return 0
        if demand.query is not None:
            self._numbers[demand.peer] = self._exports.open(demand.query, now)
        number = self._numbers.get(demand.peer)
        if number is None:
            return 0
        root = self._exports.root_of(number)
        taken = self._exports.take(number, num_most)
        if taken is None:
            self.links.reply(demand.peer, [], is_complete=False)
            return 0
        is_last = self._exports.is_done(number)
        self.links.reply(demand.peer, self._copy(root, taken), is_complete=True if is_last else None)
        return len(taken)

    def _end(self, peer: int, *, is_complete: bool) -> None:
        number = self._numbers.pop(peer, None)
        if number is not None:
            self._exports.close(number, is_complete=is_complete)

    def _copy(self, root: bytes, entries: Sequence[KVEntry]) -> list[EntryContents]:
        blocks = [block for found in entries for block in found.blocks if block != NO_BLOCK]
        copies = dict(zip(blocks, self._blocks.export(blocks), strict=True))
        return [
            EntryContents(root, found.key, found.entry, tuple(copies.get(block, b"") for block in found.blocks))
            for found in entries
        ]
