"""What runs beside the requests: names of nodes, epochs, and keys that are replaced on time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloister.private.epochs import EpochKeeper, EpochSettings
from cloister.private.node import NodeConfig, node_app
from cloister.private.nodes import NodeBook
from cloister.private.problems import ProblemError
from cloister.private.serving import Lifespan
from cloister.private.unsealing import LocalUnsealer
from cloister.private.upstream import Upstream
from cloister.trust.attestation.evidence import Statement, read_evidence, read_statement
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.sealing import CHUNKED, Header, KeyRing, Receiver, ReplayCache, seal_chunked_request
from cloister.trust.transparency.epoch import IssuerEntry, parse_bundle
from cloister.trust.transparency.membership import sign_member
from cloister.trust.transparency.refusal import TransparencyError
from tests.loopback import Recorder, serve
from tests.private.inner import Inner
from tests.trust.transparency.world import World, make_release, member_key


class Place:
    """A node with evidence, and what a gateway knows of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now_s = 1000.0
        self.receiver = Receiver(KeyRing(self.now_s), ReplayCache(3600))
        unsealer = LocalUnsealer(self.receiver, lambda: self.now_s)
        self.app = Recorder(node_app(Inner(), NodeConfig(evidence=self.evidence), unsealer, Lifespan(None)))

    def evidence(self) -> bytes:
        release, key = self.world.release, self.receiver.ring.current
        begins = int(self.world.now + key.created_s - self.now_s)
        statement = Statement(
            release=release.digest,
            model=release.model,
            profile=release.profile,
            profile_digest=release.profile_digest,
            hardening={},
            keys=self.receiver.ring.publish(),
            capacity=1,
            not_before=begins,
            not_after=begins + 3600,
        )
        return sign_member(member_key("node"), SoftwareAttester().attest(statement.encode())).encode()

    @property
    def name(self) -> str:
        return hashlib.sha256(self.receiver.ring.publish()).hexdigest()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.world.now += seconds


def test_a_new_epoch_follows_when_a_key_changes_and_before_the_old_one_ends(tmp_path: Path) -> None:
    place = Place(World(tmp_path))
    world = place.world

    async def live(url: str) -> None:
        upstream = Upstream("node")
        book = NodeBook([url], upstream, lambda: place.now_s)
        ring = KeyRing(0.0, life_s=86400, overlap_s=3600)
        unsealer = LocalUnsealer(Receiver(ring, ReplayCache(600)), lambda: place.now_s)
        settings = EpochSettings("https://gateway.example", world.release.digest, world.release.profile)
        issuers = (IssuerEntry("https://issuer.example", b"a key", 0),)
        log = tmp_path / "log"
        keeper = EpochKeeper(settings, world.publisher, unsealer, book, lambda: issuers, log, lambda: world.now)
        assert await keeper.read() is None
        await book.look()
        assert await keeper.renew()
        first = parse_bundle(await keeper.read() or b"")
        assert world.believe(await keeper.read() or b"").epoch == first.epoch, "clients believe it"
        assert [node.node_id for node in first.epoch.nodes] == [place.name]
        evidence = book.find_evidence(first.epoch.nodes[0].evidence_sha256)
        assert evidence is not None
        assert first.epoch.gateway.keys == ring.publish()
        assert not await keeper.renew(), "nothing has changed"

        place.pass_time(2700)
        await book.look()
        assert await keeper.renew()
        second = parse_bundle(await keeper.read() or b"")
        assert second.epoch.epoch == first.epoch.epoch + 1
        assert [node.node_id for node in second.epoch.nodes] == [place.name]
        assert second.epoch.nodes[0] != first.epoch.nodes[0], "the node has its next key"
        for epoch in (first.epoch, second.epoch):
            assert await book.find(epoch.nodes[0].node_id) == url, "both names hold while both keys do"
        assert book.find_evidence(first.epoch.nodes[0].evidence_sha256) == evidence

        place.pass_time(second.epoch.not_after - world.now - 299)
        assert await keeper.renew(), "a client whose clock is a little ahead finds one that holds"
        assert parse_bundle(await keeper.read() or b"").epoch.not_before == int(world.now)
        await upstream.close()

    with serve(place.app) as url:
        asyncio.run(live(url))


def test_a_revocation_takes_the_epoch_back_and_a_logged_release_brings_a_new_one(tmp_path: Path) -> None:
    place = Place(World(tmp_path))
    world = place.world

    async def live(url: str) -> None:
        upstream = Upstream("node")
        book = NodeBook([url], upstream, lambda: place.now_s)
        unsealer = LocalUnsealer(Receiver(KeyRing(0.0), ReplayCache(600)), lambda: place.now_s)
        settings = EpochSettings("https://gateway.example", world.release.digest, world.release.profile)
        issuers = (IssuerEntry("https://issuer.example", b"a key", 0),)
        keeper = EpochKeeper(settings, world.publisher, unsealer, book, lambda: issuers, tmp_path / "log", lambda: world.now)
        await book.look()
        assert await keeper.renew()
        world.log_release(make_release(2))
        assert await keeper.renew(), "the log has grown"
        assert world.believe(await keeper.read() or b"").epoch.epoch == 2
        assert not await keeper.renew()
        world.log_minimum(2)
        with pytest.raises(TransparencyError, match="revoked"):
            await keeper.renew()
        assert await keeper.read() is None
        await upstream.close()

    with serve(place.app) as url:
        asyncio.run(live(url))


def test_an_epoch_that_clients_would_refuse_is_not_handed_out(tmp_path: Path) -> None:
    place = Place(World(tmp_path))

    async def live() -> None:
        upstream = Upstream("node")
        unsealer = LocalUnsealer(place.receiver, lambda: place.now_s)
        settings = EpochSettings("https://gateway.example", place.world.release.digest, "private")
        issuers = (IssuerEntry("https://issuer.example", b"a key", 0),)
        book = NodeBook([], upstream)
        keeper = EpochKeeper(settings, place.world.publisher, unsealer, book, lambda: issuers, tmp_path / "log")
        with pytest.raises(TransparencyError, match="no node can stand in the epoch"):
            await keeper.renew()
        assert await keeper.read() is None
        await upstream.close()

    asyncio.run(live())


def test_a_name_that_is_not_known_is_asked_for_at_once_and_then_not_more_than_once_a_second(tmp_path: Path) -> None:
    place = Place(World(tmp_path))

    async def live(url: str) -> None:
        upstream = Upstream("node")
        book = NodeBook([url, "http://127.0.0.1:1"], upstream, lambda: place.now_s)
        assert await asyncio.gather(*(book.find(place.name) for _ in range(10))) == [url] * 10
        assert sum(seen.path.endswith("ohttp-gateway") for seen in place.app.seen) == 1
        for _ in range(5):
            assert await book.find("0" * 64) is None
        assert sum(seen.path.endswith("ohttp-gateway") for seen in place.app.seen) == 1
        place.now_s += 2
        assert await book.find("0" * 64) is None
        assert sum(seen.path.endswith("ohttp-gateway") for seen in place.app.seen) == 2
        old = place.name
        place.now_s += 3700
        await book.look()
        assert list(book.node_ids) == [place.name], "a name lives no longer than its key"
        assert place.name != old
        book.change_urls([])
        assert book.node_ids == {}
        await upstream.close()

    with serve(place.app) as url:
        asyncio.run(live(url))


class CapturedNode:
    """A node that states the key of another one.

    Args:
        evidence: which evidence it shows for it.
    """

    def __init__(self, other: Place, evidence: Callable[[], bytes]) -> None:
        self._other, self._evidence = other, evidence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_key = scope["path"].endswith("ohttp-gateway")
        await Response(self._other.receiver.ring.publish() if is_key else self._evidence())(scope, receive, send)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("shows", ["own", "other"])
def test_a_node_that_states_the_key_of_another_one_gets_none_of_its_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shows: str, is_first: bool
) -> None:
    place = Place(World(tmp_path))
    world = place.world
    captured = CapturedNode(place, place.evidence if shows == "other" else Place(world).evidence)

    async def live(url: str, captured_url: str) -> None:
        upstream = Upstream("node")
        book = NodeBook([url], upstream, lambda: place.now_s)
        settings = EpochSettings("https://gateway.example", world.release.digest, world.release.profile)
        unsealer = LocalUnsealer(Receiver(KeyRing(0.0), ReplayCache(600)), lambda: place.now_s)
        issuers = (IssuerEntry("https://issuer.example", b"a key", 0),)
        keeper = EpochKeeper(settings, world.publisher, unsealer, book, lambda: issuers, tmp_path / "log", lambda: world.now)
        await book.look()
        assert await keeper.renew()
        await book.look()  # with the membership of the log
        book.change_urls([captured_url, url] if is_first else [url, captured_url])
        for seconds in (15, 2700):  # the key of an address that had it, and the next one, which nobody had
            place.pass_time(seconds)
            place.receiver.ring.rotate(place.now_s)
            await book.look()
            assert await book.find(place.name) == url
            stated = [read_statement(read_evidence(document).statement).node_id for document in book.evidence]
            assert stated == [place.name], "who states another one's key stands in no epoch"
        await upstream.close()

    with serve(place.app) as url, serve(captured) as captured_url, caplog.at_level(logging.WARNING, "cloister.private.nodes"):
        asyncio.run(live(url, captured_url))
    said = [record.getMessage() for record in caplog.records if "states the key" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"the node {captured_url} states the key of the node {url}, ")


def test_a_node_that_stops_answering_is_told_once_and_once_more_when_it_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Upstream):
        is_down = True

        async def get(self, url: str) -> bytes:
            if self.is_down:
                raise ProblemError(502, "the node cannot be reached")
            return b"keys"

    async def live() -> None:
        upstream = Failing("node")
        book = NodeBook(["http://node.example"], upstream)
        for upstream.is_down in (True, True, False, False, True):
            await book.look()
        await upstream.close()

    with caplog.at_level(logging.INFO, "cloister.private.nodes"):
        asyncio.run(live())
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(" (")[0] for line in said] == [
        "the node http://node.example cannot be asked for its key",
        "the node http://node.example answers again",
        "the node http://node.example cannot be asked for its key",
    ]
    assert "draws of it fail meanwhile" in said[0]


def test_keys_are_replaced_and_destroyed_on_time_where_nobody_asks() -> None:
    ring = KeyRing(time.monotonic(), life_s=0.3, overlap_s=0.1)
    first = ring.current.configuration
    unsealer = LocalUnsealer(Receiver(ring, ReplayCache(10)))

    async def live() -> None:
        turning = asyncio.create_task(unsealer.turn_forever())
        async with asyncio.timeout(300):
            while ring.current.configuration == first:
                await asyncio.sleep(0.01)
            while ring.find(first.key_id, 0.0) is not None:  # at a time at which it had not expired: it is gone, not refused
                await asyncio.sleep(0.01)
        turning.cancel()

    asyncio.run(live())


def test_a_key_that_was_published_opens_what_is_sealed_to_it() -> None:
    receiver = Receiver(KeyRing(0.0), ReplayCache(10))
    unsealer = LocalUnsealer(receiver, lambda: 0.0)
    sealed, exchange = seal_chunked_request(receiver.ring.current.configuration, b"hello")

    async def live() -> None:
        begun = await unsealer.begin(Header.parse(sealed), CHUNKED)
        assert begun.context.secrets == exchange.context.secrets

    asyncio.run(live())
