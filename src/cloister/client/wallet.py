"""Tokens at hand: fetched in batches, spent one by one and out of order. No I/O."""

from __future__ import annotations

import secrets

from cloister.privacy.tokens import Token

BATCH = 20
"""Tokens asked for at once, by everybody."""
LOW = 10
"""More are bought, at a random moment (`restocking`), once no more than these are left."""


class Wallet:
    """Tokens by the issuer key that signed them; a key or a challenge that left the epoch takes its tokens with it."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, list[Token]] = {}

    def keep(self, key_ids: set[bytes], challenge_digest: bytes) -> None:
        """Drops tokens of all other keys, and those that answer another challenge: they would say when they were bought."""
        self._tokens = {
            key_id: [token for token in tokens if token.challenge_digest == challenge_digest]
            for key_id, tokens in self._tokens.items()
            if key_id in key_ids
        }

    def add(self, tokens: list[Token]) -> None:
        """Takes in a batch."""
        for token in tokens:
            self._tokens.setdefault(token.key_id, []).append(token)

    def __len__(self) -> int:
        return sum(len(tokens) for tokens in self._tokens.values())

    def take(self) -> Token | None:
        """Takes out one token of the fullest key, drawn at random; None when there is none."""
        tokens = max(self._tokens.values(), key=len, default=[])
        return tokens.pop(secrets.randbelow(len(tokens))) if tokens else None
