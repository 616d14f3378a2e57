"""Opening requests: the interface to the holder of the keys, and the plain text of a request while it arrives."""

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
    """The public parts of one key: `application/ohttp-keys`, and the Ed25519 key that verifies its receipts, 32 bytes."""

    sealing: bytes
    receipts: bytes


class Unsealer(Protocol):
    """The holder of private keys: this process or a separate one."""

    async def publish(self) -> bytes:
        """Returns the current key configurations as `application/ohttp-keys`."""

    async def publish_all(self) -> PublicKeys:
        """Returns all public parts of the current key."""

    async def begin(self, header: Header, form: Form) -> OhttpContext:
        """Returns the exchange that opens the request with this header.

        A header that no key opens gets an exchange too, whose first chunk fails: so all failures look the same and take equally
        long.

        Raises:
            ReplayCacheFullError: the replay cache is full, so a copy of this request could not be recognised.
        """

    async def accept(self, header: Header) -> None:
        """Accepts a request whose first chunk has opened, so that no copy of it is opened later.

        Raises:
            UnsealError: a copy of it was accepted meanwhile.
            ReplayCacheFullError: as `begin`.
        """

    async def sign(self, header: Header, message: bytes) -> bytes:
        """Signs the receipt of an accepted request (Ed25519).

        Raises:
            UnsealError: the request was not accepted, or its key was destroyed.
        """


class LocalUnsealer:
    """Holds the keys in this process.

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
        """Rotates and destroys keys on time even without requests."""
        ring = self._receiver.ring
        while True:
            await asyncio.sleep(max(0.0, ring.next_change_s - self._now()))
            ring.rotate(self._now())


@dataclass(frozen=True)
class Opened:
    """A request that is being opened.

    Attributes:
        exchange: seals the response.
        plaintext: decrypted chunks; raises `UnsealError` on a malformed message, so the request is complete only once the
            iterator ends without an error.
    """

    exchange: OhttpContext
    plaintext: AsyncIterator[bytes]


async def open_request(unsealer: Unsealer, form: Form, pieces: AsyncIterator[bytes]) -> Opened:
    """Begins to open a request.

    Raises:
        UnsealError: the message is shorter than a header.
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
        MessageError: the message is invalid, or not a request.
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
    sealed.clear()  # a request may be large, and this would be a third copy
    plaintext = exchange.context.open(whole)
    del whole
    await unsealer.accept(exchange.header)
    yield plaintext
