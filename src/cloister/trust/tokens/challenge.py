"""Token challenges, tokens and their HTTP headers (RFC 9577); and the challenge that all parties derive from the epoch. Pure.

All clients share one challenge: issuer and gateway by name, no redemption context. A client-specific context would mark its
tokens, so `TokenChallenge` has the field only because the format requires it, and `Redeemer` never uses it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

TOKEN_TYPE = 2
"""Blind RSA, 2048 bits, publicly verifiable (RFC 9578, section 8.2.1)."""

NONCE_BYTES = 32
INPUT_BYTES = 2 + 3 * 32
"""The signed part of a token: type, nonce, digest of the challenge, id of the key."""

TOKEN_BYTES = INPUT_BYTES + 256
SCHEME = "PrivateToken"

_NAME = re.compile(rb"[\x21-\x7e]{1,255}")
_TOKEN = re.compile(r'PrivateToken +token=(?:"([A-Za-z0-9_-]+={0,2})"|([A-Za-z0-9_-]+={0,2})) *', re.IGNORECASE)


class MalformedTokenError(Exception):
    """A malformed challenge, token or header; the text repeats nothing of it."""


@dataclass(frozen=True, slots=True)
class TokenChallenge:
    """The issuer of a token, and where it may be spent (RFC 9577, section 2.1).

    Attributes:
        issuer_name: host of the issuer.
        origin_info: hosts that accept the token; empty for any.
        redemption_context: empty, or 32 bytes.
    """

    issuer_name: str
    origin_info: tuple[str, ...] = ()
    redemption_context: bytes = b""
    token_type: int = TOKEN_TYPE

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.issuer_name.encode()):
            raise ValueError("a challenge names its issuer by a host name in ASCII")
        if any(not _NAME.fullmatch(name.encode()) or "," in name for name in self.origin_info):
            raise ValueError("a challenge names its origins by host names in ASCII")
        if len(self.redemption_context) not in (0, 32):
            raise ValueError("a redemption context has 0 or 32 bytes")

    def encode(self) -> bytes:
        issuer, origins = self.issuer_name.encode(), ",".join(self.origin_info).encode()
        context = self.redemption_context
        return b"".join(
            (
                self.token_type.to_bytes(2, "big"),
                len(issuer).to_bytes(2, "big") + issuer,
                len(context).to_bytes(1, "big") + context,
                len(origins).to_bytes(2, "big") + origins,
            )
        )

    def digest(self) -> bytes:
        """Returns the digest of the challenge in a token, 32 bytes."""
        return hashlib.sha256(self.encode()).digest()

    @classmethod
    def decode(cls, data: bytes) -> TokenChallenge:
        """Reads a challenge.

        Raises:
            MalformedTokenError: it is malformed.
        """
        reader = _Reader(data)
        kind = int.from_bytes(reader.take(2), "big")
        issuer, context, origins = (reader.take_vector(width) for width in (2, 1, 2))
        reader.finish()
        try:
            names = tuple(origins.decode("ascii").split(",")) if origins else ()
            return cls(issuer.decode("ascii"), names, context, kind)
        except ValueError:
            raise MalformedTokenError("a field of the challenge is not what RFC 9577 allows") from None


@dataclass(frozen=True, slots=True)
class Token:
    """One token (RFC 9577, section 2.2).

    Attributes:
        nonce: 32 bytes that the client drew.
        challenge_digest: SHA-256 of the challenge.
        key_id: SHA-256 of the issuer's public key.
        authenticator: the signature, 256 bytes.
    """

    nonce: bytes = field(repr=False)
    challenge_digest: bytes
    key_id: bytes
    authenticator: bytes = field(repr=False, default=b"")

    @property
    def signed(self) -> bytes:
        """The bytes that the authenticator signs (`token_authenticator_input`, 98 bytes)."""
        return TOKEN_TYPE.to_bytes(2, "big") + self.nonce + self.challenge_digest + self.key_id

    def encode(self) -> bytes:
        return self.signed + self.authenticator

    @classmethod
    def decode(cls, data: bytes) -> Token:
        """Reads a token of type 2.

        Raises:
            MalformedTokenError: it has another length or type.
        """
        if len(data) != TOKEN_BYTES or int.from_bytes(data[:2], "big") != TOKEN_TYPE:
            raise MalformedTokenError("a token of type 2 has 354 bytes")
        return cls(data[2:34], data[34:66], data[66:98], data[98:])


def authorization(token: Token) -> str:
    """Returns the value of `Authorization` that spends a token (RFC 9577, section 2.2.1)."""
    return f'{SCHEME} token="{_to_text(token.encode())}"'


def read_authorization(value: str) -> Token:
    """Reads the value of `Authorization`.

    Raises:
        MalformedTokenError: it has another scheme, or no token of type 2.
    """
    match = _TOKEN.fullmatch(value)
    if match is None:
        raise MalformedTokenError(f'the header must read: {SCHEME} token="...", with the token in base64url')
    return Token.decode(from_text(match[1] or match[2]))


def authenticate(challenge: TokenChallenge, encoded_key: bytes, *, max_age_s: int | None = None) -> str:
    """Returns the value of `WWW-Authenticate` that requests a token (RFC 9577, section 2.1.2)."""
    age = "" if max_age_s is None else f", max-age={max_age_s}"
    return f'{SCHEME} challenge="{_to_text(challenge.encode())}", token-key="{_to_text(encoded_key)}"{age}'


def read_authenticate(value: str) -> list[tuple[TokenChallenge, bytes]]:
    """Reads challenges and encoded keys out of `WWW-Authenticate`; those of other schemes and types are skipped.

    Raises:
        MalformedTokenError: one of type 2 is malformed.
    """
    found = []
    for part in re.split(r"(?i)(?:^|, *)PrivateToken +", value)[1:]:
        fields = dict(re.findall(r'([a-z-]+)="?([A-Za-z0-9_=-]+)"?', part))
        challenge = TokenChallenge.decode(from_text(fields.get("challenge", "")))
        if challenge.token_type == TOKEN_TYPE:
            found.append((challenge, from_text(fields.get("token-key", ""))))
    return found


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def from_text(text: str) -> bytes:
    """base64url with or without padding; RFC 9577 requires it, but not every client adds it."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise MalformedTokenError("a value is not base64url") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise MalformedTokenError("a structure ends early")
        self._at += count
        return piece

    def take_vector(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width), "big"))

    def finish(self) -> None:
        if self._at != len(self._data):
            raise MalformedTokenError("bytes follow a structure")


# The token challenge that issuer, gateway and client each derive from the epoch file. Pure.


def challenge_between(issuer_url: str, gateway_url: str) -> TokenChallenge:
    """Returns the challenge for tokens of an issuer at a gateway: both by host, in lower case, with the port if any.

    A gateway could send each client a different challenge to mark its tokens; this derivation prevents that.
    """
    return TokenChallenge(_host(issuer_url), (_host(gateway_url),))


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2].lower()
