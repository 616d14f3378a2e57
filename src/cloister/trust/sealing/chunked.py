"""Chunked OHTTP (draft-ietf-ohai-chunked-ohttp-08): messages sealed and opened chunk by chunk. No I/O, no clock.

A chunk is bound to its place by its nonce, the last one by the associated data `final`; so chunks that are missing, come twice
or in another order, and a message that breaks off, do not open.
"""

from __future__ import annotations

from typing import Final

from cloister.trust.sealing.errors import UnsealError
from cloister.trust.sealing.hpke import TAG_BYTES, HpkeContext, Suite
from cloister.trust.sealing.keys import KeyConfiguration
from cloister.trust.sealing.messages import decode_varint, encode_varint, varint_bytes
from cloister.trust.sealing.ohttp import CHUNKED, Exchange, begin_request

DRAFT: Final = "draft-ietf-ohai-chunked-ohttp-08"
MAX_CHUNK_BYTES: Final = 2**14
"""Longest plaintext of a chunk that is sent: what everybody must take (section 3 of the draft)."""
MAX_TAKEN_BYTES: Final = 2**16 + TAG_BYTES
"""Longest sealed chunk that is taken: so much of a message is kept at once."""
FINAL: Final = b"final"
_FINAL_LENGTH: Final = b"\0"


class ChunkSealer:
    """Seals pieces of one message; the first has `prefix` before it.

    What is returned is to be sent in that order. A message that is not finished does not open as a whole.
    """

    def __init__(self, sequence: HpkeContext, prefix: bytes) -> None:
        self._sequence = sequence
        self._prefix = prefix
        self._is_finished = False

    def seal(self, data: bytes) -> bytes:
        """Returns `data` as chunks of at most `MAX_CHUNK_BYTES`; no chunk for no data."""
        assert not self._is_finished, "a message is finished once"
        pieces = [self._take_prefix()]
        for start in range(0, len(data), MAX_CHUNK_BYTES):
            sealed = self._sequence.seal(data[start : start + MAX_CHUNK_BYTES])
            pieces += (encode_varint(len(sealed)), sealed)
        return b"".join(pieces)

    def finish(self, data: bytes = b"") -> bytes:
        """Returns the last chunk, which holds the end of `data` and marks the end of the message."""
        num_last = len(data) % MAX_CHUNK_BYTES or min(len(data), MAX_CHUNK_BYTES)
        sealed = self.seal(data[: len(data) - num_last])
        self._is_finished = True
        return sealed + _FINAL_LENGTH + self._sequence.seal(data[len(data) - num_last :], FINAL)

    def _take_prefix(self) -> bytes:
        prefix, self._prefix = self._prefix, b""
        return prefix


class ChunkOpener:
    """Opens chunks as they arrive, in pieces of any size. After an error it opens nothing more."""

    def __init__(self, sequence: HpkeContext) -> None:
        self._sequence = sequence
        self._buffer = bytearray()
        self._is_last = False
        self._is_over = False

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in the next bytes and returns the plaintext of each chunk that is whole by now.

        Raises:
            UnsealError: a chunk is not what was sealed at its place.
        """
        self._check_open()
        self._buffer += data
        opened = []
        while (sealed := self._take()) is not None:
            opened.append(self._open(sealed, b""))
        if self._is_last and len(self._buffer) > MAX_TAKEN_BYTES:
            raise self._end()
        return opened

    def close(self) -> bytes:
        """Says that no more bytes come, and returns the plaintext of the last chunk, which may be empty.

        Raises:
            UnsealError: the message broke off.
        """
        self._check_open()
        if not self._is_last:
            raise self._end()
        plaintext = self._open(bytes(self._buffer), FINAL)
        self._buffer.clear()
        self._is_over = True
        return plaintext

    def _take(self) -> bytes | None:
        """Takes the next whole chunk that is not the last; None while there is none."""
        if self._is_last or not self._buffer or len(self._buffer) < varint_bytes(self._buffer[0]):
            return None
        start = varint_bytes(self._buffer[0])
        length = decode_varint(self._buffer[:start])
        if length == 0:
            self._is_last = True
            del self._buffer[:start]
            return None
        if not TAG_BYTES < length <= MAX_TAKEN_BYTES:  # only the last one may be empty
            raise self._end()
        if len(self._buffer) < start + length:
            return None
        sealed = bytes(self._buffer[start : start + length])
        del self._buffer[: start + length]
        return sealed

    def _open(self, sealed: bytes, aad: bytes) -> bytes:
        try:
            return self._sequence.open(sealed, aad)
        except UnsealError:
            raise self._end() from None

    def _end(self) -> UnsealError:
        self._is_over = True
        self._buffer.clear()
        return UnsealError()

    def _check_open(self) -> None:
        if self._is_over:
            raise UnsealError


class RequestSealer(ChunkSealer):
    """Seals a request to the holder of a key. See `begin_request` for the arguments and errors.

    Attributes:
        exchange: what opens the response.
    """

    def __init__(self, configuration: KeyConfiguration, *, suite: Suite | None = None, ephemeral: bytes | None = None) -> None:
        self.exchange = begin_request(configuration, CHUNKED, suite=suite, ephemeral=ephemeral)
        super().__init__(self.exchange.context, self.exchange.header.encode())


class ResponseSealer(ChunkSealer):
    """Seals the response to an opened request. `nonce` is for official examples only; None draws one."""

    def __init__(self, exchange: Exchange, *, nonce: bytes | None = None) -> None:
        nonce = exchange.draw_nonce() if nonce is None else nonce
        super().__init__(exchange.response_sequence(nonce), nonce)


class ResponseOpener:
    """Opens the response to a request that was sealed here; see `ChunkOpener`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._head = bytearray()
        self._chunks: ChunkOpener | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in the next bytes and returns the plaintext of each chunk that is whole by now.

        Raises:
            UnsealError: a chunk is not what was sealed at its place, or the response is another request's.
        """
        if self._chunks is None:
            self._head += data
            if len(self._head) < self._exchange.nonce_bytes:
                return []
            nonce = bytes(self._head[: self._exchange.nonce_bytes])
            data = bytes(self._head[self._exchange.nonce_bytes :])
            self._chunks = ChunkOpener(self._exchange.response_sequence(nonce))
        return self._chunks.feed(data)

    def close(self) -> bytes:
        """Says that no more bytes come, and returns the plaintext of the last chunk.

        Raises:
            UnsealError: the response broke off.
        """
        if self._chunks is None:
            raise UnsealError
        return self._chunks.close()


def seal_chunked_request(configuration: KeyConfiguration, message: bytes) -> tuple[bytes, Exchange]:
    """Seals a whole binary HTTP request in chunks; returns it and what opens the response."""
    sealer = RequestSealer(configuration)
    return sealer.finish(message), sealer.exchange
