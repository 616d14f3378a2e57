"""Tokens are bought only where nobody learns whose they are, and under the key that everybody uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cloister.client.asking import Reply
from cloister.client.buying import MOST_KEYS, buy_tokens, signing_key
from cloister.client.errors import NoTokensError
from cloister.client.wallet import Wallet
from cloister.privacy.tokens import Token, decode_directory
from cloister.privacy.tokens.issuance import DirectoryKey, encode_directory
from cloister.privacy.tokens.names import challenge_between
from cloister.privacy.transparency.epoch import Epoch, GatewayEntry, IssuerEntry, NodeEntry
from cloister.types.errors import ConfigError
from tests.privacy.transparency.world import World

NODE = NodeEntry("ab" * 32, 1, b"keys", "00" * 32)
ISSUER = "https://issuer.example"


def epoch_with(*issuers: IssuerEntry) -> Epoch:
    gateway = GatewayEntry("https://gateway.example", b"keys")
    return Epoch(1, 300, 900, gateway, issuers, (NODE,), "00" * 32, "private", ())


def keys(*not_before: int, url: str = ISSUER) -> tuple[IssuerEntry, ...]:
    return tuple(IssuerEntry(url, b"key %d" % number, since) for number, since in enumerate(not_before))


def test_an_issuer_that_only_the_gateway_names_is_never_asked() -> None:
    """It was asked for its directory, and then shown the API key: a second entry in `--issuer-keys` was enough."""
    epoch = epoch_with(*keys(0, url="http://collector.example"), *keys(0))
    assert next(buy_tokens(epoch, ISSUER, "sk")).url.startswith(ISSUER)
    with pytest.raises(NoTokensError, match="does not name the issuer of the trust file"):
        next(buy_tokens(epoch_with(*keys(0, url="http://collector.example")), ISSUER, "sk"))


def test_without_an_issuer_in_the_trust_file_nobody_is_asked() -> None:
    with pytest.raises(NoTokensError, match="cloister log trust --issuer"):
        next(buy_tokens(epoch_with(*keys(0)), "", "sk"))


def test_of_two_keys_everybody_buys_under_the_newest() -> None:
    assert signing_key(epoch_with(*keys(100, 200)), ISSUER) == b"key 1"
    assert signing_key(epoch_with(*keys(200, 100)), ISSUER) == b"key 0"
    assert signing_key(epoch_with(*keys(100, 400)), ISSUER) == b"key 0"  # the other one signs from 400 on, in a later epoch


@pytest.mark.parametrize("ages", [(5, 5), tuple(range(MOST_KEYS + 1))], ids=["of one age", "too many"])
def test_keys_that_could_mark_tokens_buy_none(ages: tuple[int, ...]) -> None:
    with pytest.raises(NoTokensError, match="mark tokens"):
        next(buy_tokens(epoch_with(*keys(*ages)), ISSUER, "sk"))


def test_tokens_that_say_when_they_were_bought_are_dropped() -> None:
    """A gateway that changed its own address from epoch to epoch, or kept old keys under other addresses, knew buyers by it."""
    wallet = Wallet()
    here, before = (challenge_between(ISSUER, f"https://gateway.example:{port}").digest() for port in (443, 444))
    wallet.add([Token(b"n" * 32, digest, key) for digest in (here, before) for key in (b"ours", b"another")])
    wallet.keep({b"ours"}, here)
    assert len(wallet) == 1
    assert challenge_between(ISSUER, "https://mark@gateway.example:443").digest() == here


def test_an_issuer_that_shows_one_client_its_older_key_sells_it_nothing() -> None:
    """Gateway and issuer knew a client by it: the epoch names two keys, and the directory chose for each client."""
    step = buy_tokens(epoch_with(*keys(100, 200)), ISSUER, "sk")
    next(step)
    directory = encode_directory("/token-request", [DirectoryKey(b"key 0", 100, 900, 512)])
    assert decode_directory(directory)[1][0].encoded_key == b"key 0"
    with pytest.raises(NoTokensError, match="does not sign with the key that the epoch file names"):
        step.send(Reply(200, "application/json", directory))


def test_the_api_key_is_shown_over_tls_or_on_this_machine_only(tmp_path: Path) -> None:
    trust = World(tmp_path).trust
    assert replace(trust, issuer="https://issuer.example").issuer
    assert replace(trust, issuer="http://127.0.0.1:9003").issuer
    for url in ("http://issuer.example", "ftp://127.0.0.1", "issuer.example", "https://[", "http://127.0.0.1@evil.example"):
        with pytest.raises(ConfigError, match="https or on this machine"):
            replace(trust, issuer=url)
