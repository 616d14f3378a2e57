"""Token issuance (RFC 9578, type 2): requests, responses and the issuer directory. Pure but for random bytes.

A batch is the generic batch of draft-ietf-privacypass-batched-tokens: concatenated type 2 requests, preceded by their length in
bytes as a QUIC variable-length integer (RFC 9000, section 16); each entry of the reply has a presence marker, the type and the
response.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cloister.trust.tokens.blind_rsa import (
    Blinding,
    RsaPrivateKey,
    blind,
    blind_sign,
    decode_public,
    finalize,
    key_id,
)
from cloister.trust.tokens.challenge import NONCE_BYTES, TOKEN_TYPE, MalformedTokenError, Token, TokenChallenge, from_text

REQUEST_TYPE = "application/private-token-request"
RESPONSE_TYPE = "application/private-token-response"
BATCH_REQUEST_TYPE = "application/private-token-generic-batch-request"
BATCH_RESPONSE_TYPE = "application/private-token-generic-batch-response"
DIRECTORY_TYPE = "application/private-token-issuer-directory"
DIRECTORY_PATH = "/.well-known/private-token-issuer-directory"

REQUEST_BYTES = 2 + 1 + 256
RESPONSE_BYTES = 256
MAX_BATCH = 100
"""Maximum tokens in one batch: an eighth of a second on one core of the issuer."""

_TYPE = TOKEN_TYPE.to_bytes(2, "big")
_PRESENT = b"\x01"


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One blinded message for the key whose id ends with `truncated_key_id` (RFC 9578, section 6.1)."""

    truncated_key_id: int
    blinded: bytes

    def encode(self) -> bytes:
        return _TYPE + bytes([self.truncated_key_id]) + self.blinded

    @classmethod
    def decode(cls, data: bytes) -> TokenRequest:
        """Reads a request.

        Raises:
            MalformedTokenError: it has another length or type.
        """
        if len(data) != REQUEST_BYTES or data[:2] != _TYPE:
            raise MalformedTokenError("a token request of type 2 has 259 bytes")
        return cls(data[2], data[3:])


@dataclass(frozen=True, slots=True)
class Pending:
    """Requested tokens: the client's state until the reply arrives."""

    encoded_key: bytes
    tokens: tuple[Token, ...] = field(repr=False)
    blindings: tuple[Blinding, ...] = field(repr=False)
    requests: tuple[TokenRequest, ...] = field(repr=False)

    def encode(self) -> bytes:
        """Returns the body of the batch request (`BATCH_REQUEST_TYPE`)."""
        body = b"".join(request.encode() for request in self.requests)
        return _to_varint(len(body)) + body

    def finish(self, answer: bytes) -> list[Token]:
        """Returns the finished tokens from the issuer's reply (`BATCH_RESPONSE_TYPE`).

        Raises:
            MalformedTokenError: the reply is not a batch with the same number of responses.
            BlindSignatureError: the issuer signed something else, or with another key than the published one.
        """
        responses = _split(_behind_varint(answer), 3 + RESPONSE_BYTES)
        if len(responses) != len(self.tokens) or any(r[:3] != _PRESENT + _TYPE for r in responses):
            raise MalformedTokenError("the issuer did not answer every request of the batch")
        return self.finish_each([response[3:] for response in responses])

    def finish_each(self, blind_signatures: Sequence[bytes]) -> list[Token]:
        """Returns the tokens, each from one response (`RESPONSE_TYPE`); raises like `finish`."""
        public = decode_public(self.encoded_key)
        made = zip(self.tokens, self.blindings, blind_signatures, strict=True)
        return [
            Token(token.nonce, token.challenge_digest, token.key_id, finalize(public, signature, blinding))
            for token, blinding, signature in made
        ]


def request_tokens(encoded_key: bytes, challenge: TokenChallenge, count: int) -> Pending:
    """Draws `count` tokens and blinds them.

    Args:
        encoded_key: the issuer's key, from the epoch file: a key shown to a single client would mark its tokens.

    Raises:
        ValueError: the key is not of type 2, or the count is not 1 to 100.
    """
    if not 1 <= count <= MAX_BATCH:
        raise ValueError(f"a batch has 1 to {MAX_BATCH} tokens")
    public, identity, digest = decode_public(encoded_key), key_id(encoded_key), challenge.digest()
    tokens = tuple(Token(os.urandom(NONCE_BYTES), digest, identity) for _ in range(count))
    blinded = [blind(public, token.signed) for token in tokens]
    requests = tuple(TokenRequest(identity[-1], message) for message, _ in blinded)
    return Pending(encoded_key, tokens, tuple(kept for _, kept in blinded), requests)


def decode_batch(body: bytes) -> list[TokenRequest]:
    """Reads the requests of a batch.

    Raises:
        MalformedTokenError: it is not a batch of 1 to 100 requests of type 2 for one key.
    """
    requests = [TokenRequest.decode(piece) for piece in _split(_behind_varint(body), REQUEST_BYTES)]
    if not 1 <= len(requests) <= MAX_BATCH or len({request.truncated_key_id for request in requests}) != 1:
        raise MalformedTokenError(f"a batch has 1 to {MAX_BATCH} requests, all for one key")
    return requests


def evaluate(private: RsaPrivateKey, request: TokenRequest) -> bytes:
    """Returns the issuer's response to one request (RFC 9578, section 6.2).

    Raises:
        MalformedTokenError: the blinded message is not below the modulus.
        BlindSignatureError: a computation on this machine failed.
    """
    if int.from_bytes(request.blinded, "big") >= private.public.n:
        raise MalformedTokenError("a blinded message is not below the modulus of the key")
    return blind_sign(private, request.blinded)


def encode_answers(signatures: Sequence[bytes]) -> bytes:
    """Returns the body of the reply to a batch."""
    body = b"".join(_PRESENT + _TYPE + signature for signature in signatures)
    return _to_varint(len(body)) + body


@dataclass(frozen=True, slots=True)
class DirectoryKey:
    """One key of an issuer's directory.

    Attributes:
        not_before: Unix seconds; clients use the first key that has become valid.
        taken_until, budget: see `AcceptedKey`; extensions, which other implementations ignore.
    """

    encoded_key: bytes
    not_before: int
    taken_until: int
    budget: int


def encode_directory(request_uri: str, keys: Sequence[DirectoryKey]) -> bytes:
    """Returns an issuer's directory (RFC 9578, section 4; JSON)."""
    entries = [
        _Key(TOKEN_TYPE, base64.urlsafe_b64encode(k.encoded_key).decode(), k.not_before, k.taken_until, k.budget) for k in keys
    ]
    return msgspec.json.encode(_Directory(request_uri, entries))


def decode_directory(data: bytes) -> tuple[str, list[DirectoryKey]]:
    """Returns the request URI and the keys of type 2.

    Raises:
        MalformedTokenError: it is not a directory.
    """
    try:
        directory = msgspec.json.decode(data, type=_Directory)
        keys = [
            DirectoryKey(from_text(key.token_key), key.not_before, key.taken_until, key.budget)
            for key in directory.token_keys
            if key.token_type == TOKEN_TYPE
        ]
    except msgspec.DecodeError:
        raise MalformedTokenError("this is no issuer directory as RFC 9578 section 4 has it") from None
    return directory.request_uri, keys


class _Key(msgspec.Struct, rename="kebab"):
    token_type: int
    token_key: str
    not_before: int = 0
    taken_until: int = msgspec.field(default=0, name="cloister-taken-until")
    budget: int = msgspec.field(default=0, name="cloister-budget")


class _Directory(msgspec.Struct):
    request_uri: str = msgspec.field(name="issuer-request-uri")
    token_keys: list[_Key] = msgspec.field(name="token-keys")


def _to_varint(value: int) -> bytes:
    for exponent, bits in enumerate((6, 14, 30)):
        if value < 1 << bits:
            return (value | exponent << bits).to_bytes(1 << exponent, "big")
    raise ValueError("too long for a batch")


def _behind_varint(data: bytes) -> bytes:
    """Returns the data after a length prefix, which must match."""
    if not data:
        raise MalformedTokenError("a batch is empty")
    width = 1 << (data[0] >> 6)
    length = int.from_bytes(data[:width], "big") & ((1 << (8 * width - 2)) - 1)
    if len(data) < width or len(data) - width != length:
        raise MalformedTokenError("the length of a batch is not that of what follows")
    return data[width:]


def _split(data: bytes, size: int) -> list[bytes]:
    if len(data) % size:
        raise MalformedTokenError("a batch ends inside a structure")
    return [data[i : i + size] for i in range(0, len(data), size)]
