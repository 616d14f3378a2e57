"""The process that runs an engine for a front on another machine: `python -m cloister.cluster.remote.host`.

It reads who its front is from standard input, writes where it listens to standard output, and lives until standard input ends.
Nobody but the holder of the front's key gets further than a TLS handshake. An engine lives as long as the session that started
it; a front that comes back after its session was lost gets a new one. Messages pass through as bytes, unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from typing import Final

import msgspec

from cloister.cluster.link import Link, LinkError, LinkFrame, LinkServer
from cloister.cluster.remote.wire import STREAM_TIMES, Assembler, ChunkKind, FrameStream, split
from cloister.engine import channel, child_process
from cloister.engine.identity import Identity, is_peer, read_peer
from cloister.engine.spawning import spawn_program
from cloister.engine.transports import Spawn
from cloister.types.errors import CloisterError
from cloister.types.logs import describe, set_up_logging
from cloister.types.processes import name_process

HANDSHAKE_S: Final = 5.0
"""Longest TLS handshake."""
MAX_HANDSHAKES: Final = 64
"""Handshakes at once; a further one ends the oldest."""
MAX_UNREAD: Final = 512
"""Chunks of the engine that its front has not acknowledged; the engine then waits."""
_STREAM_LIMIT_BYTES: Final = 2**20
_ACCEPT_AGAIN_S: Final = 0.1

_logger = logging.getLogger("cloister.cluster.remote.host")  # it runs as `__main__`, whose messages no log shows


class HostRequest(msgspec.Struct, frozen=True):
    """To a host: who its front is, and the address to listen on. Contains no secret."""

    front: str
    address: str


class HostReport(msgspec.Struct, frozen=True):
    """From a host: the port on which it listens, and its certificate; or why it cannot."""

    port: int = 0
    certificate: str = ""
    error: str = ""


class _EngineSession:
    """What a session of the front has here: an engine process, and the messages to it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.read = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._assembler = Assembler()

    def take(self, chunk: bytes) -> None:
        """Takes a chunk of the front. Raises LinkError if the front sends what none sends."""
        completed = self._assembler.add(chunk)
        if completed is not None:
            self.messages.put_nowait(completed[1])


class EngineHost:
    """Listens for one front, and runs an engine for it.

    Args:
        identity: this side's.
        front: the front's certificate, PEM.
        spawn: starts an engine process.
    """

    def __init__(self, identity: Identity, front: str, *, spawn: Spawn = spawn_program) -> None:
        self._tls = identity.server_context(front)
        self._front = read_peer(front)
        self._spawn = spawn
        self._server = LinkServer(times=STREAM_TIMES)
        self._session: _EngineSession | None = None
        self._stream: FrameStream | None = None
        self._handshakes: deque[asyncio.Task[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._listener: socket.socket | None = None

    def listen(self, address: str) -> int:
        """Opens a port on one address of this machine, and returns it. Raises OSError if that is impossible."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        return port

    async def run(self) -> None:
        """Serves until it is cancelled; then ends the engine."""
        assert self._listener is not None, "listen first"
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._listener)
                except OSError:  # no descriptor is left; the handshakes that hold them end
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                self._shake_hands(sock)
        finally:
            self._listener.close()
            await self._end()

    async def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server.link = None
        tasks = {*self._tasks, *([self._session.task] if self._session is not None and self._session.task else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Connections

    def _shake_hands(self, sock: socket.socket) -> None:
        while len(self._handshakes) >= MAX_HANDSHAKES:
            self._handshakes.popleft().cancel()
        task = asyncio.create_task(self._admit(sock))
        self._handshakes.append(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, sock: socket.socket) -> None:
        """Admits the front and serves its connection; anybody else's is closed."""
        loop, stream = asyncio.get_running_loop(), None
        try:
            reader = asyncio.StreamReader(limit=_STREAM_LIMIT_BYTES, loop=loop)
            protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )
            if is_peer(transport.get_extra_info("ssl_object"), self._front):
                stream = FrameStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
            else:
                transport.abort()
        except OSError:  # includes ssl.SSLError, ConnectionError and TimeoutError: it is not the front
            pass
        finally:
            with contextlib.suppress(ValueError):
                self._handshakes.remove(asyncio.current_task())  # type: ignore[arg-type]
        if stream is not None:
            await self._serve(stream)

    async def _serve(self, stream: FrameStream) -> None:
        """Takes frames of the front's newest connection."""
        if self._stream is not None:
            self._stream.abort()
        self._stream = stream
        if self._server.link is not None:
            self._server.link.resume()
        try:
            while self._stream is stream and (received := await stream.receive()) is not None:
                self._take(received[0], stream)
        except LinkError as error:
            _logger.error("the connection to the front ends: %s", error.message)
        finally:
            stream.close()
            if self._stream is stream:
                self._stream = None

    def _take(self, frame: LinkFrame, stream: FrameStream) -> None:
        chunks, replies = self._server.receive(frame, asyncio.get_running_loop().time())
        for reply in replies:
            stream.send(reply)
        link = self._server.link
        if link is not None and (self._session is None or self._session.link is not link):
            self._begin(link)
        if self._session is not None:
            for chunk in chunks:
                self._session.take(chunk)
            self._session.read.set()
        self._poll()

    def _poll(self) -> None:
        """Sends what is due, and comes again when something will be."""
        if self._timer is not None:
            self._timer.cancel()
        link = self._server.link
        if link is None:
            return
        for frame in link.poll(asyncio.get_running_loop().time()):
            if self._stream is not None:
                self._stream.send(frame)
        if not link.is_lost:
            self._timer = asyncio.get_running_loop().call_at(link.next_poll_s, self._poll)
        elif self._session is not None and self._session.task is not None:
            self._session.task.cancel()

    # The engine

    def _begin(self, link: Link) -> None:
        """Begins a session; its predecessor's engine ends first."""
        before, self._session = self._session, _EngineSession(link)
        self._session.task = asyncio.create_task(self._run_engine(self._session, before), name="engine")

    async def _run_engine(self, session: _EngineSession, before: _EngineSession | None) -> None:
        if before is not None and before.task is not None:
            if not before.task.cancelling():  # else it waits for its engine to end, which a second call would cut short
                before.task.cancel()
            await asyncio.wait({before.task})
        boot = await session.messages.get()
        try:
            status = await self._pass_messages(session, boot)
        except (OSError, CloisterError) as error:
            _logger.error("the engine cannot be started: %s", describe(error))
            status = -1
        self._send(session, bytes([ChunkKind.STATUS]) + str(status).encode())
        while session.link.has_unread:  # what it said last must arrive
            session.read.clear()
            self._poll()
            await session.read.wait()
        if not session.link.is_lost and self._stream is not None:
            self._stream.send(session.link.reset())

    async def _pass_messages(self, session: _EngineSession, boot: bytes) -> int:
        """Runs an engine process until it ends, and returns its status; kills it if the session is lost."""
        near, far = socket.socketpair()
        with far:
            try:
                process = self._spawn(far)
            except BaseException:
                near.close()
                raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=near, limit=_STREAM_LIMIT_BYTES)
            sending = asyncio.create_task(self._send_to_engine(session, boot, writer))
            try:
                while (message := await channel.receive(reader)) is not None:
                    for chunk in split(message):
                        self._send(session, chunk)
                    while session.link.num_unread > MAX_UNREAD:
                        session.read.clear()
                        await session.read.wait()
            finally:
                sending.cancel()
                writer.close()
        finally:
            status = await child_process.end(process)
        return status

    async def _send_to_engine(self, session: _EngineSession, boot: bytes, writer: asyncio.StreamWriter) -> None:
        message = boot
        with contextlib.suppress(OSError):  # it has ended; its reader notices
            while True:
                writer.write(channel.frame_bytes(message))
                message = b""  # do not keep it alive while waiting for the next
                await writer.drain()
                message = await session.messages.get()

    def _send(self, session: _EngineSession, chunk: bytes) -> None:
        session.link.send(chunk)
        self._poll()


async def _wait_for_end_of_input() -> None:
    """Waits until whatever started this process has closed its standard input, or ended."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass


async def _main(request: HostRequest, report: int) -> None:
    identity = Identity.make()
    host = EngineHost(identity, request.front)
    said = HostReport(host.listen(request.address), identity.certificate)
    os.write(report, msgspec.json.encode(said) + b"\n")
    os.close(report)
    serving = asyncio.create_task(host.run())
    ended = asyncio.create_task(_wait_for_end_of_input())
    await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    await asyncio.wait({serving})


def main() -> int:
    """Reads the request, and runs a host; returns the exit status."""
    name_process("host")
    set_up_logging("text")
    report = os.dup(1)
    os.dup2(2, 1)  # engines write to this process's standard output, of which nobody reads more than the report
    try:
        request = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostRequest)
        asyncio.run(_main(request, report))
    except (msgspec.MsgspecError, CloisterError, OSError) as error:
        message = error.message if isinstance(error, CloisterError) else str(error)
        with contextlib.suppress(OSError):
            os.write(report, msgspec.json.encode(HostReport(error=message)) + b"\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
