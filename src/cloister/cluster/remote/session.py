"""A front's session with an engine host: a link over TLS connections that are opened again when they break."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import deque
from typing import Final

from cloister.cluster.link import Link, LinkError
from cloister.cluster.remote.clock_offset import ClockOffset
from cloister.cluster.remote.placement import Place
from cloister.cluster.remote.wire import STREAM_TIMES, Assembler, ChunkKind, FrameStream, split
from cloister.engine.identity import Identity, is_peer, read_peer

RECONNECT_S: Final = 0.1
LOST_LINK: Final = "the connection to it was lost"
NOBODY_LISTENS: Final = "nothing listens at its address any more"
ANOTHER: Final = "another process than the engine's host answers at its address"
_STREAM_LIMIT_BYTES: Final = 2**20


class HostSession:
    """A session with a host, from which the engine's life hangs: the host ends the engine with it.

    Args:
        identity: this side's.

    Attributes:
        how: how it was lost; None while it is not.
        clock: from times of the host to those of this process.
    """

    def __init__(self, place: Place, identity: Identity) -> None:
        self.how: str | None = None
        self.clock = ClockOffset()
        self._place = place
        self._tls = identity.client_context(place.certificate)
        self._peer = read_peer(place.certificate)
        self._loop = asyncio.get_running_loop()
        self._link = Link(secrets.randbits(62), self._loop.time(), times=STREAM_TIMES)
        self._stream: FrameStream | None = None
        self._messages: deque[bytes] = deque()
        self._assembler = Assembler()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._poll()
        self._task = asyncio.create_task(self._keep_connected(), name="engine host")

    def send(self, message: bytes) -> None:
        """Sends a message without blocking; it is lost if the session is. Raises LinkError if it is too long."""
        for chunk in split(message):
            self._link.send(chunk)
        self._poll()

    async def receive(self) -> bytes | None:
        """Returns the next message; None when the session is lost."""
        while not self._messages:
            if self.how is not None:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

    def lose(self, how: str) -> None:
        """Ends the session, and tells the host if it can be reached."""
        if self.how is not None:
            return
        self.how = how
        if self._stream is not None:
            self._stream.send(self._link.reset())
        self._link.is_lost = True
        self._changed.set()

    async def close(self) -> None:
        """Ends the session and its connection."""
        self.lose(LOST_LINK)
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _keep_connected(self) -> None:
        try:
            while self.how is None:
                stream = await self._connect()
                if stream is not None:
                    await self._serve(stream)
                await asyncio.sleep(RECONNECT_S)
        except LinkError as error:
            self.lose(error.message)
        finally:
            self.lose(LOST_LINK)

    async def _connect(self) -> FrameStream | None:
        """Opens a connection; returns None if it cannot be opened at present."""
        place = self._place
        try:
            async with asyncio.timeout(STREAM_TIMES.lost_s):
                reader, writer = await asyncio.open_connection(
                    place.address, place.port, ssl=self._tls, server_hostname="", limit=_STREAM_LIMIT_BYTES
                )
        except ConnectionRefusedError:
            self.lose(NOBODY_LISTENS)
            return None
        except ssl.SSLCertVerificationError:
            self.lose(ANOTHER)
            return None
        except OSError:  # includes ssl.SSLError and TimeoutError
            return None
        if not is_peer(writer.get_extra_info("ssl_object"), self._peer):
            writer.transport.abort()
            self.lose(ANOTHER)
            return None
        return FrameStream(reader, writer)

    async def _serve(self, stream: FrameStream) -> None:
        """Takes frames until the connection breaks."""
        self._stream = stream
        self._link.resume()
        self._poll()
        try:
            while self.how is None and (received := await stream.receive()) is not None:
                frame, sent_s = received
                now = self._loop.time()
                self.clock.note(sent_s, now)
                for chunk in self._link.receive(frame, now):
                    self._take(chunk)
                self._poll()
        finally:
            self._stream = None
            stream.close()

    def _take(self, chunk: bytes) -> None:
        match self._assembler.add(chunk):
            case ChunkKind.LAST, message:
                self._messages.append(message)
                self._changed.set()
            case ChunkKind.STATUS, status:
                self.lose(f"the process ended with status {status.decode(errors='replace')[:8]}")
            case _:
                pass

    def _poll(self) -> None:
        """Sends what is due, and comes again when something will be."""
        if self._timer is not None:
            self._timer.cancel()
        for frame in self._link.poll(self._loop.time()):
            if self._stream is not None:
                self._stream.send(frame)
        if self._link.is_lost:
            self.lose(LOST_LINK)
        else:
            self._timer = self._loop.call_at(self._link.next_poll_s, self._poll)
