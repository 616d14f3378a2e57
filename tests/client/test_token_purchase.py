"""Tokens are bought only where nobody learns whose they are, and under the key that everybody uses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET

from cloister.client.errors import NoTokensError
from cloister.client.protocol import Ask, Reply
from cloister.client.token_purchase import Buyer, Wallet, signed_budget, signing_key
from cloister.trust.tokens import Token
from cloister.trust.tokens.blind_rsa import encode_public, generate, key_id
from cloister.trust.tokens.challenge import challenge_between
from cloister.trust.tokens.purchase import STATEMENT_PATH
from cloister.trust.transparency.epoch import Epoch, GatewayEntry, IssuerEntry, NodeEntry
from cloister.trust.transparency.issuer_keys import (
    MAX_KEY_LIFE_S,
    MIN_KEY_LIFE_S,
    IssuerIdentity,
    IssuerStatement,
    sign_entry,
    sign_statement,
)
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.trust import encode_trust, parse_trust
from cloister.types.errors import ConfigError
from tests.trust.transparency.world import World

NODE = NodeEntry("ab" * 32, 1, b"keys", "00" * 32)
WEEK = MIN_KEY_LIFE_S
START = 100 * WEEK
SIGNER, STRANGER = (PrivateKey.generate(f"{name}.example", Kind.NOTE) for name in ("issuer", "stranger"))
ISSUER = IssuerIdentity("https://issuer.example", SIGNER.public)
RELAY = "https://relay.example/"


def epoch_with(*issuers: IssuerEntry, begin: int = START) -> Epoch:
    gateway = GatewayEntry("https://gateway.example", b"keys")
    return Epoch(1, begin, begin + 600, gateway, issuers, (NODE,), "00" * 32, "private", ())


KEY = encode_public(generate().public)


def stated(name: str, begin: int, life_s: int = WEEK, *, url: str = ISSUER.url, by: PrivateKey = SIGNER) -> IssuerEntry:
    return sign_entry(IssuerEntry(url, name.encode(), begin, begin + life_s, budget=512), by)


def ours() -> IssuerEntry:
    return sign_entry(IssuerEntry(ISSUER.url, KEY, START, START + WEEK, budget=512), SIGNER)


def first_ask(epoch: Epoch, issuer: IssuerIdentity | None = ISSUER, *, is_direct: bool = False) -> Ask:
    return next(Buyer(issuer, RELAY, "sk", is_direct=is_direct).buy(epoch, START))


def test_an_issuer_that_only_the_gateway_names_is_never_asked() -> None:
    collector = stated("theirs", START, url="http://collector.example", by=STRANGER)
    with pytest.raises(NoTokensError, match="does not name the issuer of the trust file"):
        first_ask(epoch_with(collector))
    with pytest.raises(NoTokensError, match="does not name the issuer of the trust file"):
        first_ask(epoch_with(collector), is_direct=True)


def test_without_an_issuer_in_the_trust_file_nobody_is_asked() -> None:
    with pytest.raises(NoTokensError, match="cloister log trust --issuer"):
        first_ask(epoch_with(stated("ours", START)), None)


def test_the_relay_is_asked_for_the_issuers_keys_first() -> None:
    ask = first_ask(epoch_with(ours()))
    assert (ask.method, ask.url) == ("GET", RELAY.rstrip("/") + STATEMENT_PATH)


def test_everybody_buys_under_the_one_key_that_signs() -> None:
    weeks = stated("last", START - WEEK), stated("this", START)
    assert signing_key(epoch_with(*weeks), ISSUER) == b"this"
    assert signing_key(epoch_with(*weeks, begin=START - 1), ISSUER) == b"last"
    with pytest.raises(NoTokensError, match="No key of the issuer"):
        signing_key(epoch_with(*weeks, begin=START + WEEK), ISSUER)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (stated("short", START, WEEK - 1), "less than a week"),
        (stated("long", START, MAX_KEY_LIFE_S + 1), "more than a month"),
        (stated("the gateway's", START, by=STRANGER), "did not sign"),
        (IssuerEntry(ISSUER.url, b"unsigned", START, START + WEEK), "did not sign"),
        (stated("second", START + 1), "sign at once"),
    ],
    ids=lambda value: value.token_key.decode() if isinstance(value, IssuerEntry) else "",
)
def test_keys_that_could_mark_tokens_buy_none(entry: IssuerEntry, words: str) -> None:
    with pytest.raises(NoTokensError, match=words):
        first_ask(epoch_with(stated("ours", START), entry, begin=START + 2))


def test_a_gateway_that_changes_or_removes_the_budget_of_a_key_sells_no_tokens() -> None:
    for budget in (1, UNSET):
        with pytest.raises(NoTokensError, match="did not sign"):
            first_ask(epoch_with(msgspec.structs.replace(ours(), budget=budget)))


def test_under_a_key_whose_issuer_names_no_budget_none_is_bought() -> None:
    older = sign_entry(IssuerEntry(ISSUER.url, KEY, START, START + WEEK), SIGNER)
    with pytest.raises(NoTokensError, match="Have the issuer updated"):
        first_ask(epoch_with(older))


def test_the_budget_of_a_token_is_the_one_that_its_own_issuer_signed() -> None:
    token = Token(bytes(32), bytes(32), key_id(KEY), bytes(256))
    planted = IssuerEntry("https://a.example", KEY, START, START + WEEK, budget=1)
    assert signed_budget(epoch_with(planted, stated("other", START - WEEK), ours()), ISSUER, token) == 512
    with pytest.raises(NoTokensError, match="does not name the key of a token"):
        signed_budget(epoch_with(planted), ISSUER, token)


def test_a_key_that_is_none_is_said_so() -> None:
    with pytest.raises(NoTokensError, match="cannot be used"):
        first_ask(epoch_with(stated("no key", START)))


def statement(by: PrivateKey = SIGNER, url: str = ISSUER.url, life_s: int = 600, begin: int = START) -> bytes:
    return sign_statement(IssuerStatement(url, b"keys", begin, begin + life_s, ()), by)


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        (statement(by=STRANGER), "not signed by the issuer"),
        (statement(url="https://other.example"), "not signed by the issuer"),
        (statement().replace(b'"not_before":', b'"not_before":1'), "not signed by the issuer"),
        (statement(begin=START - 600), "does not hold now"),
        (statement(life_s=90_000), "for a day at most"),
        (b"{}", "no statement"),
    ],
    ids=["another's", "of another issuer", "changed", "over", "for too long", "none"],
)
def test_a_relay_that_swaps_the_issuers_key_gets_no_purchase(brought: bytes, words: str) -> None:
    step = Buyer(ISSUER, RELAY, "sk").buy(epoch_with(ours()), START)
    next(step)
    with pytest.raises(NoTokensError, match=words):
        step.send(Reply(200, "application/json", brought))


def test_a_relay_that_carries_no_purchases_is_told_from_an_issuer_that_gives_none() -> None:
    step = Buyer(ISSUER, RELAY, "sk").buy(epoch_with(ours()), START)
    next(step)
    with pytest.raises(NoTokensError, match=r"starts it with --issuer.*--buy-directly"):
        step.send(Reply(404, "application/problem+json", b""))


def test_tokens_that_say_when_they_were_bought_are_dropped() -> None:
    """A gateway that changed its own address from epoch to epoch, or kept old keys under other addresses, knew buyers by it."""
    wallet = Wallet()
    here, before = (challenge_between(ISSUER.url, f"https://gateway.example:{port}").digest() for port in (443, 444))
    wallet.add([Token(b"n" * 32, digest, key) for digest in (here, before) for key in (b"ours", b"another")])
    wallet.keep({b"ours"}, here)
    assert len(wallet) == 1
    assert challenge_between(ISSUER.url, "https://mark@gateway.example:443").digest() == here


def test_the_issuer_of_a_trust_file_has_a_safe_url_and_a_key(tmp_path: Path) -> None:
    assert IssuerIdentity("http://127.0.0.1:9003", SIGNER.public).url
    for url in ("http://issuer.example", "ftp://127.0.0.1", "issuer.example", "https://[", "http://127.0.0.1@evil.example"):
        with pytest.raises(ConfigError, match="https or on this machine"):
            IssuerIdentity(url, SIGNER.public)
    with pytest.raises(ConfigError, match="kind 1"):
        IssuerIdentity(ISSUER.url, PrivateKey.generate("w", Kind.COSIGNATURE).public)
    trust = World(tmp_path).trust
    written = encode_trust(trust).replace(b'"issuer": ""', b'"issuer": "https://issuer.example"')
    with pytest.raises(ConfigError, match="--issuer-key"):
        parse_trust(written)
    named = written.replace(b'"issuer_key": ""', f'"issuer_key": "{SIGNER.public}"'.encode())
    assert parse_trust(named).issuer == ISSUER
    assert parse_trust(encode_trust(parse_trust(named))).issuer == ISSUER
