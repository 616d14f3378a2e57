"""Publishing epochs: who stands in them, and what stops one."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from cloister.trust.transparency.checks import View
from cloister.trust.transparency.epoch import GatewayEntry, parse_bundle
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.membership import MAX_MEMBERS
from cloister.trust.transparency.note import Kind, Note, PrivateKey, Signature, parse_note
from cloister.trust.transparency.publisher import Published, Publisher
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.witness import HttpWitness, NearWitness, Witness
from cloister.types.errors import ConfigError
from tests.trust.transparency.world import World, keys_of, make_evidence, make_release


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_epoch_names_the_nodes_by_what_their_evidence_says(tmp_path: Path) -> None:
    world = World(tmp_path, members={"a": 3, "b": 1})
    documents = tuple(make_evidence(world.release, name=name, capacity=capacity) for name, capacity in (("a", 3), ("b", 1)))
    published = world.publish(evidence=documents)
    nodes = {node.node_id: node for node in world.believe(published.bundle).epoch.nodes}
    for document, name, capacity in zip(documents, "ab", (3, 1), strict=True):
        node = nodes[hashlib.sha256(keys_of(name)).hexdigest()]
        assert node.capacity == capacity
        assert node.evidence_sha256 == hashlib.sha256(document).hexdigest()
        assert published.evidence[node.evidence_sha256] == document
    assert published.left_out == ()


def many_nodes(world: World, num_nodes: int) -> tuple[bytes, ...]:
    return tuple(make_evidence(world.release, name=f"node{number}") for number in range(num_nodes))


def test_an_epoch_has_room_for_as_many_nodes_as_a_membership(tmp_path: Path) -> None:
    world = World(tmp_path, members={f"node{number}": 1 for number in range(MAX_MEMBERS)})
    believed = world.believe(world.publish(evidence=many_nodes(world, MAX_MEMBERS)).bundle)
    assert {node.node_id for node in believed.epoch.nodes} == {
        hashlib.sha256(keys_of(f"node{number}")).hexdigest() for number in range(MAX_MEMBERS)
    }


def test_a_first_visit_does_not_fetch_the_keys_of_nodes_that_are_gone(tmp_path: Path) -> None:
    """Of each epoch ever logged it reads digests; the keys of the nodes that serve come with their evidence."""
    world = World(tmp_path, members={f"node{number}": 1 for number in range(8)})
    documents = many_nodes(world, 8)
    first = world.publish(evidence=documents)
    before = sum(map(len, world.fetch(first.bundle, View()).values()))
    for _ in range(5):
        world.now += 600
        last = world.publish(evidence=documents)
    grown = sum(map(len, world.fetch(last.bundle, View()).values())) - before
    assert last.epoch.epoch == first.epoch.epoch + 5
    assert 5 * 2000 < grown < 5 * 5000


def test_an_epoch_ends_with_the_first_keys_that_end(world: World) -> None:
    documents = (make_evidence(world.release, name="a", life_s=600), make_evidence(world.release, name="b"))
    epoch = world.publish(evidence=documents).epoch
    assert epoch.not_after - epoch.not_before == 600


def test_a_node_that_runs_something_else_or_ends_soon_is_left_out(world: World) -> None:
    good = make_evidence(world.release)
    documents = (
        good,
        make_evidence(make_release(2), name="other release"),
        make_evidence(world.release, name="ends", life_s=30),
        make_evidence(world.release, name="later", now=world.now + 600),
        good,
        b"nonsense",
    )
    published = world.publish(evidence=documents)
    assert len(published.epoch.nodes) == 1
    assert len(published.left_out) == 5
    with pytest.raises(TransparencyError, match="no node"):
        world.publish(evidence=documents[1:4])


class Silent:
    """A witness that never answers in time."""

    async def cosign(self, log: Log, note: Note) -> list[Signature]:
        raise TransparencyError(Reason.TOO_FEW_WITNESSES, "no answer")


def test_one_witness_may_be_away_and_two_may_not(world: World) -> None:
    near = list(world.publisher._cosigners)
    contents = world.contents()
    one_away = Publisher(world.log, world.trust, [*near[:2], Silent()])
    world.believe(asyncio.run(one_away.publish(contents, world.now)).bundle)
    one_away._cosigners = (near[0], Silent(), Silent())
    with pytest.raises(TransparencyError) as caught:
        asyncio.run(one_away.publish(contents, world.now))
    assert caught.value.reason == Reason.TOO_FEW_WITNESSES
    again = world.publish()  # what was logged without witnesses does not stop the next one
    assert world.believe(again.bundle).epoch.epoch == 3


def test_after_a_start_nothing_is_logged_that_follows_what_witnesses_have_not_confirmed(world: World) -> None:
    near = list(world.publisher._cosigners)
    two_away = Publisher(world.log, world.trust, [near[0], Silent(), Silent()])
    size = world.log.checkpoint()[0].size
    with pytest.raises(TransparencyError, match="too few of its witnesses confirm its 2 entries") as caught:
        asyncio.run(two_away.publish(world.contents(), world.now))
    assert caught.value.reason == Reason.TOO_FEW_WITNESSES
    assert world.log.checkpoint()[0].size == size


@pytest.mark.parametrize("more", [1, 2])
def test_an_older_copy_of_a_log_does_not_go_on(world: World, more: int, tmp_path: Path) -> None:
    """Its next epoch would be a second history, which the log's key has signed and every client remembers."""
    world.publish()
    copy = shutil.copytree(world.log.directory, tmp_path / "copy")
    for _ in range(more):
        world.publish()
    files = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    world.publisher = world.make_publisher(Log(copy, world.log_key))
    for _ in range(2):
        with pytest.raises(TransparencyError, match=rf"it cosigned {3 + more} entries before, and this checkpoint has 3"):
            world.publish()
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("num_witnesses", "who_lagged", "who_was_restored"), [(4, (2, 3), ()), (3, (2,), (1,)), (3, (), (1, 2))]
)
def test_one_witness_that_cosigned_more_stops_an_older_copy(
    num_witnesses: int, who_lagged: tuple[int, ...], who_was_restored: tuple[int, ...], tmp_path: Path
) -> None:
    """With a threshold of 2, two that know nothing of the newest epoch would confirm the log without it."""
    keys = [PrivateKey.generate(f"witness.example/{number}", Kind.COSIGNATURE) for number in range(num_witnesses)]
    world = World(tmp_path, witness_keys=keys)
    world.publish()
    copy = shutil.copytree(world.log.directory, tmp_path / "copy")
    states = [shutil.copytree(tmp_path / f"witness{number}", tmp_path / f"old{number}") for number in who_was_restored]
    near = world.publisher._cosigners
    world.publisher._cosigners = tuple(Silent() if number in who_lagged else each for number, each in enumerate(near))
    world.believe(world.publish().bundle)
    for number, state in zip(who_was_restored, states, strict=True):
        shutil.copytree(state, tmp_path / f"witness{number}", dirs_exist_ok=True)
    older = Log(copy, world.log_key)
    world.publisher = world.make_publisher(older)
    with pytest.raises(TransparencyError, match=r"witness\.example/0 .*cosigned 4 .*has 3.*leave out its --witness"):
        world.publish()
    assert older.checkpoint()[0].size == 3


def test_one_witness_of_another_tree_stops_a_gateway(world: World, tmp_path: Path) -> None:
    copy = shutil.copytree(world.log.directory, tmp_path / "copy")
    other = Log(copy, world.log_key)
    world.log_minimum(1)
    note = world.log.checkpoint()[1]
    asyncio.run(NearWitness(world.witnesses[2], lambda: world.now).cosign(world.log, note))
    other.append([b"another entry"])
    world.publisher = world.make_publisher(other)
    with pytest.raises(TransparencyError, match=r"witness\.example/2 .*knows another tree.*leave out its --witness"):
        world.publish()
    world.publisher._cosigners = world.publisher._cosigners[:2]  # as the message says
    world.publish()


def test_a_gateway_that_changes_its_keys_too_often_waits_until_clients_accept_the_next_ones(world: World) -> None:
    """Its keys are in memory, so each start has others; clients accept five at once, and one an hour."""

    cosigners = world.publisher._cosigners

    def start(number: int) -> Published:
        world.publisher = Publisher(world.log, world.trust, cosigners, keeps_pace=True)
        return world.publish(gateway=GatewayEntry("https://gateway.example", b"keys %d" % number))

    for number in range(5):
        world.believe(start(number).bundle)
        world.now += 60
    size = world.log.checkpoint()[0].size
    with pytest.raises(TransparencyError, match=r"changed its keys more than 5 times.*do not restart") as caught:
        start(5)
    assert (caught.value.reason, world.log.checkpoint()[0].size) == (Reason.TOO_FAST, size)
    world.now += 3600
    world.believe(start(5).bundle)


def test_nothing_is_logged_if_the_spend_store_does_not_take_the_epoch(world: World) -> None:
    known = [1]

    def before_epoch(number: int) -> None:
        if number not in known:
            raise ConfigError("an older copy")

    publisher = Publisher(world.log, world.trust, world.publisher._cosigners, before_epoch)
    world.believe(asyncio.run(publisher.publish(world.contents(), world.now)).bundle)
    size = world.log.checkpoint()[0].size
    with pytest.raises(ConfigError, match="an older copy"):
        asyncio.run(publisher.publish(world.contents(), world.now))
    assert world.log.checkpoint()[0].size == size


def test_an_epoch_that_waits_for_witnesses_is_not_logged_again_and_again(world: World) -> None:
    class Away(NearWitness):
        is_away = False

        async def cosign(self, log: Log, note: Note) -> Sequence[Signature]:
            if self.is_away:
                raise TransparencyError(Reason.TOO_FEW_WITNESSES, "no answer")
            return await super().cosign(log, note)

    witnesses = [Away(witness, lambda: world.now) for witness in world.witnesses]
    publisher = Publisher(world.log, world.trust, witnesses)
    contents = world.contents()
    asyncio.run(publisher.publish(contents, world.now))
    Away.is_away = True
    for _ in range(3):
        with pytest.raises(TransparencyError):
            asyncio.run(publisher.publish(contents, world.now))
        world.now += 5
    assert world.log.checkpoint()[0].size == 4
    Away.is_away = False
    published = asyncio.run(publisher.publish(contents, world.now))
    assert world.believe(published.bundle).epoch.epoch == 2
    assert world.log.checkpoint()[0].size == 4
    assert world.log.checkpoint()[1].signatures == parse_note(parse_bundle(published.bundle).checkpoint).signatures
    Away.is_away = True
    with pytest.raises(TransparencyError):
        asyncio.run(publisher.publish(contents, world.now))
    with pytest.raises(TransparencyError):  # other contents, another epoch
        asyncio.run(publisher.publish(world.contents(gateway=GatewayEntry("https://other.example", b"k")), world.now))
    assert world.log.checkpoint()[0].size == 6


def serve(witness: Witness, world: World, seen: list[int]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        given = witness.add_checkpoint(request.content, world.now)
        seen.append(given.status)
        return httpx.Response(given.status, text=given.body, headers={"content-type": given.media_type})

    return httpx.MockTransport(answer)


async def cosign_over_http(
    world: World, witness: Witness, transport: httpx.AsyncBaseTransport, deadline_s: float = 30.0
) -> Note:
    async with httpx.AsyncClient(transport=transport) as client:
        asker = HttpWitness("https://witness.example/prefix/", witness.key, client, deadline_s)
        note = world.log.checkpoint()[1]
        return note.add(*await asker.cosign(world.log, note))


def test_a_witness_over_http_is_asked_again_from_where_it_is(world: World) -> None:
    seen: list[int] = []
    witness = world.witnesses[0]
    transport = serve(witness, world, seen)
    first = asyncio.run(cosign_over_http(world, witness, transport))
    assert len(first.signatures) == 2
    world.log.append([b"more"])
    asyncio.run(cosign_over_http(world, witness, transport))
    assert seen == [200, 409, 200]


async def hang(request: httpx.Request) -> httpx.Response:
    await asyncio.sleep(60)
    raise AssertionError


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: httpx.Response(200, text="nonsense"),
        lambda request: httpx.Response(200, text="— witness.example/0 AAAAAAA=\n"),
        lambda request: httpx.Response(200, text="x" * 100_000),
        lambda request: httpx.Response(500, text="broken"),
        lambda request: httpx.Response(409, text="99999\n", headers={"content-type": "text/x.tlog.size"}),
        lambda request: httpx.Response(409, text="٣\n", headers={"content-type": "text/x.tlog.size"}),
        lambda request: (_ for _ in ()).throw(httpx.ConnectError("refused")),
        hang,
    ],
)
def test_a_witness_that_answers_nonsense_or_not_at_all_is_counted_as_away(world: World, answer: object) -> None:
    with pytest.raises(TransparencyError):
        asyncio.run(cosign_over_http(world, world.witnesses[0], httpx.MockTransport(answer), 0.5))  # type: ignore[arg-type]


def test_a_publisher_that_starts_again_goes_on_where_the_log_is(world: World) -> None:
    world.publish()
    world.publisher = world.make_publisher(Log(world.log.directory, world.log_key))
    bundle = world.publish().bundle
    assert world.believe(bundle, View()).epoch.epoch == 2


def test_an_epoch_that_clients_would_refuse_is_not_published(world: World) -> None:
    stranger = dataclasses.replace(world.trust, releases=(world.log_key.public,))
    publisher = world.make_publisher(world.log, stranger)
    size = world.log.checkpoint()[0].size
    with pytest.raises(TransparencyError, match="no release"):
        asyncio.run(publisher.publish(world.contents(), world.now))
    assert world.log.checkpoint()[0].size == size
