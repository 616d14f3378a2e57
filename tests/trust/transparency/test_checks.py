"""What a client believes, and everything that it does not."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloister.trust.transparency.checks import Memory, View, believe, needed_paths
from cloister.trust.transparency.epoch import EpochBundle, LoggedEntry, encode_bundle, epoch_leaf, parse_bundle
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.note import Kind, Note, PrivateKey, cosign, parse_note
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.release import minimum_entry, release_entry
from cloister.trust.transparency.trust import Trust, encode_trust, parse_trust
from cloister.trust.transparency.witness import Witness
from cloister.types.errors import ConfigError
from tests.trust.transparency.world import World, make_evidence, make_release

replace = msgspec.structs.replace


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def refuse(world: World, bundle: EpochBundle | bytes, view: View | None = None, **fetched: bytes) -> TransparencyError:
    data = bundle if isinstance(bundle, bytes) else encode_bundle(bundle)
    view = view or View()
    with pytest.raises(TransparencyError) as caught:
        believe(data, world.trust, view, fetched or world.fetch(data, view), world.now)
    return caught.value


def test_a_client_believes_what_was_logged_and_witnessed_and_remembers_it(world: World) -> None:
    first = world.believe(world.publish().bundle)
    assert first.epoch.epoch == 1
    assert first.release == world.release
    assert first.view.size == 3
    world.now += 1800
    bundle = world.publish().bundle
    second = world.believe(bundle, first.view)
    assert second.epoch.epoch == 2
    assert second.view.size == 4
    again = believe(bundle, world.trust, second.view, {}, world.now)  # nothing new to fetch
    assert again.view == second.view


def test_a_log_that_claims_more_entries_than_can_be_read_is_refused_before_anything_is_fetched(world: World) -> None:
    bundle = parse_bundle(world.publish().bundle)
    text = f"{world.log.key.name}\n{10**15}\n{base64.b64encode(bytes(32)).decode()}\n"
    claims = replace(bundle, checkpoint=str(Note(text).sign(world.log_key)))
    with pytest.raises(TransparencyError, match="more than a client reads") as caught:
        needed_paths(encode_bundle(claims), world.trust, View())
    assert caught.value.reason is Reason.TOO_LARGE


def test_two_of_three_witnesses_are_enough_and_one_is_not(world: World) -> None:
    note = parse_note(parse_bundle(world.publish().bundle).checkpoint)
    lines = note.signatures
    assert len(lines) == 4
    bundle = parse_bundle(world.publish().bundle)
    note = parse_note(bundle.checkpoint)
    two = dataclasses.replace(note, signatures=note.signatures[:3])
    one = dataclasses.replace(note, signatures=note.signatures[:2])
    world.believe(encode_bundle(replace(bundle, checkpoint=str(two))))
    assert refuse(world, replace(bundle, checkpoint=str(one))).reason == Reason.TOO_FEW_WITNESSES
    twice = one.add(cosign(note.text, world.witness_keys[0], int(world.now) + 1))
    assert refuse(world, replace(bundle, checkpoint=str(twice))).reason == Reason.TOO_FEW_WITNESSES


def recosign(world: World, bundle: EpochBundle, time: float) -> EpochBundle:
    note = parse_note(bundle.checkpoint)
    return replace(bundle, checkpoint=str(note.add(*(cosign(note.text, key, int(time)) for key in world.witness_keys))))


def flip_proof(bundle: EpochBundle) -> EpochBundle:
    return replace(bundle, proof=(bytes(32), *bundle.proof[1:]))


def log_twice(world: World, bundle: EpochBundle) -> EpochBundle:
    """Logs another epoch of the same number right behind, and serves the first under the new checkpoint."""
    other = replace(bundle.epoch, nodes=(replace(bundle.epoch.nodes[0], capacity=9),))
    appended = world.log.append([epoch_leaf(other)])
    note = appended.note.add(*(cosign(appended.note.text, key, int(world.now)) for key in world.witness_keys))
    size = appended.checkpoint.size
    return replace(
        bundle,
        checkpoint=str(note),
        proof=world.log.prove_inclusion(bundle.index, size),
        release=replace(bundle.release, proof=world.log.prove_inclusion(bundle.release.index, size)),
    )


def log_again(world: World, bundle: EpochBundle) -> EpochBundle:
    """The same, but serves the second one, as the newest entry."""
    other = replace(bundle.epoch, nodes=(replace(bundle.epoch.nodes[0], capacity=9),))
    moved = log_twice(world, bundle)
    size = world.log.checkpoint()[0].size
    return replace(moved, epoch=other, index=size - 1, proof=world.log.prove_inclusion(size - 1, size))


TAMPERED: dict[str, tuple[Callable[[World, EpochBundle], EpochBundle], Reason]] = {
    "a node is added": (
        lambda w, b: replace(b, epoch=replace(b.epoch, nodes=(*b.epoch.nodes, replace(b.epoch.nodes[0], node_id="ff" * 32)))),
        Reason.NOT_INCLUDED,
    ),
    "a node's capacity grows": (
        lambda w, b: replace(b, epoch=replace(b.epoch, nodes=(replace(b.epoch.nodes[0], capacity=1000),))),
        Reason.NOT_INCLUDED,
    ),
    "a node's keys are changed": (
        lambda w, b: replace(b, epoch=replace(b.epoch, nodes=(replace(b.epoch.nodes[0], keys=b"mine"),))),
        Reason.NOT_INCLUDED,
    ),
    "an issuer's key marks the client": (
        lambda w, b: replace(b, epoch=replace(b.epoch, issuers=(replace(b.epoch.issuers[0], token_key=b"for you"),))),
        Reason.NOT_INCLUDED,
    ),
    "the epoch is made to last": (
        lambda w, b: replace(b, epoch=replace(b.epoch, not_before=b.epoch.not_before + 60)),
        Reason.NOT_INCLUDED,
    ),
    "the proof is changed": (lambda w, b: flip_proof(b), Reason.NOT_INCLUDED),
    "the index is another one": (lambda w, b: replace(b, index=0), Reason.NOT_INCLUDED),
    "the release is taken from elsewhere": (
        lambda w, b: replace(b, release=LoggedEntry(b.release.entry + b" ", b.release.index, b.release.proof)),
        Reason.NOT_INCLUDED,
    ),
    "the checkpoint is another size": (
        lambda w, b: replace(b, checkpoint=b.checkpoint.replace("\n3\n", "\n4\n")),
        Reason.BAD_LOG_SIGNATURE,
    ),
    "the log's signature is missing": (
        lambda w, b: replace(b, checkpoint=b.checkpoint.replace("— log.example", "— fog.example")),
        Reason.BAD_LOG_SIGNATURE,
    ),
    "a cosignature is false": (lambda w, b: recosign_with_another_key(w, b), Reason.BAD_SIGNATURE),
    "the checkpoint is old": (lambda w, b: recosign(w, b, w.now - 24 * 3600 - 1), Reason.STALE_CHECKPOINT),
    "the checkpoint is of tomorrow": (lambda w, b: recosign(w, b, w.now + 24 * 3600), Reason.FUTURE_CHECKPOINT),
    "another epoch was logged behind it": (log_twice, Reason.NOT_NEWEST),
    "two epochs of one number were logged": (log_again, Reason.OUT_OF_ORDER),
}


def recosign_with_another_key(world: World, bundle: EpochBundle) -> EpochBundle:
    note = parse_note(bundle.checkpoint)
    line = cosign(note.text, PrivateKey.generate("x", Kind.COSIGNATURE), int(world.now))
    mine = world.witness_keys[0].public
    return replace(bundle, checkpoint=str(note.add(dataclasses.replace(line, name=mine.name, key_id=mine.key_id))))


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_refused_with_its_reason(world: World, name: str) -> None:
    tamper, reason = TAMPERED[name]
    bundle = parse_bundle(world.publish().bundle)
    world.believe(encode_bundle(bundle))
    tampered = tamper(world, bundle)
    assert tampered != bundle
    assert refuse(world, tampered).reason == reason


def test_an_epoch_is_believed_within_its_hour_only(world: World) -> None:
    bundle = world.publish().bundle
    world.now += 3599
    world.believe(bundle)
    world.now += 1
    assert refuse(world, bundle).reason == Reason.EXPIRED
    early = asyncio.run(world.publisher.publish(world.contents(), world.now + 600)).bundle
    assert refuse(world, early).reason == Reason.NOT_YET_VALID
    world.now += 300
    world.believe(early)


def test_a_log_that_shows_each_client_its_own_tree_is_refused_with_both_checkpoints_as_proof(
    world: World, tmp_path: Path
) -> None:
    """The log's key is the operator's, and even the witnesses help: who saw the one tree does not believe the other."""
    view = world.believe(world.publish().bundle).view
    other = World(tmp_path / "other", log_key=world.log_key, release_key=world.release_key, witness_keys=world.witness_keys)
    forged = other.publish(evidence=(make_evidence(world.release, name="captured"),)).bundle
    other.believe(forged)
    error = refuse(world, forged, view)
    assert error.reason == Reason.SPLIT_VIEW
    assert error.evidence == (view.checkpoint, parse_bundle(forged).checkpoint)
    assert all("\n3\n" in checkpoint for checkpoint in error.evidence)
    longer = other.publish().bundle
    fetched = other.fetch(longer, view)
    assert refuse(world, longer, view, **fetched).reason == Reason.NOT_CONSISTENT


def test_honest_witnesses_do_not_let_a_second_tree_come_to_be(world: World, tmp_path: Path) -> None:
    world.publish()
    other = World(tmp_path / "other", log_key=world.log_key, release_key=world.release_key, witness_keys=world.witness_keys)
    other.witnesses = world.witnesses
    other.publisher = other.make_publisher(other.log)
    with pytest.raises(TransparencyError) as caught:
        other.publish()
    assert caught.value.reason == Reason.TOO_FEW_WITNESSES


def test_a_log_that_was_rolled_back_is_refused(world: World) -> None:
    old = world.publish().bundle
    view = world.believe(world.publish().bundle).view
    assert refuse(world, old, view).reason == Reason.ROLLED_BACK


def test_entries_that_are_held_back_or_changed_on_their_way_are_refused(world: World) -> None:
    bundle = world.publish().bundle
    ((path, data),) = world.fetch(bundle, View()).items()
    assert needed_paths(bundle, world.trust, View()) == [path]
    assert refuse(world, bundle, None, x=b"").reason == Reason.NOT_CONSISTENT
    assert refuse(world, bundle, None, **{path: data.replace(b"0.1.0", b"0.1.1")}).reason == Reason.NOT_CONSISTENT
    assert refuse(world, bundle, None, **{path: data[:-1]}).reason == Reason.MALFORMED


def test_a_release_that_says_nothing_of_settings_is_refused(world: World) -> None:
    """Its nodes could be set to anything, and a client would say that the release is proved."""
    world.release = msgspec.structs.replace(make_release(2), configuration={})
    world.log_release(world.release)
    found = refuse(world, parse_bundle(world.publish().bundle))
    assert found.reason == Reason.WRONG_RELEASE
    assert "could be set to anything" in found.message


def test_a_revoked_release_is_refused_and_a_revocation_cannot_be_hidden(world: World) -> None:
    before = parse_bundle(world.publish().bundle)
    world.log_minimum(2)
    with pytest.raises(TransparencyError, match="revoked"):
        world.publish()
    next_release = make_release(2)
    world.log_release(next_release)
    old = world.release
    world.release = next_release
    good = world.publish().bundle
    assert world.believe(good).view.minimum == 2
    newer = parse_bundle(good)
    # The gateway goes on with the old release: first it says nothing of the revocation, then it says it.
    epoch = replace(newer.epoch, epoch=newer.epoch.epoch + 1, release=old.digest)
    appended = world.log.append([epoch_leaf(epoch)])
    size = appended.checkpoint.size
    note = appended.note.add(*(cosign(appended.note.text, key, int(world.now)) for key in world.witness_keys))

    def proved(logged: LoggedEntry | None) -> LoggedEntry:
        assert logged
        return replace(logged, proof=world.log.prove_inclusion(logged.index, size))

    proof = world.log.prove_inclusion(size - 1, size)
    hidden = EpochBundle(str(note), epoch, size - 1, proof, proved(before.release), None)
    assert refuse(world, hidden).reason == Reason.HIDDEN_MINIMUM
    assert refuse(world, replace(hidden, minimum=proved(newer.minimum))).reason == Reason.REVOKED


def test_a_revocation_by_another_key_says_nothing(world: World) -> None:
    stranger = PrivateKey.generate("release.example", Kind.NOTE)
    world.log.append([minimum_entry(5, [stranger]), b"cloister minimum release v1\nnonsense"])
    assert world.believe(world.publish().bundle).view.minimum == 0


def test_a_release_that_is_not_the_epochs_or_not_signed_is_refused(world: World) -> None:
    world.log_release(make_release(2))
    stranger = PrivateKey.generate("release.example", Kind.NOTE)
    world.log.append([release_entry(make_release(3), source={}, builder="urn:x", keys=[stranger])])
    bundle = parse_bundle(world.publish().bundle)
    size = bundle.index + 1

    def logged(index: int) -> LoggedEntry:
        return LoggedEntry(world.log.entries(index, index + 1, size)[0], index, world.log.prove_inclusion(index, size))

    assert refuse(world, replace(bundle, release=logged(2))).reason == Reason.WRONG_RELEASE
    assert refuse(world, replace(bundle, release=logged(3))).reason == Reason.BAD_SIGNATURE
    with pytest.raises(TransparencyError, match="no release"):
        world.publish(release=make_release(3).digest)


def test_a_profile_that_the_client_does_not_take_is_refused(world: World) -> None:
    world.release = make_release(2, "open")
    world.log_release(world.release)
    bundle = world.publish().bundle
    assert refuse(world, bundle).reason == Reason.UNKNOWN_PROFILE
    world.believe(bundle, trust=dataclasses.replace(world.trust, profiles=frozenset({"open"})))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"{" * 5000, b" " * 300_000])
def test_what_is_no_bundle_is_refused(world: World, data: bytes) -> None:
    assert refuse(world, data, None, x=b"").reason in (Reason.MALFORMED, Reason.TOO_LARGE)


def test_a_bundle_has_one_form(world: World) -> None:
    data = world.publish().bundle
    assert encode_bundle(parse_bundle(data)) == data
    spaced = json.dumps(json.loads(data), sort_keys=True).encode()
    assert refuse(world, spaced, None, x=b"").reason == Reason.NOT_CANONICAL


def test_what_was_seen_is_remembered_on_disk_and_only_moves_forward(world: World, tmp_path: Path) -> None:
    memory = Memory(tmp_path / "client" / "view.json")
    assert memory.load() == View()
    first = world.believe(world.publish().bundle).view
    second = world.believe(world.publish().bundle, first).view
    assert memory.save(second, View())
    assert not memory.save(first, View())
    assert Memory(memory.path).load() == second
    assert memory.path.stat().st_mode & 0o077 == 0
    memory.path.write_bytes(b"{}}")
    with pytest.raises(ConfigError, match="remove it"):
        memory.load()


def test_a_client_that_was_away_for_300_epochs_reads_them_all(world: World) -> None:
    view = world.believe(world.publish().bundle).view
    epoch = parse_bundle(world.publish().bundle).epoch
    world.log.append([epoch_leaf(replace(epoch, epoch=number)) for number in range(3, 303)])
    bundle = world.publish().bundle
    assert len(needed_paths(bundle, world.trust, view)) == 2
    believed = world.believe(bundle, view)
    assert (believed.epoch.epoch, believed.view.size) == (303, 305)


def broken_trusts(trust: Trust) -> Iterator[dict[str, Any]]:
    twin = PrivateKey.generate("twin", Kind.COSIGNATURE)
    twins = (dataclasses.replace(twin.public, name="a"), dataclasses.replace(twin.public, name="b"))
    yield {"witnesses": twins}
    yield {"witnesses": trust.witnesses[:1]}
    yield {"threshold": 1}
    yield {"threshold": 4}
    yield {"releases": ()}
    yield {"log": trust.witnesses[0]}
    yield {"max_age_s": 25 * 3600.0}


def test_trust_that_would_protect_nobody_is_refused(world: World) -> None:
    assert parse_trust(encode_trust(world.trust)) == world.trust
    for change in broken_trusts(world.trust):
        with pytest.raises(ConfigError):
            dataclasses.replace(world.trust, **change)
    for data in (b"", b"{}", encode_trust(world.trust).replace(b"log.example+", b"log.example+0")):
        with pytest.raises(ConfigError, match="trust file"):
            parse_trust(data)


def test_a_witness_and_a_log_of_other_keys_are_not_believed(world: World, tmp_path: Path) -> None:
    bundle = world.publish().bundle
    other = World(tmp_path / "other")
    assert isinstance(other.log, Log)
    assert isinstance(other.witnesses[0], Witness)
    with pytest.raises(TransparencyError) as caught:
        believe(bundle, other.trust, View(), world.fetch(bundle, View()), world.now)
    assert caught.value.reason == Reason.BAD_LOG_SIGNATURE
