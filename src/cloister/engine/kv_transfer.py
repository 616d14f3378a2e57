"""KV from and to other engines, between two steps: connects the scheduler's loads and exports, the program's blocks, and the
links to other engines (decisions/0022).

Everything here runs on the engine's thread and takes a bounded time in each step, except the copies (`KVOffer.read`): links
make them, and wait for other engines, in threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cloister.backends.kv_planes import KVPlane
from cloister.kv import NO_BLOCK, KVFormat, KVObject, KVQuery
from cloister.kv.objects import RestoredEntry
from cloister.scheduler import Scheduler
from cloister.scheduler.kv_exports import KVEntry
from cloister.scheduler.kv_load import FOLLOW_TIMEOUT_S, KV_LOAD_TIMEOUT_S
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.types.events import KVSource, PrefetchKV


@dataclass(frozen=True, slots=True)
class PulledKV:
    """The results of a pull so far.

    Attributes:
        objects: genuine ones, in the order of their entries.
        is_complete: whether the other engine has sent everything that it had; None while more may come.
    """

    request_id: str
    objects: Sequence[KVObject | RestoredEntry]
    is_complete: bool | None = None


@dataclass(frozen=True, slots=True)
class KVDemand:
    """A request of another engine for KV.

    Attributes:
        peer: number of its connection.
        query: the entries that it wants; None: the connection has ended.
        is_sent: it has ended: whether all was sent.
    """

    peer: int
    query: KVQuery | None = None
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class EntryContents:
    """A copy of one entry, as `KVSealer.seal` takes it."""

    root: bytes
    key: bytes
    entry: int
    contents: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KVOffer:
    """Entries for a peer. Its connection copies a part of them when the previous part was sent, even while a step runs.

    Attributes:
        read: copies entries, from any thread; None if they are gone.
        is_complete: for the last entries, whether the peer then has everything. None: more may come.
    """

    entries: list[KVEntry]
    read: Callable[[Sequence[KVEntry]], list[EntryContents] | None]
    is_complete: bool | None = None


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """The KV of a program.

    Attributes:
        form: its format.
        export: copies blocks (`backends.base.Program.export_blocks`); may be called from any thread, for blocks that no step
            writes.
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
        """Asks another engine. `take_pulled` returns what comes, and finally `is_complete`; nothing after `cancel`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a pull."""
        ...

    def take_pulled(self) -> list[PulledKV]:
        """Removes and returns what has come."""
        ...

    def take_demands(self) -> list[KVDemand]:
        """Removes and returns the requests of other engines, oldest first."""
        ...

    def offer(self, peer: int, offer: KVOffer) -> None:
        """Sends entries that a peer asked for, behind those of earlier offers."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...


class KVTransfer:
    """The exchange of KV of one engine.

    Args:
        blocks: the KV of its program.
        links: connections to other engines.
    """

    def __init__(self, scheduler: Scheduler, blocks: KVBlocks, links: KVLinks) -> None:
        self.links = links
        self._loads, self._exports = scheduler.kv_loads, scheduler.kv_exports
        self._blocks = blocks
        self._sources: dict[str, str] = {}
        self._numbers: dict[int, int] = {}  # of exports, by peer
        self._unfinished: set[int] = set()  # peers to which more will be offered

    def load_from(self, request_id: str, source: KVSource) -> None:
        """Sets where KV of a request is, before its load begins."""
        self._sources[request_id] = source.endpoint

    def prefetch(self, message: PrefetchKV, now: float) -> None:
        """Begins to load KV for a request that may come later."""
        self.load_from(message.request.request_id, message.source)
        if message.follows:
            self._loads.follow(message.request, now)
        else:
            self._loads.prefetch(message.request, message.token_ids, now)

    def serve(self, now: float) -> None:
        """Handles arrivals, and offers other engines what they want."""
        if self._loads.num_waiting_bytes < 2 * MAX_STEP_BYTES:
            for pulled in self.links.take_pulled():
                self._loads.arrive(pulled.request_id, pulled.objects)
                if pulled.is_complete is not None:
                    self._loads.finish(pulled.request_id, now, is_complete=pulled.is_complete)
        for demand in self.links.take_demands():
            if demand.query is None:
                self._end(demand)
            else:
                self._numbers[demand.peer] = self._exports.open(demand.query, now)
                self._unfinished.add(demand.peer)
        self.offer_news(now)

    def offer_news(self, now: float) -> None:
        """Offers other engines what a step has added to the prompts that they follow."""
        for peer in sorted(self._unfinished):
            self._offer(peer, self._numbers[peer], now)

    def dispatch(self) -> None:
        """Tells the links which transfers begin, and which are no longer wanted."""
        cancelled, self._loads.cancelled = self._loads.cancelled, []
        for request_id in cancelled:
            self.links.cancel(request_id)
        queries, self._loads.queries = self._loads.queries, []
        for query in {query.request_id: query for query in queries}.values():  # a later load replaces an earlier one
            if self._loads.is_loading(query.request_id):
                timeout_s = FOLLOW_TIMEOUT_S if query.follows else KV_LOAD_TIMEOUT_S
                self.links.pull(query, self._sources[query.request_id], timeout_s)
        if not len(self._loads):
            self._sources.clear()

    def _offer(self, peer: int, number: int, now: float) -> None:
        """Offers a peer what is new."""
        self._exports.extend(number, now)
        entries = self._exports.take(number)
        is_last = entries is None or self._exports.is_done(number)
        if is_last:
            self._unfinished.discard(peer)
        if entries or is_last:
            read = partial(self._read, number, self._exports.root_of(number))
            self.links.offer(peer, KVOffer(entries or [], read, entries is not None if is_last else None))

    def _end(self, demand: KVDemand) -> None:
        self._unfinished.discard(demand.peer)
        number = self._numbers.pop(demand.peer, None)
        if number is not None:
            self._exports.close(number, is_complete=demand.is_sent)

    def _read(self, number: int, root: bytes, entries: Sequence[KVEntry]) -> list[EntryContents] | None:
        """Copies entries of an export.

        A step may run meanwhile. It does not write leased blocks. A lease ends before its blocks are free, so if it has not
        ended after the copy, the blocks were not free before it.
        """
        blocks = [block for found in entries for block in found.blocks if block != NO_BLOCK]
        copies = dict(zip(blocks, self._blocks.export(blocks), strict=True))
        if not self._exports.is_leased(number):
            return None
        return [
            EntryContents(root, found.key, found.entry, tuple(copies.get(block, b"") for block in found.blocks))
            for found in entries
        ]
