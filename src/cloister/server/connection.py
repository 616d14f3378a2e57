"""A client connection of uvicorn, with a deadline for every wait, error replies in OpenAI's format, and a listener that
accepts a few at a time."""

from __future__ import annotations

import array
import asyncio
import asyncio.sslproto
import contextlib
import fcntl
import functools
import math
import socket
import struct
import termios
from typing import Any, Final

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from cloister.server.errors import OverloadedError, error_body, error_headers, invalid
from cloister.server.load_shedding import ConnectionTable, client_network, network_of
from cloister.server.tls import HandshakeQueue, is_hello_whole
from cloister.server.unread_replies import LAST_BYTES, UnreadReplies, UnreadReply, UnreadReplyError, attach_reply
from cloister.types.errors import CloisterError

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: on, for no time (socket(7))."""
REQUEST_TIMEOUT_S: Final = 20.0
"""Timeout for a whole request head, or for the rest of a body that is no longer read."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
"""Timeout of a TLS handshake, from the start of the connection."""
LINGER_S: Final = 2.0
"""How long a refused client may continue to send: closing immediately could discard the reply before it was read."""
TLS_BUFFER_BYTES: Final = 16 * 1024
"""asyncio's read buffer for each connection: one TLS record (RFC 8446, section 5.1). Its default is 256 KiB."""
UNREAD_TIMEOUT_S: Final = 60.0
"""How long a client may leave a waiting reply unread."""
PIECE_BYTES: Final = 64 * 1024
"""Largest part of a reply that is handed over at once; the next follows when the kernel has taken it."""
UNSENT_BYTES: Final = 256 * 1024
"""Bytes of a reply that the kernel accepts before it can send them (TCP_NOTSENT_LOWAT, tcp(7)); otherwise it accepts up to 4 MB
for each client that does not read. Bytes in flight come on top, so a fast and distant client gets its whole rate."""
MAX_LINGERING: Final = 128
"""Maximum number of lingering refused connections; further ones are closed without a reply."""

asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


class Connection(H11Protocol):
    """Closes a connection without a complete request for `request_timeout_s`, however slowly bytes arrive, and one whose client
    reads nothing of a reply for `unread_timeout_s`, however fast the reply was handed over.

    Attributes:
        table: table of the server's connections; a connection that does not fit gets 503. None is no limit.
        handshakes: TLS handshakes of the server; None for plain HTTP. They are done here, because a connection with asyncio's
            TLS is in no table until its handshake has ended.
        unread: bound on the unread replies that the server holds; None is no bound.
    """

    request_timeout_s = REQUEST_TIMEOUT_S
    handshake_timeout_s = HANDSHAKE_TIMEOUT_S
    unread_timeout_s = UNREAD_TIMEOUT_S
    table: ConnectionTable | None = None
    handshakes: HandshakeQueue | None = None
    unread: UnreadReplies | None = None
    _reply: UnreadReply | None = None
    _num_sent_bytes = 0
    _is_reset = False
    _num_lingering = 0
    _socket: asyncio.Transport
    _network = ""
    _hello = b""
    _handshake: asyncio.Task[None] | None = None
    _early = b""
    _patience: asyncio.TimerHandle | None = None
    _is_refused = False
    _unread: asyncio.TimerHandle | None = None
    _num_unread_bytes = math.inf
    _read_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = self._in_pieces(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        peer = get_remote_addr(transport)
        host = peer[0] if peer else None
        has_room = self.table is None or self.table.enter(self, host)
        if self.handshakes is None:
            self._begin(transport, has_room)
        elif has_room:
            self._network = network_of(host)
            self._patience = self.loop.call_later(self.handshake_timeout_s, transport.abort)
        else:
            transport.abort()  # a reply would need a handshake

    def shed(self) -> None:
        """Closes the connection immediately to make room for another one."""
        self._reset()

    def _reset(self) -> None:
        """Closes the connection without a trace: otherwise the kernel would keep the unread bytes, up to 4 MB, for as long as
        the client acknowledges its probes."""
        self._is_reset = True
        with contextlib.suppress(OSError):
            self._socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self.transport is None:
            if self.handshakes is not None and self._handshake is None:
                self._take_hello(data, self.handshakes)
            else:
                self._early += data  # data that arrived with the end of the handshake
            return
        super().data_received(data)
        if self._is_working():
            self._stop_waiting()
        self._note_progress()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_working():
            self._start_waiting()
        self._note_progress()
        self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unread_bytes = math.inf  # what was just written says nothing about reading
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._num_unread_bytes = math.inf  # everything was read: what is written from now on starts a new count
        self._note_progress()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that is not used again, but not while a reply is still being read, which TLS would cut off."""
        if self._count_unread():
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self.handshakes is not None:
            self.handshakes.leave(self, self._network)
        if self.table is not None:
            self.table.leave(self)
        if self._is_refused:
            type(self)._num_lingering -= 1
        if self.transport is not None:
            super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Replies to invalid HTTP. uvicorn's `msg` is not specific enough to find the mistake."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._refuse(invalid("This is not a valid HTTP/1.1 request; check its head.", code="invalid_http"), b"Bad Request")

    def _take_hello(self, data: bytes, handshakes: HandshakeQueue) -> None:
        self._hello += data
        try:
            is_whole = is_hello_whole(self._hello)
        except ValueError:
            self._socket.abort()
            return
        if is_whole:
            self._socket.pause_reading()
            handshakes.enter(self, self._network, functools.partial(self._answer_hello, handshakes))

    def _answer_hello(self, handshakes: HandshakeQueue) -> None:
        self._handshake = self.loop.create_task(self._shake_hands(self._socket, handshakes))

    async def _shake_hands(self, transport: asyncio.Transport, handshakes: HandshakeQueue) -> None:
        if transport.is_closing():
            return
        securing = self.loop.create_task(
            self.loop.start_tls(
                transport, self, handshakes.tls, server_side=True, ssl_handshake_timeout=self.handshake_timeout_s
            )
        )
        await asyncio.sleep(0)  # it sets its protocol, and calls `connection_made` in the next iteration of the loop
        self.loop.call_soon(self._replay_hello, handshakes)
        try:
            secured = await securing
        except OSError:  # includes ssl.SSLError and TimeoutError
            secured = None
        if secured is None or secured.is_closing() or transport.is_closing():
            self._stop_waiting()
            transport.abort()
            if self.table is not None:
                self.table.leave(self)
            return
        self._begin(secured, True)
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def _replay_hello(self, handshakes: HandshakeQueue) -> None:
        """Passes the bytes that arrived before asyncio's TLS was set up to it, as its transport would."""
        protocol = self._socket.get_protocol()
        if self._socket.is_closing() or not isinstance(protocol, asyncio.BufferedProtocol):
            return
        began_s = self.loop.time()
        rest = memoryview(self._hello)
        while rest:
            buffer = memoryview(protocol.get_buffer(len(rest)))
            num_bytes = min(len(buffer), len(rest))
            buffer[:num_bytes] = rest[:num_bytes]
            protocol.buffer_updated(num_bytes)
            rest = rest[num_bytes:]
        self._hello = b""
        handshakes.note_cost(self.loop.time() - began_s)

    def _begin(self, transport: asyncio.Transport, has_room: bool) -> None:
        super().connection_made(transport)
        for each in {transport, self._socket}:
            each.set_write_buffer_limits(high=1, low=0)  # so that writing pauses while anything is unread; 0 never resumes TLS
        _limit_unsent(self._socket)
        if has_room:
            self._start_waiting()
        else:
            self._turn_away()

    def _turn_away(self) -> None:
        """Replies to a connection above the limit."""
        self.connections.discard(self)
        if type(self)._num_lingering >= MAX_LINGERING:
            self.transport.abort()
            return
        error = OverloadedError("This server has reached its limit of connections; try again in a moment.")
        self._refuse(error, b"Service Unavailable")

    def _refuse(self, error: CloisterError, reason: bytes) -> None:
        """Replies without a request, and closes once the client had time to read it."""
        body = error_body(error)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= error_headers(error)
        head = h11.Response(status_code=error.status, headers=list(headers.items()), reason=reason)
        for event in (head, h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        type(self)._num_lingering += 1
        self._stop_waiting()
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            with contextlib.suppress(OSError):  # the client has reset it meanwhile
                self.transport.write_eof()
        self._patience = self.loop.call_later(LINGER_S, self.transport.close)

    def _note_progress(self) -> None:
        if self.table is None:
            return
        if self._is_working() and (self.cycle.response_started or not self.cycle.more_body):
            self.table.work(self)
        else:
            self.table.wait(self)

    def _is_working(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_waiting(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(self.request_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        if self._is_working():
            return
        if self._count_unread():
            self._start_waiting()  # for the reply to be read first
        else:
            self.transport.close()

    def _count_unread(self) -> int:
        """Returns the bytes of replies that the kernel has not taken yet, because the client does not read."""
        num_bytes = self._socket.get_write_buffer_size()
        return num_bytes if self.transport is self._socket else num_bytes + self.transport.get_write_buffer_size()

    def _watch_reading(self) -> None:
        if self._unread is None and self._count_unread():
            self._read_s = self.loop.time()
            self._num_unread_bytes = math.inf
            if self._reply is not None:
                self._reply.begin_waiting(self._count_read(), self._read_s)
            self._look_at_reading()

    def _look_at_reading(self) -> None:
        """Checks whether the client reads; `close` would wait for it forever."""
        self._unread = None
        num_bytes, now_s = self._count_unread(), self.loop.time()
        if not num_bytes:
            return
        if self._reply is not None:
            self._reply.note_read(self._count_read(), now_s)
            if self._is_reset:
                return
        num_bytes += _count_queued(self._socket)
        if num_bytes < self._num_unread_bytes:
            self._num_unread_bytes, self._read_s = num_bytes, now_s
            self._note_progress()
        elif self.table is not None and now_s >= self._read_s + self.unread_timeout_s / 4:
            self.table.wait(self)
        if now_s >= self._read_s + self.unread_timeout_s:
            self._reset()
            return
        wait_s = min(self.unread_timeout_s / 20, self._read_s + self.unread_timeout_s - now_s)
        self._unread = self.loop.call_later(wait_s, self._look_at_reading)

    def _count_read(self) -> int:
        """Returns the bytes of the current reply that the client's machine has; approximate, because the heads of parts are not
        counted.
        """
        return self._num_sent_bytes - self._count_unread() - _count_queued(self._socket)

    def _in_pieces(self, app: ASGIApp) -> ASGIApp:
        """Returns an application whose replies leave in pieces, and whose last `send` returns when the kernel has taken the
        reply.

        So an application holds everything that belongs to a request, such as a key's place among its concurrent requests, until
        then.
        """

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
                self.cycle.keep_alive = False  # a proxy may have read another end of it (RFC 9112, section 6.3)
            if self.unread is None:
                await app(scope, receive, _PiecewiseSend(self, send, None))
                return
            self._num_sent_bytes = 0
            reply = self._reply = self.unread.open(client_network(scope), lambda: self._end_reply(reply))
            # here too, because the timer of the reply before may go on for this one
            reply.begin_waiting(self._count_read(), self.loop.time())
            attach_reply(scope, reply)
            try:
                await app(scope, receive, _PiecewiseSend(self, send, reply))
            finally:
                self.unread.close(reply)
                if self._reply is reply:  # the next request on this connection may have begun
                    self._reply = None

        return run

    def _end_reply(self, reply: UnreadReply) -> None:
        """Ends a reply of which too much is held. A stream ends with an error behind what the client has not read, for which it
        has the time of every reply; a body cannot say that it was cut, nor can a reply that has not started, whose sends would
        not wait: their connection is reset, which aborts their request."""
        if reply.num_queued and self.cycle.response_started:
            self.cycle.keep_alive = False  # its writes no longer wait, but those of another reply must
            self.flow.resume_writing()
        else:
            self._reset()

    @property
    def is_closing(self) -> bool:
        """Whether further sends are discarded."""
        return self.transport.is_closing()

    def note_sent(self, num_bytes: int) -> None:
        """Counts bytes of the current reply that were handed over."""
        self._num_sent_bytes += num_bytes


def _count_queued(transport: asyncio.Transport) -> int:
    """Returns the bytes in the kernel that the peer has not acknowledged (SIOCOUTQ, tcp(7)).

    asyncio's own buffer alone shows no progress until a third of the kernel's is free, which takes minutes on a slow link.
    """
    count = array.array("i", [0])
    with contextlib.suppress(OSError):  # not on every system
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return count[0]


def _limit_unsent(transport: asyncio.Transport) -> None:
    """Limits the bytes that the kernel accepts but cannot send yet."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        with contextlib.suppress(OSError):  # a socket of another kind
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


class _PiecewiseSend:
    """Hands a reply over piece by piece, and counts the bytes held of it.

    Args:
        reply: its account; None if nothing bounds it.
    """

    __slots__ = ("_connection", "_held_bytes", "_left_bytes", "_reply", "_send", "_was_told")

    def __init__(self, connection: Connection, send: Send, reply: UnreadReply | None) -> None:
        self._connection = connection
        self._send = send
        self._reply = reply
        self._was_told = False
        self._left_bytes = LAST_BYTES
        self._held_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._reply is None:
            await self._pass(body)
        else:
            self._check(self._reply, len(body))
            self._reply.hold(len(body))
            await self._pass(body)
            self._reply.hold(-self._held_bytes)  # what was handed over before has left: uvicorn waits for the kernel
            self._held_bytes = len(body)
            self._check(self._reply, 0)
        if is_last:  # by itself, because uvicorn waits for the kernel before it writes, not after
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            if self._reply is not None:
                self._reply.hold(-self._held_bytes)
                self._held_bytes = 0

    async def _pass(self, body: bytes) -> None:
        for start in range(0, len(body), PIECE_BYTES):
            if self._connection.is_closing:
                await asyncio.sleep(0)  # so that uvicorn notices; otherwise each further piece is a line in asyncio's log
            piece = body[start : start + PIECE_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._connection.note_sent(len(piece))

    def _check(self, reply: UnreadReply, num_bytes: int) -> None:
        """Raises UnreadReplyError once if the reply was ended; from then on it has room for an error."""
        if not reply.is_ended or self._connection.is_closing:
            return
        if not self._was_told:
            self._was_told = True
            raise UnreadReplyError
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise UnreadReplyError


# A listener that accepts a few connections per iteration of the event loop.
#
# asyncio accepts as many as its backlog at once, a tenth of a millisecond each, and serves no other connection meanwhile.


BACKLOG: Final = 2048
"""Connections that the kernel queues until they are accepted."""
ACCEPTS_AT_ONCE: Final = 8
"""Accepts per iteration of the event loop; also uvicorn's `backlog`, which it passes to asyncio."""


class PacedServer(uvicorn.Server):
    """uvicorn whose sockets have the kernel's backlog instead of asyncio's; its config needs `backlog=ACCEPTS_AT_ONCE`."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has just set it to its own; a second call changes nothing else (listen(2))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, waits for running requests, and closes the rest: handshakes, which uvicorn does not track."""
        await super().shutdown(sockets)
        protocol = self.config.http_protocol_class
        if issubclass(protocol, Connection) and protocol.table is not None:
            protocol.table.close()
