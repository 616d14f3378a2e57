"""Redeems tokens: validity, freshness (RFC 9577, section 2.2; RFC 9578, section 6.4), and what a token pays for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.trust.sealing import Fields, HttpRequest, RequestHead, find_field
from cloister.trust.tokens.blind_rsa import RsaPublicKey, decode_public, key_id
from cloister.trust.tokens.challenge import MalformedTokenError, Token, TokenChallenge, authenticate, read_authorization
from cloister.trust.tokens.spend import SpendStore, digest_of
from cloister.types.errors import CloisterError, ConfigError


class TokenError(CloisterError):
    """The token is missing or not accepted. All reasons share one text, because the remedy is the same: get another token."""

    code = "invalid_token"
    status = 401

    def __init__(self) -> None:
        super().__init__('send a token of an issuer in this epoch\'s file: Authorization: PrivateToken token="..."')


class TokenSpentError(CloisterError):
    """The token was already spent; each pays for one request."""

    code = "token_spent"
    status = 401

    def __init__(self) -> None:
        super().__init__("this token was spent already; each pays for one request, a retry included")


@dataclass(frozen=True, slots=True)
class AcceptedKey:
    """An issuer's key whose tokens are accepted.

    Attributes:
        encoded: as in the epoch file.
        challenge: challenge of its tokens; the same for every client (`challenge_between`).
        until: Unix seconds at which its tokens expire, including the records of spent ones.
        budget: output tokens that one blind token pays for.
    """

    encoded: bytes
    challenge: TokenChallenge
    until: int
    budget: int


@dataclass(frozen=True, slots=True)
class _Till:
    public: RsaPublicKey
    challenge_digest: bytes
    key: AcceptedKey


class Redeemer:
    """Checks tokens and spends them.

    Args:
        keys: the accepted keys.
        store: records spent tokens.
        now: returns Unix seconds.

    Raises:
        ConfigError: a challenge has a redemption context, or a key is not of type 2.
    """

    def __init__(self, keys: Sequence[AcceptedKey], store: SpendStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._keys: dict[bytes, _Till] = {}
        self.change_keys(keys)

    def change_keys(self, keys: Sequence[AcceptedKey]) -> None:
        """Replaces the accepted keys.

        Raises:
            ConfigError: as in the constructor; nothing was changed.
        """
        if any(key.challenge.redemption_context for key in keys):
            raise ConfigError("the gateway's challenge must be the same for everybody: without a redemption context")
        try:
            tills = [_Till(decode_public(key.encoded), key.challenge.digest(), key) for key in keys]
        except ValueError as error:
            raise ConfigError(f"an issuer's key cannot be used: {error}") from None
        self._keys = {key_id(till.key.encoded): till for till in tills}

    def ask(self) -> str:
        """Returns the `WWW-Authenticate` value for a request without a token: one challenge for every key."""
        return ", ".join(authenticate(till.key.challenge, till.key.encoded) for till in self._keys.values())

    def redeem(self, header: str | None) -> AcceptedKey:
        """Spends the token in an `Authorization` value; returns its key, which has the budget.

        The signature is checked before the store is queried, so that forged tokens do not load it.

        Raises:
            TokenError: the token is missing or not accepted.
            TokenSpentError: it was already spent.
            SpendStoreError: the store does not respond; requests are refused meanwhile.
        """
        token = self._read(header)
        till = self._keys.get(token.key_id)
        if till is None or self._now() >= till.key.until or token.challenge_digest != till.challenge_digest:
            raise TokenError
        if not till.public.verify(token.signed, token.authenticator):
            raise TokenError
        if not self._store.spend(token.key_id, digest_of(token), till.key.until):
            raise TokenSpentError
        return till.key

    def _read(self, header: str | None) -> Token:
        try:
            return read_authorization(header or "")
        except MalformedTokenError:
            raise TokenError from None


# The token budget, which client and gateway state to a node independently. Pure.
#
# The client seals the number that the issuer signed; the gateway sends its own outside of the sealed request. A node refuses if
# they differ, so a gateway cannot make one node answer less than another.


BUDGET_FIELD: Final = "cloister-token-budget"
"""Header field with the paid output tokens; the same for every token of an issuer's key."""
_DIGITS: Final = 9
_SEALED: Final = BUDGET_FIELD.encode()


def with_budget(request: HttpRequest, budget: int | None) -> HttpRequest:
    """Returns the request with its budget, with a fixed number of digits, so that the length does not reveal it.

    Args:
        budget: output tokens, below 10^9; None adds none.
    """
    if budget is None:
        return request
    head = request.head
    fields = (*head.fields, (_SEALED, b"%0*d" % (_DIGITS, budget)))
    return HttpRequest(RequestHead(head.method, head.scheme, head.authority, head.path, fields), request.content)


def parse_budget(value: str | None) -> int | None:
    """Returns the budget in a field; None if absent or invalid."""
    value = value or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None


def differs(fields: Fields, budget: int | None) -> bool:
    """Returns whether a sealed request names another budget; a request without one accepts any.

    Args:
        fields: header fields of the sealed request.
        budget: the gateway's value; None if it states none.

    Raises:
        MessageError: the field occurs more than once.
    """
    sealed = find_field(fields, _SEALED)
    return sealed is not None and (budget is None or parse_budget(sealed) != budget)
