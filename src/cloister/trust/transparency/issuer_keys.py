"""Keys of a token issuer, signed with their validity, and proofs that an issuer signed two keys for the same period. No I/O, no
clock.

With one key at a time, for at least a week, a token does not reveal when it was bought. Because the issuer signs its keys, two
keys for the same period are a proof: nobody else can have signed them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, UnsetType

from cloister.policy.profile import is_loopback
from cloister.trust.transparency.epoch import Count, IssuerEntry, Keys, Url
from cloister.trust.transparency.note import Kind, PrivateKey, PublicKey
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.types.errors import ConfigError

MIN_KEY_LIFE_S: Final = 7 * 86400
"""Minimum signing period of a key: a shorter one would reveal too precisely when a token was bought."""
MAX_KEY_LIFE_S: Final = 31 * 86400
"""How far back a client must read the log to know every key that may still be in use."""
OVERLAP_S: Final = 86400
"""How long a token may be spent after its key has stopped signing."""
MAX_STATEMENT_LIFE_S: Final = 86400
MAX_STATEMENT_BYTES: Final = 65_536

_KEY_PREFIX: Final = b"cloister issuer key v1\n"
_STATEMENT_PREFIX: Final = b"cloister issuer statement v1\n"


@dataclass(frozen=True)
class IssuerIdentity:
    """The issuer from which a client buys.

    Attributes:
        url: https, or http on this machine; without a trailing slash.
        key: verifies the issuer's statements about its keys; a signed-note key (C2SP) of kind 1.

    Raises:
        ConfigError: the URL or the kind of key is not allowed.
    """

    url: str
    key: PublicKey

    def __post_init__(self) -> None:
        if not _is_private(self.url):
            raise ConfigError(f"the API key is shown to the issuer, so its URL is https or on this machine, not {self.url!r}")
        if self.url.endswith("/"):
            raise ConfigError(f"write the issuer's URL without a slash at its end: {self.url.rstrip('/')}")
        if self.key.kind is not Kind.NOTE:
            raise ConfigError("the issuer's verifier key is of kind 1; make it with: cloister log key NAME --role issuer")

    def has_signed(self, entry: IssuerEntry) -> bool:
        """Whether an entry is a valid statement of this issuer: its URL, its signature, and a signing period within
        the limits."""
        life_s = entry.not_after - entry.not_before
        return (
            entry.url == self.url
            and MIN_KEY_LIFE_S <= life_s <= MAX_KEY_LIFE_S
            and self.key.verify(entry.signature, _message(_KEY_PREFIX, entry))
        )


def sign_entry(entry: IssuerEntry, key: PrivateKey) -> IssuerEntry:
    """Returns the entry with the issuer's signature over all its other fields."""
    return msgspec.structs.replace(entry, signature=key.sign(_message(_KEY_PREFIX, entry)))


_NO_BUDGET = 0


def content_of(entry: IssuerEntry) -> tuple[bytes, int, int, int]:
    """Returns the content of an issuer's entry; entries that differ only in signatures are equivalent.

    Returns:
        Its key, start and end, and its budget in output tokens, 0 if none is given.
    """
    budget = _NO_BUDGET if isinstance(entry.budget, UnsetType) else entry.budget
    return entry.token_key, entry.not_before, entry.not_after, budget


def find_contradiction(entries: Iterable[IssuerEntry]) -> tuple[IssuerEntry, IssuerEntry] | None:
    """Returns two contradictory entries of one issuer: two keys for one period, or two periods or budgets for one key.

    Args:
        entries: entries of one issuer, each signed by it; an entry may occur repeatedly, and without a budget that was added
            later.
    """
    stated = {content_of(entry): entry for entry in entries}
    budgeted = {(*when, _NO_BUDGET) for *when, budget in stated if budget != _NO_BUDGET}
    stated = {content: entry for content, entry in stated.items() if content not in budgeted}
    ordered = sorted(stated.values(), key=lambda entry: (entry.not_before, entry.not_after, entry.token_key))
    for one, other in pairwise(ordered):
        if other.not_before < one.not_after:
            return one, other
    by_key: dict[bytes, IssuerEntry] = {}
    for entry in ordered:
        if by_key.setdefault(entry.token_key, entry) is not entry:
            return by_key[entry.token_key], entry
    return None


class IssuerStatement(Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer's signed statement at `/.well-known/cloister/issuer`, in which no intermediary can replace a key.

    Attributes:
        url: URL of the issuer.
        sealing_keys: key configurations for sealing purchases, `application/ohttp-keys` (RFC 9458, section 3.1).
        not_before, not_after: period of their use, Unix seconds, at most `MAX_STATEMENT_LIFE_S`.
        token_keys: keys that sign tokens now or soon, or whose tokens are still accepted.
        signature: the issuer's signature over all other fields.
    """

    url: Url
    sealing_keys: Keys
    not_before: Count
    not_after: Count
    token_keys: Annotated[tuple[IssuerEntry, ...], Meta(max_length=8)]
    signature: Annotated[bytes, Meta(max_length=64)] = b""


def sign_statement(statement: IssuerStatement, key: PrivateKey) -> bytes:
    """Returns the signed statement as JSON."""
    signature = key.sign(_message(_STATEMENT_PREFIX, statement))
    return msgspec.json.encode(msgspec.structs.replace(statement, signature=signature), order="sorted")


def read_statement(data: bytes, issuer: IssuerIdentity, now: float, skew_s: float) -> IssuerStatement:
    """Reads an issuer's statement.

    Args:
        now: Unix seconds.
        skew_s: tolerated clock difference.

    Raises:
        TransparencyError: it is malformed, not this issuer's, or not valid now.
    """
    try:
        statement = msgspec.json.decode(data, type=IssuerStatement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise TransparencyError(Reason.MALFORMED, "this is no statement of an issuer") from None
    is_signed = issuer.key.verify(statement.signature, _message(_STATEMENT_PREFIX, statement))
    if statement.url != issuer.url or not is_signed:
        raise TransparencyError(Reason.BAD_SIGNATURE, "the statement is not signed by the issuer that the trust file names")
    if not 0 < statement.not_after - statement.not_before <= MAX_STATEMENT_LIFE_S:
        raise TransparencyError(Reason.MALFORMED, "the issuer's statement holds for a day at most; this one does not")
    if not statement.not_before - skew_s <= now < statement.not_after:
        raise TransparencyError(Reason.EXPIRED, "the issuer's statement does not hold now; check this machine's clock")
    return statement


def _message(prefix: bytes, signed: IssuerEntry | IssuerStatement) -> bytes:
    return prefix + msgspec.json.encode(msgspec.structs.replace(signed, signature=b""), order="sorted")


def _is_private(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.hostname) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or "")))


# Proof of equivocation: an issuer signed two keys for the same period; verifiable by anyone. No I/O, no clock.


class IssuerProof(Struct, frozen=True, forbid_unknown_fields=True):
    """Two contradictory statements of one issuer.

    Attributes:
        issuer_key: verifies both; the verifier must know the issuer's key independently.
        statements: entries as in the epoch file.
    """

    issuer_key: Annotated[str, Meta(max_length=256)]
    statements: tuple[IssuerEntry, IssuerEntry]


def encode_proof(issuer: IssuerIdentity, statements: tuple[IssuerEntry, IssuerEntry]) -> bytes:
    """Returns the file's content, JSON."""
    proof = IssuerProof(str(issuer.key), statements)
    return msgspec.json.format(msgspec.json.encode(proof, order="sorted")) + b"\n"


def check_proof(data: bytes, key: PublicKey) -> tuple[IssuerEntry, IssuerEntry]:
    """Returns the two statements if they are a valid proof.

    Args:
        key: the issuer's verifier key, from the trust file and not from the proof.

    Raises:
        TransparencyError: it is malformed, of another issuer, not signed, or the statements do not contradict each other.
    """
    try:
        proof = msgspec.json.decode(data, type=IssuerProof)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise TransparencyError(Reason.MALFORMED, "this is no proof that a client wrote about an issuer") from None
    if proof.issuer_key != str(key):
        raise TransparencyError(Reason.BAD_SIGNATURE, "the proof is about another issuer than the one whose key was given")
    issuer = IssuerIdentity(proof.statements[0].url, key)
    if not all(map(issuer.has_signed, proof.statements)):
        raise TransparencyError(Reason.BAD_SIGNATURE, "the issuer did not sign both statements, so they prove nothing")
    if find_contradiction(proof.statements) is None:
        raise TransparencyError(Reason.MALFORMED, "both statements can be true at once, so they prove nothing")
    return proof.statements
