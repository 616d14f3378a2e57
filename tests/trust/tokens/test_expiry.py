"""A clock that jumps and comes back: nothing that was spent can be spent again, and nothing is forgotten that need not be."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.trust.tokens import Redeemer, TokenSpentError, authorization, open_spend_store
from cloister.trust.tokens.issuer_keys import EPOCH_S, GRACE_S
from cloister.trust.tokens.spend import SETTLE_S, Expiry
from tests.token_service import START, SetClock, TokenService

A_MONTH_S = 30 * 86400
PAST_THE_END = START + EPOCH_S + GRACE_S


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TokenService]:
    service = TokenService(tmp_path)
    yield service
    service.close()


@pytest.fixture
def uptime() -> SetClock:
    return SetClock(1000)


@pytest.fixture
def expiry(service: TokenService, uptime: SetClock) -> Expiry:
    return Expiry(service.store, service.clock, uptime)


def count_records(service: TokenService) -> int:
    with sqlite3.connect(service.directory / "spent.db") as database:
        return int(database.execute("SELECT count(*) FROM spent").fetchone()[0])


def test_a_clock_set_forward_and_back_lets_no_token_be_spent_twice(service: TokenService) -> None:
    (token,) = service.buy(1)
    service.redeemer.redeem(authorization(token))
    keys = service.accepted()
    service.clock.now = START + A_MONTH_S
    service.redeemer.change_keys(keys)  # the gateway reads its keys again, or is started again
    restarted = Redeemer(keys, service.store, service.clock)
    service.clock.now = START + 60
    for redeemer in (service.redeemer, restarted):
        with pytest.raises(TokenSpentError):
            redeemer.redeem(authorization(token))


def test_a_key_whose_records_were_dropped_is_never_taken_again(service: TokenService) -> None:
    """The clock is wrong for so long that it is believed: tokens are lost then, and none is spent twice."""
    spent, unspent = service.buy(2)
    service.redeemer.redeem(authorization(spent))
    service.store.forget(START + A_MONTH_S)
    assert count_records(service) == 0
    service.clock.now = START + 60
    restarted = Redeemer(service.accepted(), open_spend_store(service.store_url), service.clock)
    for redeemer in (service.redeemer, restarted):
        for token in (spent, unspent):
            with pytest.raises(TokenSpentError):
                redeemer.redeem(authorization(token))


def test_a_clock_that_is_wrong_for_less_than_an_hour_drops_nothing(
    service: TokenService, expiry: Expiry, uptime: SetClock
) -> None:
    spent, unspent = service.buy(2)
    service.redeemer.redeem(authorization(spent))
    expiry.drop_ended()
    for _ in range(4):  # again and again
        service.clock.now = START + A_MONTH_S
        expiry.drop_ended()
        uptime.now += SETTLE_S - 1
        expiry.drop_ended()
        service.clock.now = START + 60
        uptime.now += 1
        expiry.drop_ended()
    assert count_records(service) == 1
    service.redeemer.redeem(authorization(unspent))


def test_records_go_once_their_key_has_been_over_for_an_hour_of_uptime(
    service: TokenService, expiry: Expiry, uptime: SetClock
) -> None:
    (token,) = service.buy(1)
    service.redeemer.redeem(authorization(token))
    service.clock.now = PAST_THE_END
    expiry.drop_ended()
    uptime.now += SETTLE_S - 1
    service.clock.now += SETTLE_S - 1
    expiry.drop_ended()
    assert count_records(service) == 1
    uptime.now += 1
    service.clock.now += 1
    expiry.drop_ended()
    assert count_records(service) == 0


def test_a_process_that_was_just_started_believes_no_clock(service: TokenService) -> None:
    (token,) = service.buy(1)
    service.redeemer.redeem(authorization(token))
    service.clock.now = START + A_MONTH_S
    for _ in range(5):
        Expiry(service.store, service.clock, SetClock(50)).drop_ended()
    assert count_records(service) == 1
