"""Tokens are bought ahead of need, at moments that tell nothing of the requests beside them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest

from cloister.client import AsyncSealedTransport, NoTokensError, SealedTransport, Session
from cloister.client.restocking import MOST_LOW, SPREAD_S, PurchasePlan
from cloister.client.token_purchase import BATCH, LOW
from tests.client.world import PURCHASE, World
from tests.sealed_cloud import LoopbackCloud


def at_once(below: int) -> int:
    return 0


def tokens(session: Session) -> int:
    return len(session._wallet)


def test_a_moment_is_drawn_from_the_whole_time_when_tokens_are_few() -> None:
    drawn: list[int] = []
    plan = PurchasePlan(lambda below: drawn.append(below) or below - 1)  # type: ignore[func-returns-value]
    plan.see(LOW + 1, 1000.0)
    assert plan.wait_s(1000.0) is None
    plan.see(LOW, 1000.0)
    assert drawn == [int(SPREAD_S * 1000)]
    assert plan.wait_s(1000.0) == pytest.approx(SPREAD_S, abs=0.01)
    plan.see(LOW - 1, 1100.0)
    assert plan.wait_s(1100.0) == pytest.approx(SPREAD_S - 100, abs=0.01), "it was drawn once"
    plan.see(LOW + 1, 1101.0)
    assert plan.wait_s(1101.0) is None


def test_a_moment_that_went_by_is_not_made_up_for_beside_the_next_request() -> None:
    plan = PurchasePlan(lambda below: below // 2)
    plan.see(LOW, 0.0)
    plan.see(LOW - 1, 10 * SPREAD_S)
    assert plan.wait_s(10 * SPREAD_S) == SPREAD_S / 2


def test_who_runs_out_before_the_moment_comes_keeps_more() -> None:
    plan = PurchasePlan(lambda below: below - 1)
    plan.run_out()
    plan.see(LOW + 1, 0.0)
    assert plan.wait_s(0.0) is None, "the first purchase of all is no sign"
    plan.see(LOW, 0.0)
    plan.run_out()
    plan.see(2 * LOW, 0.0)
    assert plan.wait_s(0.0) is not None
    for _ in range(9):
        plan.see(0, 0.0)
        plan.run_out()
    plan.see(MOST_LOW + 1, 0.0)
    assert plan.wait_s(0.0) is None


def test_no_request_waits_for_a_purchase_while_there_is_a_token(world: World) -> None:
    async def run() -> None:
        transport = AsyncSealedTransport(session, world.wire)
        for number in range(BATCH):
            await transport.prepare()
            assert world.wire.asked.count(PURCHASE) == 1, number
            assert (session.restock_in_s is None) == (tokens(session) > LOW)
        await transport.prepare()
        await transport.aclose()

    session = world.session()
    session._plan = PurchasePlan(lambda below: below - 1)
    asyncio.run(run())
    assert world.wire.asked.count(PURCHASE) == 2, "one that waits is better than none"


def test_an_asynchronous_client_buys_by_itself_when_the_moment_has_come(world: World) -> None:
    async def run() -> None:
        transport = AsyncSealedTransport(session, world.wire)
        for _ in range(BATCH - LOW):
            await transport.prepare()
        async with asyncio.timeout(300):
            while tokens(session) <= LOW:
                await asyncio.sleep(0.005)
        await transport.aclose()

    session = world.session()
    session._plan = PurchasePlan(at_once)
    asyncio.run(run())
    assert tokens(session) == LOW + BATCH
    assert session.restock_in_s is None


def test_a_blocking_client_buys_by_itself_when_the_moment_has_come(cloud: LoopbackCloud) -> None:
    session = cloud.session()
    session._plan = PurchasePlan(at_once)
    transport = SealedTransport(session)
    for _ in range(BATCH - LOW):
        transport.prepare()
    give_up_s = time.monotonic() + 300
    while tokens(session) <= LOW:
        assert time.monotonic() < give_up_s, "nothing was bought"
        time.sleep(0.005)
    transport.close()
    nonces = [token.nonce for kept in session._wallet._tokens.values() for token in kept]
    assert len(nonces) == len(set(nonces)) == LOW + BATCH


def test_a_closed_client_buys_nothing_more(cloud: LoopbackCloud) -> None:
    session = cloud.session()
    session._plan = PurchasePlan(lambda below: below - 1)
    transport = SealedTransport(session)
    for _ in range(BATCH):
        transport.prepare()
    planned = transport._restocker._timer
    assert planned is not None
    assert planned.is_alive()
    transport.close()
    assert not planned.is_alive(), "the purchase is still planned"
    assert tokens(session) == 0


def test_a_purchase_that_fails_ahead_of_need_is_told_to_who_needs_a_token(world: World) -> None:
    session = world.session()
    session._plan = PurchasePlan(at_once)

    async def run() -> None:
        transport = AsyncSealedTransport(session, world.wire)
        await transport.prepare()
        world.cloud.credentials = world.cloud.credentials.remove("ann")
        for _ in range(BATCH - 1):
            await transport.prepare()
            await asyncio.sleep(0)
        with pytest.raises(NoTokensError, match=r"not know the API key .401.: check the key in the file of --api-key-file"):
            await transport.prepare()
        await transport.aclose()

    asyncio.run(run())


def test_tokens_that_come_when_their_epoch_is_over_are_dropped(world: World) -> None:
    """The gateway has another name by then, or the issuer another key: they would tell when they were bought."""
    session = world.session()

    async def run() -> None:
        transport = AsyncSealedTransport(session, world.wire)
        ready = await transport.prepare()
        assert tokens(session) == BATCH - 1
        purchase = session.restock()
        answer = await transport._ask(next(purchase))
        believed = session.believed
        assert believed is not None
        moved = msgspec.structs.replace(believed.epoch.gateway, url="http://moved.test")
        session._believed = replace(believed, epoch=msgspec.structs.replace(believed.epoch, gateway=moved))
        with pytest.raises(StopIteration):
            purchase.send(answer)
        assert tokens(session) == 0
        session.give_back(ready)
        assert tokens(session) == 0

    asyncio.run(run())
