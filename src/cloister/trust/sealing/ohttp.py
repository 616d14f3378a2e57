"""Oblivious HTTP (RFC 9458): single-shot messages, and what the chunked form shares with them. No I/O, no clock."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, replace
from typing import Final

from cloister.trust.sealing.errors import KeyConfigurationError, UnsealError
from cloister.trust.sealing.hpke import NONCE_BYTES, Context, HpkeContext, Suite, kdf_of, new_cipher, set_up_sender
from cloister.trust.sealing.kem import X25519, find_kem
from cloister.trust.sealing.keys import KeyConfiguration

_NUMBERS: Final = struct.Struct(">BHHH")
NUMBERS_BYTES: Final = _NUMBERS.size
"""Length of the numbers of key and algorithms, which a request begins with; the encapsulated key follows."""


@dataclass(frozen=True, slots=True)
class Form:
    """One of the two forms of OHTTP; the labels keep a message of one from being opened as the other.

    Attributes:
        request_label, response_label: that go into the keys.
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
    """What a request begins with, in the clear for whoever carries it."""

    key_id: int
    kem_id: int
    suite: Suite
    enc: bytes

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Reads the first `header_bytes` of a request. Says nothing about whether anybody has the key.

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
        """Returns what the request's keys are bound to (section 4.3)."""
        return form.request_label + b"\0" + self.numbers


def header_bytes(start: bytes | bytearray) -> int:
    """Returns the length of the header of a request that begins with `start`: at least the number of the KEM tells.

    While that number is not there yet, it is the length of the numbers. A KEM that is not known here counts as X25519: such a
    request is refused as one with an unknown key is.
    """
    if len(start) < NUMBERS_BYTES:
        return NUMBERS_BYTES
    kem = find_kem(_NUMBERS.unpack_from(start)[1]) or X25519
    return NUMBERS_BYTES + kem.enc_bytes


class Exchange:
    """A request and the keys of its response, on either side.

    Attributes:
        form: of both.
        header: of the request.
        context: in which the request is sealed or opened.
    """

    def __init__(self, form: Form, header: Header, context: Context) -> None:
        self.form = form
        self.header = header
        self.context = context

    @property
    def nonce_bytes(self) -> int:
        """Length of the nonce that a response begins with."""
        return self.context.secrets.suite.secret_bytes

    def response_sequence(self, nonce: bytes) -> HpkeContext:
        """Returns what seals or opens the response that begins with `nonce` (section 4.4)."""
        suite = self.context.secrets.suite
        secret = self.context.export(self.form.response_label, suite.secret_bytes)
        kdf = kdf_of(self.context.secrets.kem_id, suite)
        prk = kdf.extract(self.header.enc + nonce, secret)
        return HpkeContext(new_cipher(suite, kdf.expand(prk, b"key", suite.key_bytes)), kdf.expand(prk, b"nonce", NONCE_BYTES))

    def draw_nonce(self) -> bytes:
        return secrets.token_bytes(self.nonce_bytes)


def begin_request(
    configuration: KeyConfiguration, form: Form, *, suite: Suite | None = None, ephemeral: bytes | None = None
) -> Exchange:
    """Begins a request to the holder of a key, with a key pair that is used once.

    Args:
        suite: None takes the best that the holder offers.
        ephemeral: private key to encapsulate with; for official examples only, None draws one.

    Raises:
        KeyConfigurationError: the holder offers no suite of ours, or its public key is none or of low order.
    """
    suite = suite or configuration.choose_suite()
    bare = Header(configuration.key_id, configuration.kem_id, suite, b"")
    try:
        enc, context = set_up_sender(configuration.kem, configuration.public_key, suite, bare.info(form), ephemeral)
    except ValueError:
        raise KeyConfigurationError(
            f"key {configuration.key_id} cannot be sealed to: it is no public key, or of low order"
        ) from None
    return Exchange(form, replace(bare, enc=enc), context)


def seal_request(
    configuration: KeyConfiguration, message: bytes, *, suite: Suite | None = None, ephemeral: bytes | None = None
) -> tuple[bytes, Exchange]:
    """Seals a binary HTTP request whole; returns it and what opens the response. See `begin_request`."""
    exchange = begin_request(configuration, WHOLE, suite=suite, ephemeral=ephemeral)
    return exchange.header.encode() + exchange.context.seal(message), exchange


def seal_response(exchange: Exchange, message: bytes, *, nonce: bytes | None = None) -> bytes:
    """Seals a binary HTTP response whole. `nonce` is for official examples only; None draws one."""
    nonce = exchange.draw_nonce() if nonce is None else nonce
    return nonce + exchange.response_sequence(nonce).seal(message)


def open_response(exchange: Exchange, sealed: bytes) -> bytes:
    """Opens a response that was sealed whole.

    Raises:
        UnsealError: it is not the response to this request, or it was changed.
    """
    nonce, rest = sealed[: exchange.nonce_bytes], sealed[exchange.nonce_bytes :]
    return exchange.response_sequence(nonce).open(rest)
