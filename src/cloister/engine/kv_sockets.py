"""Links to other engines over sockets, in threads beside the steps (protocol `engine.kv_transfer.KVLinks`).

A connection is for one pull. The server sends a fresh number; the asker sends its query, authenticated together with that
number, so that no query can be replayed; then parts of objects come, each of which is authenticated itself. A peer that is
late, leaves, or sends anything else only ends its own connection. `engine.kv_frames` defines the frames and how contents pass.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Final

import msgspec

from cloister.engine.kv_frames import (
    KVInbox,
    KVLinkError,
    KVOutbox,
    KVPeerGoneError,
    pack,
    receive_frame,
    send_frame,
    time_left,
)
from cloister.engine.kv_transfer import EntryContents, KVDemand, KVOffer, PulledKV
from cloister.engine.kv_transports import KV_TRANSPORTS, KVTransport, parse_places
from cloister.engine.kv_unit import LinkSocket
from cloister.kv import KVFormat, KVQuery, KVSealer
from cloister.kv.objects import KVHeader, RestoredEntry
from cloister.scheduler.kv_exports import KVEntry
from cloister.scheduler.kv_load import FOLLOW_TIMEOUT_S, KV_LOAD_TIMEOUT_S
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.types.errors import CloisterError, ConfigError
from cloister.types.logs import describe

NUM_PULLS: Final = 8
"""Concurrent pulls; others wait, and their deadlines run."""
NUM_PEERS: Final = 16
"""Engines served at once; further ones are refused."""
MAX_STRANGERS: Final = 64
"""Connections at once whose peer has not shown that it is an engine; a further one ends the oldest."""
PART_BYTES: Final = 2**20
"""KV that is sent at once; at least one entry. This much stays in a processor's cache from its copy at the source to its check,
and needs no new pages of the system."""
_MAX_QUERY_BYTES: Final = 4 * 2**20
_OVERHEAD_BYTES: Final = 4096

_logger = logging.getLogger(__name__)


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    nonce: bytes


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    query: bytes
    mac: bytes


class _Label(msgspec.Struct, frozen=True, array_like=True):
    """An object without its contents."""

    header: KVHeader
    mac: bytes


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Objects whose contents follow, one behind the other."""

    labels: list[_Label]
    is_complete: bool | None = None


_HELLO: Final = msgspec.msgpack.Decoder(_Hello)
_ASK: Final = msgspec.msgpack.Decoder(_Ask)
_PART: Final = msgspec.msgpack.Decoder(_Part)
_QUERY: Final = msgspec.msgpack.Decoder(KVQuery)
"""Made before any thread decodes: msgspec 0.22 resolves a type at first use, and crashes if several threads do so at once."""


class _LinkKeys:
    """Authenticates queries and objects under a secret that the engines know."""

    def __init__(self, form: KVFormat, secret: bytes) -> None:
        self.sealer = KVSealer(form, hmac.digest(secret, b"objects", "sha256"))
        self._ask_key = hmac.digest(secret, b"queries", "sha256")

    def authenticate(self, hello: _Hello, query: bytes) -> bytes:
        return hmac.digest(self._ask_key, hello.nonce + query, "sha256")


class _Pull:
    """One pull, shared by its thread and the engine's."""

    def __init__(self, query: KVQuery, endpoint: str, timeout_s: float) -> None:
        self.query, self.endpoint, self.timeout_s = query, endpoint, timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.sock: socket.socket | None = None
        self.is_cancelled = False
        self.objects: list[RestoredEntry] = []
        self.is_complete: bool | None = None

    @property
    def num_bytes(self) -> int:
        return sum(found.num_bytes for found in self.objects)

    def note_part(self) -> None:
        """Gives the next part of a followed prompt as much time as the first one had."""
        if self.query.follows:
            self.deadline_s = time.monotonic() + self.timeout_s


class _Offered:
    """What a peer was offered and has not been sent, shared by its thread and the engine's."""

    def __init__(self) -> None:
        self._entries: deque[KVEntry] = deque()
        self._read: Callable[[Sequence[KVEntry]], list[EntryContents] | None] = lambda entries: None
        self._is_complete: bool | None = None

    def add(self, offer: KVOffer) -> None:
        self._entries += offer.entries
        self._read, self._is_complete = offer.read, offer.is_complete

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._entries) or self._is_complete is not None

    def take(self, num_entries: int) -> KVOffer:
        """Removes and returns the entries of one part."""
        taken = [self._entries.popleft() for _ in range(min(num_entries, len(self._entries)))]
        return KVOffer(taken, self._read, None if self._entries else self._is_complete)


class KVSocketLinks:
    """Serves other engines, and pulls from them.

    Args:
        setting: where it listens, such as "shm" or "shm,tls://127.0.0.1:0" (`engine.kv_transports`).
        form: the format of this engine's KV.
        secret: what all engines of one front know, and nobody else.
        transports: existing ones, by name; then no others are used, whatever an endpoint says.

    Raises:
        ConfigError: nothing can listen there.
    """

    def __init__(
        self, setting: str, form: KVFormat, secret: bytes, transports: Mapping[str, KVTransport] = MappingProxyType({})
    ) -> None:
        self._secret, self._is_fixed = (b"", True) if transports else (secret, False)
        self._transports = dict(transports)
        self._listeners: list[socket.socket] = []
        self.endpoint = ",".join(self._listen(name, where) for name, where in parse_places(setting))
        self._form, self._keys = form, _LinkKeys(form, secret)
        self._num_at_once = max(1, min(PART_BYTES, MAX_STEP_BYTES) // sum(form.sizes))
        self._part_bytes = self._num_at_once * sum(form.sizes)
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._pulls: dict[str, _Pull] = {}
        self._demands: list[KVDemand] = []
        self._offers: dict[int, _Offered] = {}
        self._peers: dict[int, socket.socket] = {}
        self._strangers: dict[int, socket.socket] = {}  # duplicates: a handshake takes a socket away from its object
        self._num_peers = 0
        self._is_closed = False
        self._pullers = ThreadPoolExecutor(NUM_PULLS, thread_name_prefix="cloister-kv-pull")
        for listener, (name, _) in zip(self._listeners, parse_places(setting), strict=True):
            run = partial(self._accept, listener, self._transport(name))
            threading.Thread(target=run, name="cloister-kv-accept", daemon=True).start()

    def _listen(self, name: str, where: str) -> str:
        try:
            listener, endpoint = self._transport(name).listen(where)
        except ConfigError:
            for earlier in self._listeners:
                earlier.close()
            raise
        self._listeners.append(listener)
        return endpoint

    def _transport(self, name: str) -> KVTransport:
        if name not in self._transports and self._is_fixed:
            raise ConfigError(f"this engine has no transport of KV named {name[:32]!r}", param="kv_transfer")
        if name not in self._transports:
            self._transports[name] = KV_TRANSPORTS.get(name)(self._secret)
        return self._transports[name]

    # Called by the engine's thread

    def on_news(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def pull(self, query: KVQuery, endpoint: str, timeout_s: float) -> None:
        pull = _Pull(query, endpoint, timeout_s)
        with self._changed:
            self._pulls[query.request_id] = pull
        self._pullers.submit(self._run_pull, pull)

    def cancel(self, request_id: str) -> None:
        with self._changed:
            pull = self._pulls.pop(request_id, None)
            if pull is not None:
                pull.is_cancelled = True
                _shut(pull.sock)
                self._changed.notify_all()

    def take_pulled(self) -> list[PulledKV]:
        with self._changed:
            taken = []
            for request_id, pull in list(self._pulls.items()):
                if pull.objects or pull.is_complete is not None:
                    taken.append(PulledKV(request_id, pull.objects, pull.is_complete))
                    pull.objects = []
                    if pull.is_complete is not None:
                        del self._pulls[request_id]
            if taken:
                self._changed.notify_all()
            return taken

    def take_demands(self) -> list[KVDemand]:
        with self._changed:
            demands, self._demands = self._demands, []
            return demands

    def offer(self, peer: int, offer: KVOffer) -> None:
        with self._changed:
            if peer in self._peers:
                self._offers.setdefault(peer, _Offered()).add(offer)
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for sock in (
                *self._listeners,
                *self._strangers.values(),
                *self._peers.values(),
                *(pull.sock for pull in self._pulls.values()),
            ):
                _shut(sock)
            for pull in self._pulls.values():
                pull.is_cancelled = True
            self._changed.notify_all()
        for listener in self._listeners:
            listener.close()
        self._pullers.shutdown(wait=False, cancel_futures=True)
        for transport in self._transports.values():
            transport.close()

    # Pulling

    def _run_pull(self, pull: _Pull) -> None:
        is_complete = False
        try:
            is_complete = self._receive(pull)
        except (OSError, CloisterError, msgspec.MsgspecError) as error:
            if not pull.is_cancelled:
                _logger.warning("KV of another engine did not arrive whole: %s", describe(error))
        finally:
            with self._changed:
                pull.is_complete = is_complete
            self._wake()

    def _receive(self, pull: _Pull) -> bool:
        """Receives all parts of a pull; returns whether the other engine has sent everything that it had."""
        sock, transport, where = self._connect(pull)
        with sock:
            with self._changed:
                pull.sock = sock
                if pull.is_cancelled:
                    return False
            hello = receive_frame(sock, _HELLO, _OVERHEAD_BYTES, pull.deadline_s)
            query = msgspec.msgpack.encode(pull.query)
            keys = self._keys_of(sock)
            send_frame(sock, _Ask(query, keys.authenticate(hello, query)), pull.deadline_s)
            inbox, is_complete = transport.open_inbox(where, self._part_bytes), None
            try:
                inbox.invite(sock, pull.deadline_s)
                while is_complete is None:
                    is_complete = self._receive_part(pull, sock, inbox, keys.sealer)
            finally:
                inbox.close(is_whole=is_complete is not None)
            return is_complete

    def _receive_part(self, pull: _Pull, sock: socket.socket, inbox: KVInbox, sealer: KVSealer) -> bool | None:
        """Receives a part; returns its `is_complete`."""
        part = receive_frame(sock, _PART, self._part_bytes + _OVERHEAD_BYTES, pull.deadline_s)
        if not all(sealer.is_wanted(label.header, pull.query.root, pull.query.keys) for label in part.labels):
            raise KVLinkError("another engine sent KV that is not what was asked for")
        sizes = [size for label in part.labels for size in label.header.sizes]
        if sum(sizes) > self._part_bytes:
            raise KVLinkError(f"a part of {sum(sizes)} bytes is over the limit of {self._part_bytes}")
        contents = inbox.receive(sock, sum(sizes), pull.deadline_s) if any(sizes) else memoryview(b"")
        pieces = iter(_cut(contents, sizes))
        objects = [RestoredEntry(label.header, tuple(next(pieces) for _ in label.header.sizes)) for label in part.labels]
        for found, label in zip(objects, part.labels, strict=True):
            if not sealer.is_authentic(found.header, found.contents, label.mac):
                raise KVLinkError("another engine sent KV that no engine of this front has made")
        pull.note_part()
        self._hand_in(pull, objects)
        return part.is_complete

    def _connect(self, pull: _Pull) -> tuple[socket.socket, KVTransport, str]:
        """Connects to the first reachable address of those where the other engine listens."""
        *firsts, last = parse_places(pull.endpoint)
        for name, where in firsts:
            with contextlib.suppress(OSError):
                return self._connect_to(name, where, pull)
        return self._connect_to(*last, pull)

    def _connect_to(self, name: str, where: str, pull: _Pull) -> tuple[socket.socket, KVTransport, str]:
        transport = self._transport(name)
        return transport.connect(where, time_left(pull.deadline_s)), transport, where

    def _hand_in(self, pull: _Pull, objects: list[RestoredEntry]) -> None:
        """Leaves objects for the engine, after waiting until it has taken the earlier ones."""
        with self._changed:
            pull.objects += objects
        self._wake()
        with self._changed:
            while pull.num_bytes >= MAX_STEP_BYTES and not pull.is_cancelled:
                self._changed.wait(time_left(pull.deadline_s))

    # Serving

    def _accept(self, listener: socket.socket, transport: KVTransport) -> None:
        while not self._is_closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(0.01)  # out of descriptors for the moment
                continue
            try:
                self._admit(sock, transport)
            except (OSError, RuntimeError):  # no descriptor, or no thread, is left for the moment
                sock.close()

    def _admit(self, sock: socket.socket, transport: KVTransport) -> None:
        handle = sock.dup()
        with self._changed:
            self._num_peers += 1
            peer = self._num_peers
            while len(self._strangers) >= MAX_STRANGERS:
                oldest = self._strangers.pop(next(iter(self._strangers)))
                _shut(oldest)
                oldest.close()
            self._strangers[peer] = handle
            if self._is_closed:
                _shut(handle)
        run = partial(self._run_peer, peer, sock, transport)
        try:
            threading.Thread(target=run, name="cloister-kv-serve", daemon=True).start()
        except RuntimeError:
            self._forget_stranger(peer)
            raise

    def _forget_stranger(self, peer: int) -> bool:
        """Returns whether a connection was still one of `_strangers`."""
        with self._changed:
            handle = self._strangers.pop(peer, None)
        if handle is not None:
            handle.close()
        return handle is not None

    def _run_peer(self, peer: int, sock: socket.socket, transport: KVTransport) -> None:
        is_sent = False
        try:
            deadline_s = time.monotonic() + KV_LOAD_TIMEOUT_S
            if (welcome := self._welcome(sock, transport, deadline_s)) is not None:
                with welcome:
                    if (query := self._greet(welcome, deadline_s)) is not None and self._take_seat(peer, welcome):
                        with contextlib.closing(transport.open_outbox(welcome, deadline_s)) as outbox:
                            is_sent = self._serve(peer, query, welcome, outbox, deadline_s)
        except (OSError, CloisterError, msgspec.MsgspecError) as error:
            if not self._is_closed:
                _logger.log(_level_of(error), "KV was not sent whole to another engine: %s", describe(error))
        finally:
            self._forget_stranger(peer)
            with self._changed:
                is_peer = self._peers.pop(peer, None) is not None
                self._offers.pop(peer, None)
                if is_peer:
                    self._demands.append(KVDemand(peer, is_sent=is_sent))
            if is_peer:
                self._wake()

    def _take_seat(self, peer: int, sock: socket.socket) -> bool:
        """Returns whether an engine that has shown what it is may be served."""
        with self._changed:
            may_be = len(self._peers) < NUM_PEERS and not self._is_closed
            if may_be:
                self._peers[peer] = sock
        self._forget_stranger(peer)
        return may_be

    def _welcome(self, sock: socket.socket, transport: KVTransport, deadline_s: float) -> socket.socket | None:
        """Returns a peer's connection once its transport has accepted it; None if it is a stranger's, since anybody can open
        one.
        """
        try:
            return transport.accept(sock, time_left(deadline_s))
        except OSError as error:
            _logger.debug("a stranger connected for KV: %s", describe(error))
            return None

    def _greet(self, sock: socket.socket, deadline_s: float) -> KVQuery | None:
        """Returns a peer's query; None if the peer does not know the engines' secret, as any stranger."""
        try:
            return self._receive_query(sock, deadline_s)
        except (OSError, CloisterError, msgspec.MsgspecError) as error:
            _logger.debug("a peer asked for KV without the engines' secret: %s", describe(error))
            return None

    def _receive_query(self, sock: socket.socket, deadline_s: float) -> KVQuery:
        hello = _Hello(secrets.token_bytes(32))
        send_frame(sock, hello, deadline_s)
        ask = receive_frame(sock, _ASK, _MAX_QUERY_BYTES, deadline_s)
        if not hmac.compare_digest(ask.mac, self._keys_of(sock).authenticate(hello, ask.query)):
            raise KVLinkError("a peer that does not know the engines' secret asked for KV")
        return _QUERY.decode(ask.query)

    def _serve(self, peer: int, query: KVQuery, sock: socket.socket, outbox: KVOutbox, deadline_s: float) -> bool:
        """Sends what a peer asks for; returns whether it got all."""
        self._put(KVDemand(peer, query))
        sealer = self._keys_of(sock).sealer
        while True:
            if query.follows:
                deadline_s = time.monotonic() + FOLLOW_TIMEOUT_S
            offer = self._await_offer(peer, deadline_s)
            found = offer.read(offer.entries) if offer.entries else []
            objects = [sealer.seal(each.root, each.key, each.entry, each.contents) for each in found or ()]
            is_complete = offer.is_complete if found is not None else False
            labels = [_Label(sealed.header, sealed.mac) for sealed in objects]
            contents = [content for sealed in objects for content in sealed.contents if content]
            outbox.send(sock, pack(_Part(labels, is_complete)), contents, deadline_s)
            if is_complete is not None:
                return is_complete

    def _put(self, demand: KVDemand) -> None:
        with self._changed:
            self._demands.append(demand)
        self._wake()

    def _await_offer(self, peer: int, deadline_s: float) -> KVOffer:
        """Returns the entries of the next part."""
        with self._changed:
            while (offered := self._offers.get(peer)) is None or not offered.is_waiting:
                if self._is_closed:
                    raise KVLinkError("the engine ends")
                self._changed.wait(time_left(deadline_s))
            return offered.take(self._num_at_once)

    def _keys_of(self, sock: socket.socket) -> _LinkKeys:
        """Returns the authenticator of a connection: engines of two machines share a secret for that connection only."""
        if isinstance(sock, LinkSocket) and sock.secret is not None:
            return _LinkKeys(self._form, sock.secret)
        return self._keys


def _cut(contents: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Yields pieces of these sizes, one behind the other."""
    start = 0
    for size in sizes:
        yield contents[start : start + size]
        start += size


def _level_of(error: Exception) -> int:
    """Returns the log level for an engine that did not get everything. One that has left needs no more, or has died, which its
    front reports."""
    has_left = isinstance(error, KVPeerGoneError) or (isinstance(error, OSError) and not isinstance(error, TimeoutError))
    return logging.DEBUG if has_left else logging.WARNING


def _shut(sock: socket.socket | None) -> None:
    """Wakes the thread that waits for a socket. It does not send a TLS close: `SSLSocket.shutdown` would drop the keys first,
    and a thread that sends then would send plain text."""
    if sock is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
