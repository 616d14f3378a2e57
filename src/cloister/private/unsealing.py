"""Opening requests: what the programs need of whoever holds the keys, and the plain text of a request while it arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cloister.private.http_io import join_pieces
from cloister.trust.sealing import (
    WHOLE,
    ChunkOpener,
    Form,
    Header,
    MessageReader,
    OhttpContext,
    Part,
    Receiver,
    RequestHead,
    header_bytes,
)


class PublicKeys(NamedTuple):
    """What is public of one key: `application/ohttp-keys`, and the Ed25519 key that checks its receipts, 32 bytes."""

    sealing: bytes
    receipts: bytes


class Unsealer(Protocol):
    """Whoever holds private keys: this process, or one that does nothing else."""

    async def publish(self) -> bytes:
        """Returns the current key configurations as `application/ohttp-keys`."""

    async def publish_all(self) -> PublicKeys:
        """Returns all that is public of the current key."""

    async def begin(self, header: Header, form: Form) -> OhttpContext:
        """Returns what opens the request with this header.

        For one that nothing opens, it is an exchange like any other, in which the first chunk fails: so every failure is the
        same, and takes as long.

        Raises:
            ReplayCacheFullError: so many requests came that a further one could not be recognised again.
        """

    async def accept(self, header: Header) -> None:
        """Takes in a request whose first chunk has opened, so that no copy of it is ever opened.

        Raises:
            UnsealError: a copy of it was taken in meanwhile.
            ReplayCacheFullError: as `begin`.
        """

    async def sign(self, header: Header, message: bytes) -> bytes:
        """Signs the receipt of a request that was taken in (Ed25519).

        Raises:
            UnsealError: it was not taken in, or its key is gone.
        """


class LocalUnsealer:
    """Keys in this process.

    Args:
        now: the clock of the ring, in seconds.
    """

    def __init__(self, receiver: Receiver, now: Callable[[], float] = time.monotonic) -> None:
        self._receiver = receiver
        self._now = now

    async def publish(self) -> bytes:
        self._receiver.ring.rotate(self._now())
        return self._receiver.ring.publish()

    async def publish_all(self) -> PublicKeys:
        return PublicKeys(await self.publish(), self._receiver.ring.publish_receipt_key())

    async def begin(self, header: Header, form: Form) -> OhttpContext:
        return self._receiver.begin(header, form, self._now())

    async def accept(self, header: Header) -> None:
        self._receiver.accept(header, self._now())

    async def sign(self, header: Header, message: bytes) -> bytes:
        return self._receiver.sign(header, message, self._now())

    async def turn_forever(self) -> None:
        """Replaces and destroys keys on time where nobody asks."""
        ring = self._receiver.ring
        while True:
            await asyncio.sleep(max(0.0, ring.next_change_s - self._now()))
            ring.rotate(self._now())


@dataclass(frozen=True)
class Opened:
    """A request that is being opened.

    Attributes:
        exchange: seals the response.
        plaintext: what was sealed, chunk by chunk; it raises `UnsealError` where the message is not what it should be, so it is
            whole only when it has ended by itself.
    """

    exchange: OhttpContext
    plaintext: AsyncIterator[bytes]


async def open_request(unsealer: Unsealer, form: Form, pieces: AsyncIterator[bytes]) -> Opened:
    """Begins to open a request.

    Raises:
        UnsealError: it is shorter than a header.
        ReplayCacheFullError: see `Unsealer.begin`.
    """
    head = bytearray()
    async for piece in pieces:
        head += piece
        if len(head) >= header_bytes(head):
            break
    header = Header.parse(bytes(head))
    exchange = await unsealer.begin(header, form)
    rest = join_pieces(bytes(head[len(header.encode()) :]), pieces)
    opening = _open_whole if form is WHOLE else _open_chunks
    return Opened(exchange, opening(unsealer, exchange, rest))


async def read_parts(plaintext: AsyncIterator[bytes]) -> AsyncIterator[Part]:
    """Yields the parts of a binary HTTP message while it arrives.

    Raises:
        MessageError: it is invalid, or no request.
        UnsealError: see `Opened`.
    """
    reader = MessageReader()
    async for data in plaintext:
        for part in reader.feed(data):
            yield part
    for part in reader.close():
        yield part


async def read_head(parts: AsyncIterator[Part]) -> RequestHead | None:
    """Returns the head of the request; None if the message is a response."""
    async for part in parts:
        return part if isinstance(part, RequestHead) else None
    return None


async def _open_chunks(unsealer: Unsealer, exchange: OhttpContext, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    opener, is_accepted = ChunkOpener(exchange.context), False
    async for piece in pieces:
        for plaintext in opener.feed(piece):
            if not is_accepted:
                await unsealer.accept(exchange.header)
                is_accepted = True
            yield plaintext
    last = opener.close()
    if not is_accepted:
        await unsealer.accept(exchange.header)
    yield last


async def _open_whole(unsealer: Unsealer, exchange: OhttpContext, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    sealed = bytearray()
    async for piece in pieces:
        sealed += piece
    whole = bytes(sealed)
    sealed.clear()  # a request may be large, and there would be three of it
    plaintext = exchange.context.open(whole)
    del whole
    await unsealer.accept(exchange.header)
    yield plaintext
