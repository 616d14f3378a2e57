"""KV links between the engines of a virtual cluster, over datagrams that may be lost, late, repeated or damaged.

No transport repairs them: a lost datagram ends in a timeout, a damaged one in a miss.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cloister.cluster.virtual.network import VirtualNetwork
from cloister.engine.kv_transfer import KVDemand, KVOffer, PulledKV
from cloister.kv import KVFormat, KVObject, KVQuery, KVSealer
from cloister.scheduler.kv_exports import KVEntry
from cloister.scheduler.kv_load import FOLLOW_TIMEOUT_S, KV_LOAD_TIMEOUT_S

SECRET: Final = b"the engines of a virtual cluster"
PART_ENTRIES: Final = 1
"""Entries of one datagram: the engines make steps between them."""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Processor time of the threads in which an engine's links work beside its steps: one for each pull, at both ends.

    Attributes:
        serve_s, export_s: of the engine that is asked, for each pull (a connection, what both say first, memory that both
            share), and for each entry that it copies and authenticates.
        pull_s, receive_s: of the engine that asks, for each pull, and for each entry that it copies and checks.
    """

    serve_s: float = 0.0
    export_s: float = 0.0
    pull_s: float = 0.0
    receive_s: float = 0.0


FREE_LINKS: Final = LinkCosts()


class KVFrame(msgspec.Struct, frozen=True, array_like=True):
    """A datagram between two engines.

    Attributes:
        sender: index of the replica that sent it.
        pull: number of the pull, of the engine that asks.
        number: of the part, from 1; in an answer the part that it is, in a question the one that is wanted.
        query: in the first question.
        is_answer: it comes from the engine that was asked.
        is_complete: in the last part: whether all was sent. In a question: the asker has left.
    """

    sender: int
    pull: int
    number: int
    query: KVQuery | None = None
    objects: tuple[KVObject, ...] = ()
    is_complete: bool | None = None
    is_answer: bool = False


@dataclass(slots=True)
class _Pull:
    query: KVQuery
    source: int
    num_parts: int = 0


@dataclass(slots=True)
class _Peer:
    """An engine that is served.

    Attributes:
        place: its replica, and the number of its pull there.
        num_sent: parts that were sent.
        is_asking: it waits for the next one.
        entries, offer: what it was offered and has not been sent, and the last offer.
    """

    place: tuple[int, int]
    num_sent: int = 0
    is_asking: bool = True
    entries: list[KVEntry] = field(default_factory=list)
    offer: KVOffer | None = None


@dataclass
class KVSwitch:
    """Carries frames between the engines of a cluster.

    Attributes:
        damage_rate: share of frames in which a bit of KV changes on the way.
        part_entries: entries of one datagram.
        entry_s: time that an entry takes on the way, one after the other of those that a replica sends.
        links: links of the engine that each replica currently runs.
    """

    network: VirtualNetwork
    draw: random.Random
    damage_rate: float = 0.0
    part_entries: int = PART_ENTRIES
    entry_s: float = 0.0
    links: dict[int, VirtualKVLinks] = field(default_factory=dict)
    _free_s: dict[int, float] = field(default_factory=dict)

    def send(self, target: int, frame: KVFrame) -> None:
        """Sends a frame over the ways of both replicas."""
        if frame.objects and self.damage_rate and self.draw.random() < self.damage_rate:
            self.network.faults["damaged"] += 1
            frame = msgspec.structs.replace(frame, objects=(self._damage(frame.objects[0]), *frame.objects[1:]))
        data = msgspec.msgpack.encode(frame)

        def arrive(data: bytes) -> None:
            links = self.links.get(target)
            if links is not None:
                links.receive(msgspec.msgpack.decode(data, type=KVFrame))

        def leave() -> None:
            self.network.send(frame.sender, False, data, lambda data: self.network.send(target, True, data, arrive))

        if self.entry_s and frame.objects:
            loop = asyncio.get_running_loop()
            begins_s = max(loop.time(), self._free_s.get(frame.sender, 0.0))
            self._free_s[frame.sender] = begins_s + self.entry_s * len(frame.objects)
            loop.call_at(self._free_s[frame.sender], leave)
        else:
            leave()

    def _damage(self, found: KVObject) -> KVObject:
        content = bytearray(found.contents[0])
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        return msgspec.structs.replace(found, contents=(bytes(content), *found.contents[1:]))


def _do_at_once(_: float, job: Callable[[], None]) -> None:
    job()


class VirtualKVLinks:
    """The links of one engine (protocol `engine.kv_transfer.KVLinks`).

    Args:
        index: of its replica.
        costs: of its threads.
        work: called with processor time and a job, which it does when a thread has had that time.
    """

    def __init__(
        self,
        index: int,
        switch: KVSwitch,
        form: KVFormat,
        costs: LinkCosts = FREE_LINKS,
        work: Callable[[float, Callable[[], None]], None] = _do_at_once,
    ) -> None:
        self.endpoint = endpoint_of(index)
        self._index, self._switch = index, switch
        self._sealer = KVSealer(form, SECRET)
        self._costs, self._work = costs, work
        self._wake: Callable[[], None] = lambda: None
        self._pulls: dict[int, _Pull] = {}
        self._num_pulls = 0
        self._pulled: list[PulledKV] = []
        self._demands: list[KVDemand] = []
        self._peers: dict[int, _Peer] = {}
        self._num_peers = 0
        switch.links[index] = self

    @property
    def num_open(self) -> int:
        """Pulls that have not ended, and engines that are served."""
        return len(self._pulls) + len(self._peers)

    def on_news(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def pull(self, query: KVQuery, endpoint: str, timeout_s: float) -> None:
        self._num_pulls += 1
        number = self._num_pulls
        pull = self._pulls[number] = _Pull(query, int(endpoint.removeprefix("virtual:")))
        self._work(self._costs.pull_s, lambda: self._ask(number, pull))
        asyncio.get_running_loop().call_later(timeout_s, self._end_pull, number, False)

    def cancel(self, request_id: str) -> None:
        for number, pull in list(self._pulls.items()):
            if pull.query.request_id == request_id:
                del self._pulls[number]
                self._send(pull.source, KVFrame(self._index, number, pull.num_parts + 1, is_complete=False))

    def take_pulled(self) -> list[PulledKV]:
        pulled, self._pulled = self._pulled, []
        return pulled

    def take_demands(self) -> list[KVDemand]:
        demands, self._demands = self._demands, []
        return demands

    def offer(self, peer: int, offer: KVOffer) -> None:
        if (found := self._peers.get(peer)) is not None:
            found.entries += offer.entries
            found.offer = offer
            self._answer(peer, found)

    def close(self) -> None:
        if self._switch.links.get(self._index) is self:
            del self._switch.links[self._index]

    def receive(self, frame: KVFrame) -> None:
        """Takes a frame of another engine."""
        place = (frame.sender, frame.pull)
        if frame.is_answer:
            pull = self._pulls.get(frame.pull)
            if pull is not None and pull.source == frame.sender:
                self._take_part(frame, pull)
        elif frame.query is not None:
            self._serve(place, frame.query)
        elif (number := self._find_peer(place)) is None:
            pass
        elif frame.is_complete is not None:
            self._leave(number, is_sent=False)
        elif frame.number == (peer := self._peers[number]).num_sent + 1:
            peer.is_asking = True
            self._answer(number, peer)

    def _send(self, target: int, frame: KVFrame) -> None:
        self._switch.send(target, frame)

    def _ask(self, number: int, pull: _Pull) -> None:
        if number in self._pulls:
            self._send(pull.source, KVFrame(self._index, number, 1, pull.query))

    def _serve(self, place: tuple[int, int], query: KVQuery) -> None:
        if self._find_peer(place) is not None:
            return  # a repeated frame
        self._num_peers += 1
        number = self._num_peers
        self._peers[number] = _Peer(place)
        self._work(self._costs.serve_s, lambda: self._demand(number, query))
        timeout_s = FOLLOW_TIMEOUT_S if query.follows else KV_LOAD_TIMEOUT_S
        asyncio.get_running_loop().call_later(timeout_s, lambda: self._leave(number, is_sent=False))

    def _demand(self, number: int, query: KVQuery) -> None:
        if number in self._peers:  # else it has left
            self._demands.append(KVDemand(number, query))
            self._wake()

    def _find_peer(self, place: tuple[int, int]) -> int | None:
        return next((number for number, peer in self._peers.items() if peer.place == place), None)

    def _answer(self, number: int, peer: _Peer) -> None:
        """Has a thread send the next part to a peer that asks for it, if there is one."""
        if not peer.is_asking or peer.offer is None or not (peer.entries or peer.offer.is_complete is not None):
            return
        num_entries = self._switch.part_entries
        entries, peer.entries = peer.entries[:num_entries], peer.entries[num_entries:]
        part = KVOffer(entries, peer.offer.read, None if peer.entries else peer.offer.is_complete)
        peer.num_sent, peer.is_asking = peer.num_sent + 1, False
        self._work(self._costs.export_s * len(entries), lambda: self._send_part(number, peer, part))

    def _send_part(self, number: int, peer: _Peer, part: KVOffer) -> None:
        if number not in self._peers:
            return
        found = part.read(part.entries) if part.entries else []
        is_complete = False if found is None else part.is_complete
        objects = tuple(self._sealer.seal(each.root, each.key, each.entry, each.contents) for each in found or ())
        replica, pull = peer.place
        self._send(replica, KVFrame(self._index, pull, peer.num_sent, None, objects, is_complete, is_answer=True))
        if is_complete is not None:
            self._leave(number, is_sent=is_complete)

    def _leave(self, number: int, *, is_sent: bool) -> None:
        if self._peers.pop(number, None) is not None:
            self._demands.append(KVDemand(number, is_sent=is_sent))
            self._wake()

    def _take_part(self, frame: KVFrame, pull: _Pull) -> None:
        if frame.number != pull.num_parts + 1:
            return  # repeated, or overtaken
        pull.num_parts += 1
        if not all(self._sealer.is_genuine(found, pull.query.root, pull.query.keys) for found in frame.objects):
            self._end_pull(frame.pull, False)
            self._send(pull.source, KVFrame(self._index, frame.pull, frame.number + 1, is_complete=False))
            return
        self._work(self._costs.receive_s * len(frame.objects), lambda: self._hand_in(frame, pull))

    def _hand_in(self, frame: KVFrame, pull: _Pull) -> None:
        """Leaves a part for the engine, and asks for the next one."""
        if frame.pull not in self._pulls:
            return
        self._pulled.append(PulledKV(pull.query.request_id, list(frame.objects)))
        self._wake()
        if frame.is_complete is not None:
            self._end_pull(frame.pull, frame.is_complete)
        else:
            self._send(pull.source, KVFrame(self._index, frame.pull, frame.number + 1))

    def _end_pull(self, number: int, is_complete: bool) -> None:
        pull = self._pulls.pop(number, None)
        if pull is not None:
            self._pulled.append(PulledKV(pull.query.request_id, [], is_complete))
            self._wake()


def endpoint_of(index: int) -> str:
    """Returns where the engine of a replica serves KV."""
    return f"virtual:{index}"
