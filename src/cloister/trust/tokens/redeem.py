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
    """There is no token, or none that the gateway takes. Every reason has one text, as all of them mean: get another one."""

    code = "invalid_token"
    status = 401

    def __init__(self) -> None:
        super().__init__('send a token of an issuer in this epoch\'s file: Authorization: PrivateToken token="..."')


class TokenSpentError(CloisterError):
    """The token was spent before; each pays for one request."""

    code = "token_spent"
    status = 401

    def __init__(self) -> None:
        super().__init__("this token was spent already; each pays for one request, a retry included")


@dataclass(frozen=True, slots=True)
class AcceptedKey:
    """An issuer's key whose tokens are taken.

    Attributes:
        encoded: as in the epoch file.
        challenge: what its tokens answer; equal for every client (`challenge_between`).
        until: Unix seconds at which its tokens end, those spent included.
        budget: output tokens that one of its tokens pays for.
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
        keys: whose tokens are taken.
        store: remembers them.
        now: Unix seconds.

    Raises:
        ConfigError: a challenge has a redemption context, or a key is none of type 2.
    """

    def __init__(self, keys: Sequence[AcceptedKey], store: SpendStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._keys: dict[bytes, _Till] = {}
        self.change_keys(keys)

    def change_keys(self, keys: Sequence[AcceptedKey]) -> None:
        """Takes tokens of these keys from now on.

        Raises:
            ConfigError: as at the start; nothing was changed.
        """
        if any(key.challenge.redemption_context for key in keys):
            raise ConfigError("the gateway's challenge must be the same for everybody: without a redemption context")
        try:
            tills = [_Till(decode_public(key.encoded), key.challenge.digest(), key) for key in keys]
        except ValueError as error:
            raise ConfigError(f"an issuer's key cannot be used: {error}") from None
        self._keys = {key_id(till.key.encoded): till for till in tills}

    def ask(self) -> str:
        """Returns the value of `WWW-Authenticate` for who came without a token: one challenge for every key."""
        return ", ".join(authenticate(till.key.challenge, till.key.encoded) for till in self._keys.values())

    def redeem(self, header: str | None) -> AcceptedKey:
        """Spends the token in the value of `Authorization`; returns whose it was, and with that its budget.

        The signature is checked before the store is asked, so that forged tokens cost it nothing.

        Raises:
            TokenError: there is no token, or none that is taken.
            TokenSpentError: it was spent.
            SpendStoreError: the store gives no answer; nobody is let in meanwhile.
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


# What a token pays for, as stated to a node by client and gateway independently. Pure.
#
# The client seals the number that the issuer signed; the gateway sends its own beside the sealed request. A node that finds
# two numbers refuses, so a gateway cannot have one node answer less than another.


BUDGET_FIELD: Final = "cloister-token-budget"
"""How many output tokens were paid for; the same for every token of an issuer's key."""
_DIGITS: Final = 9
_SEALED: Final = BUDGET_FIELD.encode()


def with_budget(request: HttpRequest, budget: int | None) -> HttpRequest:
    """Returns the request with its budget, in as many digits whatever it is, so that no length tells it.

    Args:
        budget: output tokens, below 10^9; None adds none.
    """
    if budget is None:
        return request
    head = request.head
    fields = (*head.fields, (_SEALED, b"%0*d" % (_DIGITS, budget)))
    return HttpRequest(RequestHead(head.method, head.scheme, head.authority, head.path, fields), request.content)


def parse_budget(value: str | None) -> int | None:
    """Returns the number that a field says; None where there is none, or none that is a budget."""
    value = value or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None


def differs(fields: Fields, budget: int | None) -> bool:
    """Returns whether a sealed request names another budget than this one; one that names none takes what it is given.

    Args:
        fields: of the sealed request.
        budget: as the gateway says it; None where it says none.

    Raises:
        MessageError: the field is there more than once.
    """
    sealed = find_field(fields, _SEALED)
    return sealed is not None and (budget is None or parse_budget(sealed) != budget)
