"""Taking tokens: each once, by the first who comes, and nothing that an issuer did not sign for this gateway."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from cloister.trust.tokens import (
    AcceptedKey,
    Redeemer,
    Token,
    TokenChallenge,
    TokenError,
    TokenSpentError,
    authorization,
    read_authenticate,
)
from cloister.trust.tokens.blind_rsa import blind, blind_sign, finalize, generate
from cloister.trust.tokens.issuer_keys import EPOCH_S, GRACE_S
from cloister.types.errors import ConfigError
from tests.token_service import CHALLENGE, START, TokenService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TokenService]:
    service = TokenService(tmp_path)
    yield service
    service.close()


def test_a_token_pays_once_and_says_for_how_much(service: TokenService) -> None:
    (token,) = service.buy(1)
    assert service.redeemer.redeem(authorization(token)).budget == 512
    with pytest.raises(TokenSpentError):
        service.redeemer.redeem(authorization(token))


def test_forged_changed_and_truncated_tokens_are_refused_and_cost_the_real_one_nothing(service: TokenService) -> None:
    (token,) = service.buy(1)
    forger = generate()
    blinded, kept = blind(forger.public, token.signed)
    signature = finalize(forger.public, blind_sign(forger, blinded), kept)
    wrong = [
        replace(token, authenticator=signature),
        replace(token, authenticator=bytes(256)),
        replace(token, authenticator=token.authenticator[:-1] + bytes([token.authenticator[-1] ^ 1])),
        replace(token, nonce=bytes(32)),
        replace(token, challenge_digest=bytes(32)),
        replace(token, key_id=bytes(32)),
    ]
    texts = [authorization(one) for one in wrong] + [None, "", "Bearer x", authorization(token)[:-20], authorization(token) * 2]
    seen = set()
    for text in texts:
        with pytest.raises(TokenError) as caught:
            service.redeemer.redeem(text)
        seen.add((str(caught.value), caught.value.status))
    assert len(seen) == 1  # the answer does not say what was wrong
    service.redeemer.redeem(authorization(token))


def test_a_token_for_another_gateway_is_refused(service: TokenService) -> None:
    (token,) = service.buy(1, challenge=TokenChallenge("issuer.example", ("elsewhere.example",)))
    with pytest.raises(TokenError):
        service.redeemer.redeem(authorization(token))


def test_one_nonce_signed_twice_pays_once(service: TokenService) -> None:
    key = service.issuer.current_keys()[0]
    assert key.private is not None
    (token,) = service.buy(1)
    blinded, kept = blind(key.private.public, token.signed)
    twin = replace(token, authenticator=finalize(key.private.public, blind_sign(key.private, blinded), kept))
    assert twin.authenticator != token.authenticator
    service.redeemer.redeem(authorization(twin))
    with pytest.raises(TokenSpentError):
        service.redeemer.redeem(authorization(token))


def test_one_of_32_threads_wins_each_token(service: TokenService) -> None:
    tokens = service.buy(8)
    barrier = Barrier(32)

    def spend_all(_: int) -> list[Token]:
        barrier.wait(timeout=300)
        won = []
        for token in tokens:
            try:
                service.redeemer.redeem(authorization(token))
            except TokenSpentError:
                continue
            won.append(token)
        return won

    with ThreadPoolExecutor(32) as pool:
        winners = [token for won in pool.map(spend_all, range(32)) for token in won]
    assert sorted(token.nonce for token in winners) == sorted(token.nonce for token in tokens)


def test_tokens_end_a_day_after_their_key_and_their_records_with_them(service: TokenService, tmp_path: Path) -> None:
    early, late = service.buy(2)
    service.redeemer.redeem(authorization(early))
    service.clock.now = START - 3600 + EPOCH_S + GRACE_S - 1
    service.redeemer.change_keys(service.accepted())
    with pytest.raises(TokenSpentError):
        service.redeemer.redeem(authorization(early))
    service.clock.now += 1
    with pytest.raises(TokenError):
        service.redeemer.redeem(authorization(late))
    service.store.forget(int(service.clock.now))
    database = sqlite3.connect(tmp_path / "spent.db")
    assert database.execute("SELECT count(*) FROM spent").fetchone() == (0,)
    database.close()
    for spent in (early, late):
        with pytest.raises(TokenError):
            service.redeemer.redeem(authorization(spent))


def test_the_gateway_asks_everybody_the_same(service: TokenService) -> None:
    asked = read_authenticate(service.redeemer.ask())
    assert asked == [(CHALLENGE, service.signing_key())]
    marked = TokenChallenge("issuer.example", ("gateway.example",), bytes(32))
    with pytest.raises(ConfigError, match="same for everybody"):
        Redeemer([replace(key, challenge=marked) for key in service.accepted()], service.store, service.clock)


def test_a_key_of_another_kind_is_refused_and_the_others_stay(service: TokenService) -> None:
    with pytest.raises(ConfigError, match="issuer's key"):
        service.redeemer.change_keys([AcceptedKey(b"no key", CHALLENGE, START + 1, 1)])
    (token,) = service.buy(1)
    service.redeemer.redeem(authorization(token))


def test_nothing_in_either_book_joins_a_token_to_an_api_key(service: TokenService, tmp_path: Path) -> None:
    for token in service.buy(20):
        service.redeemer.redeem(authorization(token))
    values: dict[str, set[object]] = {}
    for name, table in (("spent.db", "spent"), ("issued.db", "issued")):
        database = sqlite3.connect(tmp_path / name)
        rows = database.execute(f"SELECT * FROM {table}").fetchall()
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        database.close()
        values[table] = {value for row in rows for value in row}
        assert columns == {"spent": ["key_id", "token", "expires_at"], "issued": ["epoch", "holder", "count"]}[table]
        if table == "spent":
            assert len(rows) == 20
            assert rows == sorted(rows)  # by digest, not by time
            assert len({(row[0], row[2]) for row in rows}) == 1  # key and end are everybody's
    assert not values["spent"] & values["issued"]


def test_no_token_shows_in_text(service: TokenService) -> None:
    (token,) = service.buy(1)
    assert repr(token.nonce)[2:-1] not in repr(token)
    service.redeemer.redeem(authorization(token))
    with pytest.raises(TokenSpentError) as caught:
        service.redeemer.redeem(authorization(token))
    assert authorization(token).split('"')[1][:16] not in str(caught.value)
