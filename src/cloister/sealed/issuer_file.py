"""The issuers' keys as `cloister issuer --show-keys` prints them, for the gateway that takes their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from cloister.privacy.tokens import AcceptedKey, IssuerKey
from cloister.privacy.tokens.challenge import challenge_between
from cloister.privacy.transparency.epoch import Budget, IssuerEntry
from cloister.privacy.transparency.issuer_keys import IssuerIdentity, sign_entry
from cloister.privacy.transparency.note import PrivateKey
from cloister.types.errors import ConfigError


class ShownKey(Struct, frozen=True):
    """One key.

    Attributes:
        url: of its issuer.
        token_key: SPKI, as in the epoch file.
        not_before, not_after: Unix seconds from which it signs, and at which it ends.
        taken_until: Unix seconds at which its tokens end.
        budget: output tokens that one of its tokens pays for.
        signature: the issuer's, as in the epoch file.
    """

    url: Annotated[str, Meta(pattern=r"^https?://[!-~]+\Z")]
    token_key: bytes
    not_before: int
    taken_until: int
    budget: Budget
    not_after: int = 0
    signature: bytes = b""


def read_issuer_keys(path: Path) -> tuple[ShownKey, ...]:
    """Reads the file; keys of several issuers may stand in one list.

    Raises:
        ConfigError: it cannot be read, or has no key.
    """
    try:
        keys = msgspec.json.decode(path.expanduser().read_bytes(), type=tuple[ShownKey, ...])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; write it with: cloister issuer --show-keys") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not what cloister issuer --show-keys prints: {error}") from None
    if not keys:
        raise ConfigError(f"{path} has no key, so no token could be taken")
    return keys


def accept_keys(keys: tuple[ShownKey, ...], gateway_url: str) -> tuple[AcceptedKey, ...]:
    """Returns what a gateway at `gateway_url` takes."""
    return tuple(
        AcceptedKey(key.token_key, challenge_between(key.url, gateway_url), key.taken_until, key.budget) for key in keys
    )


def list_issuers(keys: tuple[ShownKey, ...], now_s: float) -> tuple[IssuerEntry, ...]:
    """Returns what stands in the epoch file: every key that signs, or signed and whose tokens are taken still."""
    return tuple(
        IssuerEntry(key.url, key.token_key, key.not_before, key.not_after, key.signature, key.budget)
        for key in keys
        if key.not_before <= now_s < key.taken_until
    )


def check_signed(keys: tuple[ShownKey, ...], issuer: IssuerIdentity | None, now_s: float) -> None:
    """Makes sure that clients with this issuer in their trust file would buy under the keys.

    Args:
        issuer: None checks nothing.

    Raises:
        ConfigError: it is not among them, or did not sign one.
    """
    if issuer is None:
        return
    entries = [entry for entry in list_issuers(keys, now_s) if entry.url == issuer.url]
    if not entries or not all(map(issuer.has_signed, entries)):
        raise ConfigError(
            f"clients would buy no token: the issuer of the trust file, {issuer.url}, did not sign the keys in the file of "
            "issuer keys; write it anew with: cloister issuer --url URL --key FILE --show-keys",
            param="issuer_keys",
        )


def sign_keys(keys: Iterable[IssuerKey], url: str, identity: PrivateKey) -> tuple[IssuerEntry, ...]:
    """Returns an issuer's keys as it states them, each signed with the key that clients know it by."""
    entries = (IssuerEntry(url, key.encoded, key.issues_from, key.issues_until, budget=key.budget) for key in keys)
    return tuple(sign_entry(entry, identity) for entry in entries)


def format_keys(keys: Iterable[IssuerKey], url: str, identity: PrivateKey) -> bytes:
    """Returns the file's content, JSON."""
    keys = tuple(keys)
    shown = [
        ShownKey(entry.url, entry.token_key, entry.not_before, key.taken_until, key.budget, entry.not_after, entry.signature)
        for key, entry in zip(keys, sign_keys(keys, url, identity), strict=True)
    ]
    return msgspec.json.format(msgspec.json.encode(shown)) + b"\n"
