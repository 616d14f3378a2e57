"""An issuer, a gateway's redeemer and a client's tokens for tests, with a clock that is set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cloister.policy import Credentials
from cloister.trust.tokens import (
    AcceptedKey,
    Issuer,
    IssuerLimits,
    KeyShelf,
    QuotaBook,
    Redeemer,
    Token,
    TokenChallenge,
    open_spend_store,
    request_tokens,
)
from cloister.trust.tokens.issuance import encode_answers
from cloister.trust.transparency.note import Kind, PrivateKey

START = 2_000_000_000 // (7 * 86400) * 7 * 86400 + 3600
"""An hour into an epoch of the issuer."""

CHALLENGE = TokenChallenge("issuer.example", ("gateway.example",))


@dataclass
class SetClock:
    """Unix seconds that a test sets."""

    now: float = START

    def __call__(self) -> float:
        return self.now


class TokenService:
    """Everything that issues and takes tokens, in one directory."""

    def __init__(
        self, directory: Path, *, tokens_per_epoch: int = 1000, store_url: str | None = None, budget: int = 512
    ) -> None:
        self.directory = directory
        self.clock = SetClock()
        self.credentials, self.api_key = Credentials.empty().add("ann")
        self.identity = PrivateKey.generate("issuer.example", Kind.NOTE)
        self.shelf = KeyShelf(directory / "keys", budget=budget)
        self.book = QuotaBook(directory / "issued.db")
        self.issuer = Issuer(self.shelf, self.book, lambda: self.credentials, IssuerLimits(tokens_per_epoch), now=self.clock)
        self.store_url = store_url or f"sqlite:///{directory}/spent.db"
        self.store = open_spend_store(self.store_url)
        self.redeemer = Redeemer(self.accepted(), self.store, self.clock)

    def accepted(self) -> list[AcceptedKey]:
        return [AcceptedKey(key.encoded, CHALLENGE, key.taken_until, key.budget) for key in self.issuer.current_keys()]

    def signing_key(self) -> bytes:
        now = self.clock()
        return next(key.encoded for key in self.issuer.current_keys() if key.issues_from <= now < key.issues_until)

    def buy(self, count: int, *, api_key: str | None = None, challenge: TokenChallenge = CHALLENGE) -> list[Token]:
        pending = request_tokens(self.signing_key(), challenge, count)
        return pending.finish(encode_answers(self.issuer.issue(api_key or self.api_key, list(pending.requests))))

    def close(self) -> None:
        self.book.close()
        self.store.close()
