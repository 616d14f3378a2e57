"""Oblivious HTTP (RFC 9458): single-shot messages, and the parts shared with the chunked form. No I/O, no clock."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, replace
from typing import Final

from cloister.trust.sealing.errors import KeyConfigurationError, UnsealError
from cloister.trust.sealing.hpke import NONCE_BYTES, TAG_BYTES, Context, HpkeContext, Suite, kdf_of, new_cipher, set_up_sender
from cloister.trust.sealing.kem import X25519, find_kem
from cloister.trust.sealing.keys import KeyConfiguration
from cloister.trust.sealing.messages import decode_varint, encode_varint, varint_bytes

_NUMBERS: Final = struct.Struct(">BHHH")
NUMBERS_BYTES: Final = _NUMBERS.size
"""Length of the key id and algorithm ids at the start of a request; the encapsulated key follows."""


@dataclass(frozen=True, slots=True)
class Form:
    """One of the two forms of OHTTP; the labels prevent opening a message of one form as the other.

    Attributes:
        request_label, response_label: labels for key derivation.
        request_type, response_type: media types.
    """

    request_label: bytes
    response_label: bytes
    request_type: str
    response_type: str


WHOLE: Final = Form(b"message/bhttp request", b"message/bhttp response", "message/ohttp-req", "message/ohttp-res")
CHUNKED: Final = Form(
    b"message/bhttp chunked request",
    b"message/bhttp chunked response",
    "message/ohttp-chunked-req",
    "message/ohttp-chunked-res",
)
FORMS: Final = {form.request_type: form for form in (WHOLE, CHUNKED)}
"""By the media type of a request."""


@dataclass(frozen=True, slots=True)
class Header:
    """The clear-text header of a request."""

    key_id: int
    kem_id: int
    suite: Suite
    enc: bytes

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Reads the first `header_bytes` of a request. The key may be unknown.

        Raises:
            UnsealError: there are fewer.
        """
        num_bytes = header_bytes(data)
        if len(data) < num_bytes:
            raise UnsealError
        key_id, kem_id, kdf_id, aead_id = _NUMBERS.unpack_from(data)
        return cls(key_id, kem_id, Suite(kdf_id, aead_id), bytes(data[_NUMBERS.size : num_bytes]))

    @property
    def numbers(self) -> bytes:
        return _NUMBERS.pack(self.key_id, self.kem_id, self.suite.kdf_id, self.suite.aead_id)

    def encode(self) -> bytes:
        return self.numbers + self.enc

    def info(self, form: Form) -> bytes:
        """Returns the info string to which the request's keys are bound (section 4.3)."""
        return form.request_label + b"\0" + self.numbers


def header_bytes(start: bytes | bytearray) -> int:
    """Returns the header length of a request that begins with `start`, derived from the KEM id.

    Before the KEM id has arrived, it is the length of the ids. An unknown KEM counts as X25519: such a request is refused like
    one with an unknown key.
    """
    if len(start) < NUMBERS_BYTES:
        return NUMBERS_BYTES
    kem = find_kem(_NUMBERS.unpack_from(start)[1]) or X25519
    return NUMBERS_BYTES + kem.enc_bytes


class OhttpContext:
    """The state of one OHTTP request on either side (RFC 9458): its sealing context, and the keys of its response.

    Attributes:
        form: form of request and response.
        header: header of the request.
        context: context that seals or opens the request.
    """

    def __init__(self, form: Form, header: Header, context: Context) -> None:
        self.form = form
        self.header = header
        self.context = context

    @property
    def nonce_bytes(self) -> int:
        """Length of the nonce at the start of a response."""
        return self.context.secrets.suite.secret_bytes

    def response_sequence(self, nonce: bytes) -> HpkeContext:
        """Returns the AEAD for the response that begins with `nonce` (section 4.4)."""
        suite = self.context.secrets.suite
        secret = self.context.export(self.form.response_label, suite.secret_bytes)
        kdf = kdf_of(self.context.secrets.kem_id, suite)
        prk = kdf.extract(self.header.enc + nonce, secret)
        return HpkeContext(new_cipher(suite, kdf.expand(prk, b"key", suite.key_bytes)), kdf.expand(prk, b"nonce", NONCE_BYTES))

    def draw_nonce(self) -> bytes:
        return secrets.token_bytes(self.nonce_bytes)


def begin_request(
    configuration: KeyConfiguration, form: Form, *, suite: Suite | None = None, ephemeral: bytes | None = None
) -> OhttpContext:
    """Begins a request to the holder of a key, with an ephemeral key pair.

    Args:
        suite: None uses the best one that the holder offers.
        ephemeral: private key to encapsulate with; for test vectors only; None draws one.

    Raises:
        KeyConfigurationError: the holder offers no supported suite, or its public key is invalid or of low order.
    """
    suite = suite or configuration.choose_suite()
    bare = Header(configuration.key_id, configuration.kem_id, suite, b"")
    try:
        enc, context = set_up_sender(configuration.kem, configuration.public_key, suite, bare.info(form), ephemeral)
    except ValueError:
        raise KeyConfigurationError(
            f"key {configuration.key_id} cannot be sealed to: it is no public key, or of low order"
        ) from None
    return OhttpContext(form, replace(bare, enc=enc), context)


def seal_request(
    configuration: KeyConfiguration, message: bytes, *, ephemeral: bytes | None = None
) -> tuple[bytes, OhttpContext]:
    """Seals a binary HTTP request as a whole; returns it and the exchange that opens the response. See `begin_request`."""
    exchange = begin_request(configuration, WHOLE, ephemeral=ephemeral)
    return exchange.header.encode() + exchange.context.seal(message), exchange


def seal_response(exchange: OhttpContext, message: bytes, *, nonce: bytes | None = None) -> bytes:
    """Seals a binary HTTP response as a whole. `nonce` is for test vectors only; None draws one."""
    nonce = exchange.draw_nonce() if nonce is None else nonce
    return nonce + exchange.response_sequence(nonce).seal(message)


def open_response(exchange: OhttpContext, sealed: bytes) -> bytes:
    """Opens a response that was sealed as a whole.

    Raises:
        UnsealError: it is not the response to this request, or it was changed.
    """
    nonce, rest = sealed[: exchange.nonce_bytes], sealed[exchange.nonce_bytes :]
    return exchange.response_sequence(nonce).open(rest)


# Chunked OHTTP (draft-ietf-ohai-chunked-ohttp-08): messages sealed and opened chunk by chunk.
#
# A chunk is bound to its index by its nonce, the last one by the associated data `final`; so missing, repeated or reordered
# chunks, and truncated messages, do not open.

DRAFT: Final = "draft-ietf-ohai-chunked-ohttp-08"
MAX_CHUNK_BYTES: Final = 2**14
"""Maximum plaintext of a sent chunk: the size that every receiver must accept (section 3 of the draft)."""
MAX_TAKEN_BYTES: Final = 2**16 + TAG_BYTES
"""Maximum accepted sealed chunk: this much of a message is buffered at once."""
FINAL: Final = b"final"
_FINAL_LENGTH: Final = b"\0"


class ChunkSealer:
    """Seals pieces of one message; `prefix` precedes the first.

    Send the returned bytes in order. An unfinished message does not open completely.
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
        """Returns the last chunks of `data`; the final one marks the end of the message."""
        num_last = len(data) % MAX_CHUNK_BYTES or min(len(data), MAX_CHUNK_BYTES)
        sealed = self.seal(data[: len(data) - num_last])
        self._is_finished = True
        return sealed + _FINAL_LENGTH + self._sequence.seal(data[len(data) - num_last :], FINAL)

    def _take_prefix(self) -> bytes:
        prefix, self._prefix = self._prefix, b""
        return prefix


class ChunkOpener:
    """Opens chunks as they arrive, in pieces of any size. After an error it opens nothing."""

    def __init__(self, sequence: HpkeContext) -> None:
        self._sequence = sequence
        self._buffer = bytearray()
        self._is_last = False
        self._is_over = False

    def feed(self, data: bytes) -> list[bytes]:
        """Adds the next bytes and returns the plaintext of each complete chunk.

        Raises:
            UnsealError: a chunk was changed or moved.
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
        """Marks the end of the input, and returns the plaintext of the last chunk, which may be empty.

        Raises:
            UnsealError: the message was cut off.
        """
        self._check_open()
        if not self._is_last:
            raise self._end()
        plaintext = self._open(bytes(self._buffer), FINAL)
        self._buffer.clear()
        self._is_over = True
        return plaintext

    def _take(self) -> bytes | None:
        """Returns the next complete chunk that is not the last; None if there is none yet."""
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
        exchange: opens the response.
    """

    def __init__(self, configuration: KeyConfiguration, *, ephemeral: bytes | None = None) -> None:
        self.exchange = begin_request(configuration, CHUNKED, ephemeral=ephemeral)
        super().__init__(self.exchange.context, self.exchange.header.encode())


class ResponseSealer(ChunkSealer):
    """Seals the response to an opened request. `nonce` is for test vectors only; None draws one."""

    def __init__(self, exchange: OhttpContext, *, nonce: bytes | None = None) -> None:
        nonce = exchange.draw_nonce() if nonce is None else nonce
        super().__init__(exchange.response_sequence(nonce), nonce)


class ResponseOpener:
    """Opens the response to a request that was sealed here; see `ChunkOpener`."""

    def __init__(self, exchange: OhttpContext) -> None:
        self._exchange = exchange
        self._head = bytearray()
        self._chunks: ChunkOpener | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Adds the next bytes and returns the plaintext of each complete chunk.

        Raises:
            UnsealError: a chunk was changed or moved, or the response belongs to another request.
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
        """Marks the end of the input, and returns the plaintext of the last chunk.

        Raises:
            UnsealError: the response was cut off.
        """
        if self._chunks is None:
            raise UnsealError
        return self._chunks.close()


def seal_chunked_request(configuration: KeyConfiguration, message: bytes) -> tuple[bytes, OhttpContext]:
    """Seals a whole binary HTTP request in chunks; returns it and the exchange that opens the response."""
    sealer = RequestSealer(configuration)
    return sealer.finish(message), sealer.exchange
