"""Tokens are bought only where they mark nobody."""

from __future__ import annotations

import pytest

from cloister.client.buying import MOST_KEYS, buy_tokens
from cloister.client.errors import NoTokensError
from cloister.privacy.transparency.epoch import Epoch, GatewayEntry, IssuerEntry, NodeEntry

NODE = NodeEntry("ab" * 32, 1, b"keys", "00" * 32)


def epoch_with(num_keys: int) -> Epoch:
    issuers = tuple(IssuerEntry("https://issuer.example", b"key %d" % number) for number in range(num_keys))
    gateway = GatewayEntry("https://gateway.example", b"keys")
    return Epoch(1, 0, 600, gateway, issuers, (NODE,), "00" * 32, "private", ())


def test_an_issuer_of_more_keys_than_change_asks_for_is_not_even_asked() -> None:
    next(buy_tokens(epoch_with(MOST_KEYS), "sk", 1.0))
    with pytest.raises(NoTokensError, match="mark tokens"):
        next(buy_tokens(epoch_with(MOST_KEYS + 1), "sk", 1.0))
