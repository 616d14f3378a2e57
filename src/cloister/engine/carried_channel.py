"""A worker's end of a channel to an engine of another machine, whose content is sealed (`engine.kv_sealed_link`)."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

import msgspec

from cloister.engine.channel import (
    HEAD_BYTES,
    READ_LIMIT_BYTES,
    ChannelError,
    MessageStream,
    decode_engine,
    frame,
    payload_size,
)
from cloister.engine.heartbeats import LOOK_S, Heartbeat
from cloister.engine.kv_frames import KVLinkError
from cloister.engine.kv_sealed_link import PUBLIC_BYTES, LinkRecords
from cloister.engine.kv_unit import SECRET_BYTES
from cloister.engine.locked_keys import lock_keys
from cloister.types.errors import ConfigError, EngineError
from cloister.types.events import EngineMessage, FrontMessage

HANDSHAKE_TIMEOUT_S: Final = 10.0
NOT_REACHED: Final = "the engine of another machine of the unit cannot be reached"


class SealedMessageStream(MessageStream):
    """As `MessageStream`, over records that the engine and this process alone can open. It ends if the engine does not answer
    heartbeats.

    Args:
        records: have agreed.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, records: LinkRecords) -> None:
        super().__init__(reader, writer)
        self._records = records
        self._sealed, self._opened = bytearray(), bytearray()
        self._heartbeat = Heartbeat()
        self._loop = asyncio.get_running_loop()
        self._next_look = self._loop.call_later(LOOK_S, self._look)

    @classmethod
    async def shake_hands(cls, sock: socket.socket) -> SealedMessageStream:
        """Takes over a connected socket, and agrees on keys with the engine.

        Raises:
            EngineError: it is not reached in time.
            ConfigError: no memory may be locked.
        """
        try:
            records = LinkRecords(lock_keys("unit_members"), is_source=False)
        except ConfigError:
            sock.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=READ_LIMIT_BYTES)
        try:
            writer.write(records.public)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                secret, theirs = await reader.readexactly(SECRET_BYTES), await reader.readexactly(PUBLIC_BYTES)
            records.agree(theirs, secret)
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError | EOFError | KVLinkError):
                raise EngineError(NOT_REACHED) from None
            raise
        return cls(reader, writer, records)

    def send(self, message: FrontMessage) -> None:
        if not self._writer.is_closing():
            self._write(self._records.seal_all(frame(message)))

    async def receive(self) -> EngineMessage | None:
        try:
            head = await self._read(HEAD_BYTES)
            return decode_engine(await self._read(payload_size(head)))
        except (OSError, EOFError, ChannelError, KVLinkError, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        self._next_look.cancel()
        super().close()
        self._records.close()

    def _write(self, records: bytes) -> None:
        self._heartbeat.note_sent(len(records))
        self._writer.write(records)

    def _look(self) -> None:
        if self._writer.is_closing():
            return
        if self._heartbeat.look():
            self._write(self._records.seal(b""))
        if self._heartbeat.is_late:
            self._writer.transport.abort()  # with what could not be sent; `receive` then returns None
        else:
            self._next_look = self._loop.call_later(LOOK_S, self._look)

    async def _read(self, num_bytes: int) -> bytes:
        """Returns the next bytes. Raises EOFError or OSError if the engine has ended, KVLinkError if it did not seal them."""
        while len(self._opened) < num_bytes:
            if (opened := self._records.open_next(self._sealed)) is not None:
                self._opened += opened
                if not opened:
                    self._heartbeat.note_answer()
            elif data := await self._reader.read(READ_LIMIT_BYTES):
                self._heartbeat.note_received(len(data))
                self._sealed += data
            else:
                raise EOFError
        taken = bytes(self._opened[:num_bytes])
        del self._opened[:num_bytes]
        return taken
