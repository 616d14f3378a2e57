"""Who is in the cloud follows from the log: what a gateway, a stranger or a hasty signer cannot do to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cloister.trust.transparency.epoch import Epoch, NodeEntry, encode_bundle, epoch_leaf, parse_bundle
from cloister.trust.transparency.history import BURST, EPOCH_EVERY_S, GATEWAY_KEYS_EVERY_S, Pace
from cloister.trust.transparency.membership import NOTICE_S, build_membership, membership_entry, read_membership
from cloister.trust.transparency.note import Kind, PrivateKey, cosign
from cloister.trust.transparency.publisher import Publisher
from cloister.trust.transparency.refusal import Reason, TransparencyError
from tests.trust.transparency.world import World, make_evidence, member_key

replace = msgspec.structs.replace
OTHER = NodeEntry("ff" * 32, 1, b"keys", "00" * 32, "a")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def log_alone(world: World, bundle: bytes, **changes: object) -> bytes:
    """What a dishonest gateway serves: an epoch that it wrote itself, logged and cosigned: witnesses do not read entries."""
    honest = parse_bundle(bundle)
    epoch: Epoch = replace(honest.epoch, epoch=honest.epoch.epoch + 1, **changes)
    appended = world.log.append([epoch_leaf(epoch)])
    size = appended.checkpoint.size
    return encode_bundle(
        replace(
            honest,
            epoch=epoch,
            index=appended.first,
            checkpoint=str(appended.note.add(*(cosign(appended.note.text, key, int(world.now)) for key in world.witness_keys))),
            proof=world.log.prove_inclusion(appended.first, size),
            release=replace(honest.release, proof=world.log.prove_inclusion(honest.release.index, size)),
        )
    )


def refusal(world: World, bundle: bytes) -> TransparencyError:
    with pytest.raises(TransparencyError) as caught:
        world.believe(bundle)
    return caught.value


def test_a_log_without_a_membership_is_refused_and_the_gateway_is_told_why(tmp_path: Path) -> None:
    world = World(tmp_path / "with")
    bundle = world.publish().bundle
    world.believe(bundle)
    without = World(tmp_path / "without", members={})
    with pytest.raises(TransparencyError, match="cloister release members"):
        without.publish()
    honest = parse_bundle(bundle)
    release = replace(honest.release, entry=without.log.entries(0, 1, 1)[0])
    start = encode_bundle(replace(honest, epoch=replace(honest.epoch, epoch=0), release=release))
    assert refusal(without, log_alone(without, start)).reason is Reason.NO_MEMBERSHIP


def test_a_gateway_cannot_add_a_node(world: World) -> None:
    bundle = world.publish().bundle
    (node,) = parse_bundle(bundle).epoch.nodes
    for name in ("stranger", ""):
        error = refusal(world, log_alone(world, bundle, nodes=tuple(sorted((node, replace(OTHER, member=name)), key=str))))
        assert error.reason is Reason.NOT_A_MEMBER
        bundle = world.publish().bundle


def test_a_gateway_cannot_give_one_member_two_places(world: World) -> None:
    bundle = world.publish().bundle
    nodes = (*parse_bundle(bundle).epoch.nodes, replace(OTHER, member="node"))
    error = refusal(world, log_alone(world, bundle, nodes=nodes))
    assert error.reason is Reason.NOT_A_MEMBER
    assert "twice" in error.message


def test_a_gateway_cannot_change_a_capacity(world: World) -> None:
    bundle = world.publish().bundle
    (node,) = parse_bundle(bundle).epoch.nodes
    assert refusal(world, log_alone(world, bundle, nodes=(replace(node, capacity=2),))).reason is Reason.WRONG_CAPACITY


def test_what_is_not_signed_by_a_release_key_or_is_for_another_log_is_no_membership(world: World) -> None:
    world.publish()
    keys = {member_key("captured").public: 1}
    begins = int(world.now) + 2 * NOTICE_S
    stranger = PrivateKey.generate("release.example", Kind.NOTE)
    for number, log, key in ((2, world.log.key.name, stranger), (2, "other.example", world.release_key)):
        world.log.append([membership_entry(build_membership(number, log, begins, keys), [key])])
    again = build_membership(1, world.log.key.name, begins, keys)
    world.log.append([membership_entry(again, [world.release_key])])
    world.now += NOTICE_S
    world.publish()
    world.now += NOTICE_S
    assert world.believe(world.publish().bundle).membership.number == 1


def test_a_membership_holds_from_its_time_on_if_an_epoch_showed_it_before(world: World) -> None:
    world.publish()
    world.log_members(2, {"node": 1, "b": 1}, after_s=NOTICE_S)
    announcing = world.believe(world.publish().bundle)
    assert (announcing.membership.number, announcing.view.roll.coming[0].membership.number) == (1, 2)
    assert not world.publisher.has_new_members(world.now + NOTICE_S - 1)
    world.now += NOTICE_S
    assert world.publisher.has_new_members(world.now)
    assert world.believe(world.publish().bundle, announcing.view).membership.number == 2
    assert world.believe(world.publish().bundle).membership.number == 2, "who reads all of it comes to the same"


@pytest.mark.parametrize("notice_s", [0, NOTICE_S - 1])
def test_a_membership_that_surprises_never_holds(world: World, notice_s: int) -> None:
    world.publish()
    world.log_members(2, {"node": 1}, after_s=notice_s)
    world.publish()
    world.now += 2 * NOTICE_S
    believed = world.believe(world.publish().bundle)
    assert believed.membership.number == 1
    assert believed.view.roll.coming == ()


def test_a_membership_in_another_form_or_with_a_member_twice_is_refused(world: World) -> None:
    key = member_key("node").public
    twin = PrivateKey("node", Kind.NOTE, bytes(32)).public
    with pytest.raises(TransparencyError, match="stands twice"):
        build_membership(1, "log.example", 0, {key: 1, twin: 1})
    with pytest.raises(TransparencyError, match="kind 1"):
        build_membership(1, "log.example", 0, {world.witness_keys[0].public: 1})
    with pytest.raises(TransparencyError, match="cannot be read"):
        build_membership(1, "log.example", 0, {key: 0})
    with pytest.raises(TransparencyError):
        read_membership(b"cloister membership v1\n{}", [world.release_key.public])


def test_a_node_that_is_no_member_states_another_capacity_or_runs_twice_is_left_out(world: World) -> None:
    documents = (
        make_evidence(world.release),
        make_evidence(world.release, name="stranger"),
        make_evidence(world.release, name="a", capacity=9),
    )
    published = world.publish(evidence=documents)
    assert [node.member for node in published.epoch.nodes] == ["node"]
    assert ["--member-key" in line or "capacity 9" in line for line in published.left_out] == [True, True]
    world.now += 60
    twice = (make_evidence(world.release), make_evidence(world.release, now=world.now))
    assert [node.member for node in world.publish(evidence=twice).epoch.nodes] == ["node"]


def test_twenty_epochs_in_twenty_seconds_are_too_many_and_a_rest_makes_it_good(world: World) -> None:
    epoch = parse_bundle(world.publish().bundle).epoch
    pace, excess = Pace(), []
    for second in range(20):
        pace = pace.after(replace(epoch, not_before=epoch.not_before + second))
        excess.append(bool(pace.excess))
    assert excess == [False] * BURST + [True] * (20 - BURST)
    rested = pace.after(replace(epoch, not_before=epoch.not_before + 20 + 2 * EPOCH_EVERY_S))
    assert not rested.excess
    assert pace.after(replace(epoch, not_before=epoch.not_before - 1)).excess.startswith("it begins before")


def test_one_epoch_a_minute_is_never_too_fast_but_a_gateway_key_for_each_is(world: World) -> None:
    epoch = parse_bundle(world.publish().bundle).epoch
    steady, turning = Pace(), Pace()
    for number in range(60):
        at = epoch.not_before + number * EPOCH_EVERY_S
        steady = steady.after(replace(epoch, not_before=at))
        assert not steady.excess
        if number <= BURST:
            gateway = replace(epoch.gateway, keys=b"keys %d" % number)
            turning = turning.after(replace(epoch, not_before=at, gateway=gateway))
            assert bool(turning.excess) is (number == BURST)
    assert "changed its keys" in turning.excess
    again = replace(epoch, not_before=turning.begun + 60, gateway=gateway)
    assert turning.after(again).excess, "a second epoch under the same keys does not make them better"
    later = replace(epoch, not_before=turning.begun + GATEWAY_KEYS_EVERY_S, gateway=gateway)
    assert not turning.after(again).after(later).excess


def test_an_epoch_that_waited_for_witnesses_longer_than_clients_take_is_made_anew(world: World) -> None:
    near = list(world.publisher._cosigners)
    alone = Publisher(world.log, world.trust, near[:1])
    with pytest.raises(TransparencyError):
        asyncio.run(alone.publish(world.contents(), world.now))
    alone._cosigners = tuple(near)
    begun = world.now
    contents = world.contents()
    world.now += 121
    late = asyncio.run(alone.publish(contents, world.now)).epoch
    assert late.not_before == int(begun) + 121
