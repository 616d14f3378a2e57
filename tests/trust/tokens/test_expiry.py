"""A clock that jumps and comes back: nothing that was spent can be spent again, and nothing is forgotten that need not be."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.trust.tokens import Redeemer, TokenSpentError, authorization, open_spend_store
from cloister.trust.tokens.issuer_keys import EPOCH_S, GRACE_S
from cloister.trust.tokens.spend import SETTLE_S, Expiry
from tests.token_shop import START, SetClock, Shop

A_MONTH_S = 30 * 86400
PAST_THE_END = START + EPOCH_S + GRACE_S


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    shop.close()


@pytest.fixture
def uptime() -> SetClock:
    return SetClock(1000)


@pytest.fixture
def expiry(shop: Shop, uptime: SetClock) -> Expiry:
    return Expiry(shop.store, shop.clock, uptime)


def count_records(shop: Shop) -> int:
    with sqlite3.connect(shop.directory / "spent.db") as database:
        return int(database.execute("SELECT count(*) FROM spent").fetchone()[0])


def test_a_clock_set_forward_and_back_lets_no_token_be_spent_twice(shop: Shop) -> None:
    (token,) = shop.buy(1)
    shop.till.redeem(authorization(token))
    keys = shop.accepted()
    shop.clock.now = START + A_MONTH_S
    shop.till.change_keys(keys)  # the gateway reads its keys again, or is started again
    restarted = Redeemer(keys, shop.store, shop.clock)
    shop.clock.now = START + 60
    for till in (shop.till, restarted):
        with pytest.raises(TokenSpentError):
            till.redeem(authorization(token))


def test_a_key_whose_records_were_dropped_is_never_taken_again(shop: Shop) -> None:
    """The clock is wrong for so long that it is believed: tokens are lost then, and none is spent twice."""
    spent, unspent = shop.buy(2)
    shop.till.redeem(authorization(spent))
    shop.store.forget(START + A_MONTH_S)
    assert count_records(shop) == 0
    shop.clock.now = START + 60
    restarted = Redeemer(shop.accepted(), open_spend_store(shop.store_url), shop.clock)
    for till in (shop.till, restarted):
        for token in (spent, unspent):
            with pytest.raises(TokenSpentError):
                till.redeem(authorization(token))


def test_a_clock_that_is_wrong_for_less_than_an_hour_drops_nothing(shop: Shop, expiry: Expiry, uptime: SetClock) -> None:
    spent, unspent = shop.buy(2)
    shop.till.redeem(authorization(spent))
    expiry.drop_ended()
    for _ in range(4):  # again and again
        shop.clock.now = START + A_MONTH_S
        expiry.drop_ended()
        uptime.now += SETTLE_S - 1
        expiry.drop_ended()
        shop.clock.now = START + 60
        uptime.now += 1
        expiry.drop_ended()
    assert count_records(shop) == 1
    shop.till.redeem(authorization(unspent))


def test_records_go_once_their_key_has_been_over_for_an_hour_of_uptime(shop: Shop, expiry: Expiry, uptime: SetClock) -> None:
    (token,) = shop.buy(1)
    shop.till.redeem(authorization(token))
    shop.clock.now = PAST_THE_END
    expiry.drop_ended()
    uptime.now += SETTLE_S - 1
    shop.clock.now += SETTLE_S - 1
    expiry.drop_ended()
    assert count_records(shop) == 1
    uptime.now += 1
    shop.clock.now += 1
    expiry.drop_ended()
    assert count_records(shop) == 0


def test_a_process_that_was_just_started_believes_no_clock(shop: Shop) -> None:
    (token,) = shop.buy(1)
    shop.till.redeem(authorization(token))
    shop.clock.now = START + A_MONTH_S
    for _ in range(5):
        Expiry(shop.store, shop.clock, SetClock(50)).drop_ended()
    assert count_records(shop) == 1
