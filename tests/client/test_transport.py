"""`AsyncSealedTransport` through the programs' own applications, without sockets; what carries between them may be hostile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cloister.client import (
    AsyncSealedTransport,
    EpochRefusedError,
    EvidenceRefusedError,
    FinalRefusalError,
    NoAnswerError,
    NoTokensError,
    RelayUnreachableError,
    RepeatedRequestError,
)
from cloister.client.routing_audit.cloud import ISSUER, RELAY
from cloister.client.routing_audit.records import Spell
from cloister.client.token_purchase import BATCH
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.transparency.publisher import Publisher
from cloister.trust.transparency.trust import Trust
from cloister.trust.transparency.witness import NearWitness
from cloister.types.errors import RequestTooLargeError
from tests.client.world import NODES, PURCHASE, Handler, World, ask, ask_once


def test_a_request_reaches_the_node_that_was_drawn_and_its_answer_comes_back(world: World) -> None:
    response = ask_once(world)
    assert response.json() == {"ok": True}
    (drawn,) = response.extensions["cloister"]["drawn"]
    assert world.cloud.opened() == {"m": [world.cloud.names[drawn]]}


def test_the_evidence_of_every_node_is_fetched_so_that_the_relay_does_not_see_which_was_drawn(world: World) -> None:
    ask_once(world)
    assert sum("/evidence/" in line for line in world.wire.asked) == len(NODES.capacities)


def test_the_client_speaks_with_the_relay_alone_and_shows_it_no_api_key(world: World) -> None:
    async def look(request: httpx.Request, go_on: Handler) -> httpx.Response:
        assert "authorization" not in request.headers
        assert world.api_key.encode() not in await request.aread()
        return await go_on(request)

    world.wire.tamper = look
    asyncio.run(ask(world.client(), headers={"authorization": f"Bearer {world.api_key}"}))
    assert {httpx.URL(line.split()[1]).host for line in world.wire.asked} == {httpx.URL(RELAY).host}


def test_a_client_that_buys_directly_shows_the_api_key_to_the_issuer_alone(world: World) -> None:
    seen: dict[str, list[str | None]] = {}

    async def look(request: httpx.Request, go_on: Handler) -> httpx.Response:
        seen.setdefault(request.url.host, []).append(request.headers.get("authorization"))
        return await go_on(request)

    world.wire.tamper = look
    ask_once(world, world.session(buys_directly=True))
    assert set(seen[httpx.URL(RELAY).host]) == {None}
    assert seen[httpx.URL(ISSUER).host] == [f"Bearer {world.api_key}"]


def test_tokens_are_fetched_in_batches_and_each_is_spent_once(world: World) -> None:
    async def run() -> None:
        async with world.client() as client:
            responses = await asyncio.gather(*(ask(client, str(number)) for number in range(BATCH)))
            assert all(response.status_code == 200 for response in responses)

    asyncio.run(run())
    assert world.wire.asked.count(PURCHASE) == 1
    assert world.wire.sent == BATCH


def change(part: str, edit: Callable[[bytes], bytes]) -> Callable[[httpx.Request, Handler], Awaitable[httpx.Response]]:
    async def tamper(request: httpx.Request, go_on: Handler) -> httpx.Response:
        response = await go_on(request)
        if part not in str(request.url):
            return response
        return httpx.Response(response.status_code, headers=response.headers, content=edit(await response.aread()))

    return tamper


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"capacity":1', b'"capacity":9', "not_included"),
        (b'"epoch":', b'"epoch" :', "not_canonical"),
        (b'"profile":"team"', b'"profile":"open"', "not_included"),
    ],
)
def test_a_changed_epoch_is_refused_before_anything_is_sent(world: World, old: bytes, new: bytes, reason: str) -> None:
    world.wire.tamper = change("/epoch", lambda body: body.replace(old, new, 1))
    with pytest.raises(EpochRefusedError, match="nothing was sent") as caught:
        ask_once(world)
    assert caught.value.reason == reason
    assert world.wire.sent == 0
    assert PURCHASE not in world.wire.asked


def test_changed_evidence_is_refused_before_anything_is_sent_and_the_step_is_named(world: World) -> None:
    world.wire.tamper = change("/evidence/", lambda body: body.replace(b"software", b"softwore", 1))
    with pytest.raises(EvidenceRefusedError, match="not the one that the epoch names") as caught:
        ask_once(world)
    assert caught.value.steps == ("listed",)
    assert world.wire.sent == 0
    assert PURCHASE not in world.wire.asked


def test_evidence_that_proves_too_little_is_refused_in_words(world: World) -> None:
    with pytest.raises(EvidenceRefusedError, match="no hardware vouches") as caught:
        ask_once(world, world.session(policy=AttestationPolicy()))
    assert caught.value.steps == ("hardware",)
    assert world.wire.sent == 0


def test_withheld_evidence_is_refused(world: World) -> None:
    async def withhold(request: httpx.Request, go_on: Handler) -> httpx.Response:
        return httpx.Response(404) if "/evidence/" in str(request.url) else await go_on(request)

    world.wire.tamper = withhold
    with pytest.raises(EvidenceRefusedError, match="does not serve"):
        ask_once(world)
    assert world.wire.sent == 0


def test_a_relay_that_withholds_the_evidence_of_one_node_cannot_leave_it_out_of_the_draw(world: World) -> None:
    withheld: list[str] = []

    async def withhold(request: httpx.Request, go_on: Handler) -> httpx.Response:
        if "/evidence/" in str(request.url) and str(request.url) in (withheld or [str(request.url)]):
            withheld.append(str(request.url))
            return httpx.Response(404)
        return await go_on(request)

    world.wire.tamper = withhold
    session = world.session()
    for _ in range(8):  # one of them would be drawn otherwise
        with pytest.raises(EvidenceRefusedError, match="could choose among them"):
            ask_once(world, session)
    assert world.wire.sent == 0
    assert len(set(withheld)) == 1


def test_a_log_that_other_witnesses_saw_is_refused(world: World) -> None:
    stranger: Trust = World(world.directory / "other").cloud.trust
    mixed = replace(world.cloud.trust, witnesses=stranger.witnesses)
    with pytest.raises(EpochRefusedError, match="witnesses") as caught:
        ask_once(world, world.session(trust=mixed))
    assert caught.value.reason == "too_few_witnesses"


def test_a_split_view_is_refused_even_if_the_witnesses_lie_too(directory: Path) -> None:
    world = World(directory / "cloud")
    shutil.copytree(world.directory, directory / "before")
    asyncio.run(world.cloud.enter(NODES))
    state = directory / "view.json"
    ask_once(world, world.session(state=state, remember=True))

    # log and witnesses go back to before the epoch, and write another one in its place
    for name in ("log", "witness0", "witness1"):
        shutil.rmtree(world.directory / name)
        shutil.copytree(directory / "before" / name, world.directory / name)
    cloud = world.cloud
    cloud.cosigners = [NearWitness(near._witness, cloud.now) for near in cloud.cosigners]
    cloud.publisher = Publisher(cloud.log, cloud.trust, cloud.cosigners)
    cloud._memberships, cloud.members = 0, {}
    asyncio.run(cloud.enter(NODES))

    assert ask_once(world).status_code == 200, "who was not there before cannot tell"
    with pytest.raises(EpochRefusedError) as caught:
        ask_once(world, world.session(state=state, remember=True))
    assert caught.value.reason == "split_view"
    assert world.wire.sent == 2


def test_a_replayed_request_is_refused(world: World) -> None:
    sealed: list[bytes] = []

    async def keep(request: httpx.Request, go_on: Handler) -> httpx.Response:
        if f"{request.method} {request.url}" == f"POST {RELAY}/":
            sealed.append(await request.aread())
        return await go_on(request)

    async def replay() -> httpx.Response:
        copy = httpx.Request("POST", f"{RELAY}/", headers={"content-type": "message/ohttp-chunked-req"}, content=sealed[0])
        return await world.wire.inner.handle_async_request(copy)

    world.wire.tamper = keep
    ask_once(world)
    assert asyncio.run(replay()).status_code == 400
    assert len(world.cloud.opened()["m"]) == 1


def test_a_node_that_is_away_is_followed_by_another_draw_with_another_token(world: World) -> None:
    asyncio.run(world.cloud.enter(Spell({"a": 1, "b": 1}, down=frozenset({"b"}))))
    draws = iter([1, 1, 0])
    response = ask_once(world, world.session(below=lambda capacity: next(draws)))
    assert response.status_code == 200
    assert [world.cloud.names[one] for one in response.extensions["cloister"]["drawn"]] == ["b", "b", "a"]
    assert world.cloud.opened() == {"m": ["a"]}
    assert world.wire.sent == 3


def test_when_every_draw_fails_the_reasons_are_said(world: World) -> None:
    asyncio.run(world.cloud.enter(Spell({"a": 1, "b": 1}, down=frozenset({"a", "b"}))))
    with pytest.raises(NoAnswerError, match=r"3 draws.*cannot be reached") as caught:
        ask_once(world)
    assert len(caught.value.draws) == 3
    assert world.wire.sent == 3


def test_an_answer_that_breaks_off_before_it_began_is_drawn_for_again(world: World) -> None:
    async def cut(request: httpx.Request, go_on: Handler) -> httpx.Response:
        response = await go_on(request)
        if f"{request.method} {request.url}" != f"POST {RELAY}/":
            return response
        return httpx.Response(200, headers=response.headers, content=(await response.aread())[:-1])

    world.wire.tamper = cut
    with pytest.raises(NoAnswerError, match=r"3 draws .the sealed answer broke off"):
        ask_once(world)
    assert world.wire.sent == 3


def test_a_relay_that_is_not_there_is_named_and_costs_no_token(world: World) -> None:
    session = world.session()
    ask_once(world, session)

    async def gone(request: httpx.Request, go_on: Handler) -> httpx.Response:
        raise httpx.ConnectError("refused")

    world.wire.tamper = gone
    for _ in range(BATCH + 5):
        with pytest.raises(RelayUnreachableError, match=r"relay at http://relay.test"):
            ask_once(world, session)
    world.wire.tamper = None
    assert ask_once(world, session).status_code == 200
    assert world.wire.asked.count(PURCHASE) == 1


def test_a_key_that_the_issuer_does_not_know_is_said_so(world: World) -> None:
    with pytest.raises(NoTokensError, match="API key"):
        ask_once(world, world.session(api_key="sk-unknown"))
    assert world.wire.sent == 0


def test_a_request_that_an_sdk_repeats_is_not_drawn_for_again(world: World) -> None:
    with pytest.raises(RepeatedRequestError, match="max_retries=0"):
        asyncio.run(ask(world.client(), headers={"x-stainless-retry-count": "1"}))
    assert world.wire.asked == []


def test_a_request_beyond_the_largest_bucket_is_refused_here(world: World) -> None:
    with pytest.raises(RequestTooLargeError):
        asyncio.run(ask(world.client(), "x" * (17 << 20)))
    assert world.wire.sent == 0


def test_a_clock_that_is_off_is_said_so_and_costs_no_other_draw(world: World) -> None:
    world.cloud.time += 10
    late = world.session()
    asyncio.run(AsyncSealedTransport(late, world.wire).prepare())
    late.now = lambda: world.cloud.now() - 305  # within what the epoch allows, not within what a date may be off
    with pytest.raises(FinalRefusalError, match="set this machine's clock"):
        ask_once(world, late)
    assert world.wire.sent == 1
    assert world.cloud.opened() == {}


def test_a_clock_that_is_off_is_said_so_when_tokens_are_bought(world: World) -> None:
    world.cloud.time += 10
    with pytest.raises(NoTokensError, match="check this machine's clock"):
        ask_once(world, world.session(now=lambda: world.cloud.now() - 305))
    assert world.wire.sent == 0


def test_a_clock_far_behind_is_said_so_before_anything_is_sent(world: World) -> None:
    with pytest.raises(EpochRefusedError, match="check this machine's clock"):
        ask_once(world, world.session(now=lambda: world.cloud.now() - 400))
    assert world.wire.sent == 0


def test_a_new_epoch_is_taken_when_the_old_one_ends(world: World) -> None:
    session = world.session()
    assert ask_once(world, session).extensions["cloister"]["epoch"] == 1
    asyncio.run(world.cloud.enter(NODES))
    assert ask_once(world, session).extensions["cloister"]["epoch"] == 2
    assert len(world.cloud.opened()["m"]) == 2
