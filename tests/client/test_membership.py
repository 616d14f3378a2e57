"""Who is in the cloud, and with what capacity: what a client refuses, and how its user takes a change that is right."""

from __future__ import annotations

import asyncio
import hashlib
import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from cloister.cli.options import LEAST_PRESENT, MOST_SHARE
from cloister.client import AsyncSealedTransport, EpochRefusedError, Limits, Session
from cloister.client.limits import LATE_S, hold_to_limits
from cloister.client.monitoring import MonitorState, load_state
from cloister.client.node_verification import judge_node, refuse_shared_chips
from cloister.client.proxy import tell_epoch
from cloister.client.routing_audit.records import Spell
from cloister.client.shared_view import state_file
from cloister.trust.attestation import AttestationPolicy, Evidence, Findings, Outcome
from cloister.trust.attestation.cbor import encode_text
from cloister.trust.attestation.verify import name_chips
from cloister.trust.transparency.checks import Memory, View
from cloister.trust.transparency.epoch import NodeEntry, encode_bundle, parse_bundle
from cloister.trust.transparency.membership import DAY_S, MOST_HELD, NOTICE_S, Member, sign_member
from cloister.trust.transparency.note import cosign, parse_note
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.replay import Course
from cloister.types.errors import ConfigError
from tests import attestation_vectors as real
from tests.client.world import NODES, World, ask_once
from tests.nitro_platform import NitroPlatform
from tests.trust.transparency import world as transparency
from tests.trust.transparency.test_backdating import replay
from tests.trust.transparency.world import make_evidence, member_key

THREE = Spell({"a": 1, "b": 1, "c": 1})


def refusal(world: World, session: Session) -> EpochRefusedError:
    sent = world.wire.sent
    with pytest.raises(EpochRefusedError) as caught:
        ask_once(world, session)
    assert world.wire.sent == sent, "nothing was sent"
    return caught.value


def test_a_gateway_that_is_restarted_with_one_node_of_two_is_sent_nothing(world: World) -> None:
    session = world.session()
    ask_once(world, session)
    asyncio.run(world.cloud.enter(Spell({"a": 1}), signed=False))
    for each in (session, world.session()):  # who comes for the first time refuses it too
        error = refusal(world, each)
        assert error.reason == Reason.TOO_FEW_PRESENT
        assert "leaves out b" in error.message
        assert "--least-present" in error.message


def test_a_node_that_the_gateway_leaves_out_is_drawn_all_the_same(directory: Path) -> None:
    world = World(directory / "cloud")
    asyncio.run(world.cloud.enter(THREE))
    asyncio.run(world.cloud.enter(Spell({"a": 1, "b": 1}), signed=False))
    names = [member.name for member in sorted_members(world)]
    away = names.index("c")
    draws = iter([away, away, names.index("a")])
    session = world.session(below=lambda capacity: next(draws) if capacity == 3 else 0)
    response = ask_once(world, session)
    assert [world.cloud.names.get(one, one) for one in response.extensions["cloister"]["drawn"]] == ["c", "c", "a"]
    assert world.wire.sent == 1, "no token is spent on a node that is not there"
    assert any("No node of c, drawn with chance 1/3" in line for line in tell_epoch(session))
    world.cloud.close()


def sorted_members(world: World) -> list[Member]:
    return list(world.cloud.publisher._history.roll.current.members)


def test_a_node_with_more_than_half_of_the_capacity_is_refused_unless_the_user_takes_it(directory: Path) -> None:
    world = World(directory / "cloud")
    asyncio.run(world.cloud.enter(Spell({"a": 3, "b": 1})))
    error = refusal(world, world.session())
    assert error.reason == Reason.SHARE_TOO_LARGE
    assert "a has 75%" in error.message
    assert ask_once(world, world.session(limits=Limits(most_share=0.75))).status_code == 200
    world.cloud.close()


def test_nodes_that_are_all_replaced_within_a_day_are_refused_until_the_user_accepts(world: World, directory: Path) -> None:
    state = directory / "seen.json"

    def session(**limits: int) -> Session:
        return world.session(state=state, remember=True, limits=Limits(**limits))

    ask_once(world, session())
    asyncio.run(world.cloud.enter(Spell({"x": 1, "y": 1})))
    error = refusal(world, session())
    assert error.reason == Reason.MEMBERSHIP_CHANGED
    assert "keeps 0%" in error.message
    assert "--accept-membership 2" in error.message
    assert ask_once(world, world.session()).status_code == 200, "who has no memory cannot tell"
    assert ask_once(world, session(accept_membership=2)).status_code == 200
    assert ask_once(world, session()).status_code == 200, "what was accepted is remembered"


def test_small_steps_do_not_add_up_unseen_within_a_day(directory: Path) -> None:
    world = World(directory / "cloud")
    steps = [{"a": 1, "b": 1, "c": 1}, {"b": 1, "c": 1, "d": 1}, {"c": 1, "d": 1, "e": 1}]
    session = world.session()
    for capacities in steps[:2]:
        asyncio.run(world.cloud.enter(Spell(capacities)))
        assert ask_once(world, session).status_code == 200
    asyncio.run(world.cloud.enter(Spell(steps[2])))
    assert refusal(world, session).reason == Reason.MEMBERSHIP_CHANGED
    world.cloud.close()


def test_two_steps_around_the_moment_at_which_a_day_is_over_add_up(tmp_path: Path) -> None:
    """Half of the nodes a minute before the first membership is a day old, the other half a minute after."""
    world = transparency.World(tmp_path, members={"a": 1, "b": 1})
    limits, views = Limits(least_present=0), [View()]

    def publish(member: str) -> bytes:
        return world.publish(evidence=(make_evidence(world.release, name=member, now=world.now),)).bundle

    def see(member: str, **accept: int) -> None:
        believed = world.believe(publish(member), views[-1])
        views.append(hold_to_limits(replace(limits, **accept), believed, world.trust))

    see("a")
    world.now += DAY_S - 60 - 2 * NOTICE_S
    world.log_members(2, {"a": 1, "c": 1}, after_s=2 * NOTICE_S)
    world.log_members(3, {"c": 1, "d": 1}, after_s=2 * NOTICE_S + 120)
    publish("a")
    world.now += 2 * NOTICE_S
    for _ in range(2):
        see("a")
        world.now += 60
    with pytest.raises(TransparencyError, match="in membership 1, membership 3 keeps 0%") as caught:
        see("c")
    assert caught.value.reason is Reason.MEMBERSHIP_CHANGED
    faults = [remark.text for remark in replay(world) if remark.is_fault]
    assert any("membership 3 keeps 0% of membership 1" in fault for fault in faults)
    see("c", accept_membership=3)
    assert [held.membership.number for held in views[-1].past] == [3]


def test_more_memberships_within_a_day_than_a_client_remembers_are_refused(tmp_path: Path) -> None:
    world = transparency.World(tmp_path)
    believed = world.believe(world.publish().bundle)
    view, some = View(), Limits(least_present=0)
    for number in range(1, MOST_HELD + 1):
        membership = structs.replace(believed.membership, number=number)
        view = hold_to_limits(
            some, replace(believed, membership=membership, view=structs.replace(believed.view, past=view.past)), world.trust
        )
    one_more = replace(believed, membership=structs.replace(believed.membership, number=99), view=view)
    with pytest.raises(TransparencyError, match=f"one more than the {MOST_HELD}"):
        hold_to_limits(some, one_more, world.trust)
    assert len(hold_to_limits(replace(some, accept_membership=99), one_more, world.trust).past) == 1


def test_a_state_file_that_remembers_one_membership_is_read(tmp_path: Path) -> None:
    world = transparency.World(tmp_path / "world")
    view = hold_to_limits(Limits(least_present=0), world.believe(world.publish().bundle), world.trust)
    fields = json.loads(msgspec.json.encode(view))
    (held,) = fields.pop("past")
    fields |= {"baseline": held["membership"], "baseline_s": held["since_s"]}
    (tmp_path / "seen.json").write_text(json.dumps(fields))
    assert Memory(tmp_path / "seen.json").load() == view
    state = json.loads(msgspec.json.encode(MonitorState(course=Course(past=view.past))))
    del state["course"]["past"]
    state["course"] |= {"baseline": held["membership"], "baseline_s": held["since_s"]}
    (tmp_path / "monitor.json").write_text(json.dumps(state))
    assert load_state(tmp_path / "monitor.json").course.past == view.past


def test_a_day_later_the_same_step_is_taken(directory: Path) -> None:
    world = World(directory / "cloud")
    session = world.session()
    for capacities in ({"a": 1, "b": 1, "c": 1}, {"b": 1, "c": 1, "d": 1}, {"c": 1, "d": 1, "e": 1}):
        asyncio.run(world.cloud.enter(Spell(capacities)))
        asyncio.run(world.cloud.enter(Spell(capacities)))
        prepare(world, session)
        world.cloud.time += DAY_S
        asyncio.run(world.cloud.enter(Spell(capacities)))
        prepare(world, session)
    world.cloud.close()


def prepare(world: World, session: Session) -> None:
    """The draw of a request without its token: the issuer's key of these tests does not live for days."""
    session._take_token = no_token  # type: ignore[method-assign]
    asyncio.run(prepare_once(world, session))


def no_token(epoch: object) -> Iterator[object]:
    yield from ()
    return None, None


async def prepare_once(world: World, session: Session) -> None:
    await AsyncSealedTransport(session, world.wire).prepare()


def test_epochs_in_short_succession_are_refused_and_a_rest_makes_it_good(world: World) -> None:
    session = world.session()
    ask_once(world, session)

    async def hurry() -> None:
        for _ in range(6):
            await world.cloud._publish()

    asyncio.run(hurry())
    assert refusal(world, world.session()).reason == Reason.TOO_FAST
    asyncio.run(world.cloud.enter(NODES))
    assert ask_once(world, session).status_code == 200


def test_an_epoch_that_was_made_with_a_time_in_the_past_is_refused(tmp_path: Path) -> None:
    world = transparency.World(tmp_path)
    published = world.publish().bundle
    believed = world.believe(published)
    some = Limits(least_present=0)
    hold_to_limits(some, believed, world.trust)
    world.now += LATE_S + 1
    bundle = parse_bundle(published)
    note = parse_note(bundle.checkpoint)
    again = replace(note, signatures=note.signatures[:1]).add(
        *(cosign(note.text, key, int(world.now)) for key in world.witness_keys)
    )
    late = world.believe(encode_bundle(structs.replace(bundle, checkpoint=str(again))))
    with pytest.raises(TransparencyError, match=f"cosigned {LATE_S + 1} s after it began") as caught:
        hold_to_limits(some, late, world.trust)
    assert caught.value.reason is Reason.TOO_LATE


def test_a_node_under_the_name_of_another_member_is_refused(tmp_path: Path) -> None:
    world = transparency.World(tmp_path)
    believed = world.believe(world.publish().bundle)
    document = make_evidence(world.release, name="captured")
    (honest,) = believed.epoch.nodes
    node = NodeEntry(hashlib.sha256(b"keys of captured").hexdigest(), 1, b"keys of captured", sha(document), honest.member)
    found = judge_node(node, document, believed, world.trust, AttestationPolicy(accept_software=True), world.now)
    assert "member" in {step.slug for step in found.of(Outcome.FAILED)}


def sha(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()


def judge_chips(*evidence: Evidence, **limits: bool) -> list[list[str]]:
    """The steps that fail for nodes whose evidence was verified; `limits` move those of the client."""
    documents = {str(n): one.encode() for n, one in enumerate(evidence)}
    findings = {name: Findings() for name in documents}
    for found in findings.values():
        found.prove("report-signature", "the chip signed it")
    refuse_shared_chips(findings, documents, Limits(**limits))
    return [[step.slug for step in found.of(Outcome.FAILED)] for found in findings.values()]


def snp(*, chip: bytes | None = None, masked: bool = False) -> Evidence:
    report = bytearray(real.snp_report())
    if chip is not None:
        report[0x1A0:0x1E0] = chip
    if masked:  # as firmware does it: the flag MASK_CHIP_ID, and no number
        report[0x48] |= 2
        report[0x1A0:0x1E0] = bytes(64)
    return Evidence("sev-snp", b"", bytes(report))


def nitro(module_id: str) -> Evidence:
    return Evidence("nitro", b"", NitroPlatform().document(module_id=encode_text(module_id)))


SOFTWARE = Evidence("software", b"", b"")


def test_one_chip_cannot_stand_for_two_nodes() -> None:
    other = bytes(63) + b"x"
    assert judge_chips(snp(), snp(chip=other), snp()) == [["chip"], [], ["chip"]]
    assert judge_chips(snp(), snp(chip=other)) == [[], []]


def test_nodes_whose_hosts_mask_the_chip_are_refused_beside_others_unless_the_user_accepts_it() -> None:
    masked = snp(masked=True)
    assert judge_chips(masked, masked) == [["chip"], ["chip"]]
    assert judge_chips(masked, snp()) == [["chip"], []]
    assert judge_chips(masked, SOFTWARE, SOFTWARE) == [[], [], []]
    assert judge_chips(masked, masked, accept_masked_chips=True) == [[], []]
    assert judge_chips(snp(), snp(), accept_masked_chips=True) == [["chip"], ["chip"]]


def test_two_enclaves_of_one_instance_cannot_stand_for_two_nodes() -> None:
    first, second, elsewhere = (nitro(name) for name in ("i-0a-enc01", "i-0a-enc02", "i-0b-enc01"))
    assert judge_chips(first, second, elsewhere) == [["chip"], ["chip"], []]
    assert judge_chips(first, elsewhere) == [[], []]
    assert judge_chips(nitro("-enc01"), elsewhere) == [["chip"], []], "no instance is named"


def test_a_chip_is_named_by_what_its_maker_signed() -> None:
    gpu, chain, _ = real.gpu_evidence()
    both = Evidence("tdx", b"", real.td_quote(), {"gpu-0-report": gpu, "gpu-0-chain": chain})
    assert sorted(name.split()[0] for name in name_chips(both)) == ["gpu", "tdx"]
    assert name_chips(Evidence("sev-snp", b"", real.snp_report())) == {f"sev-snp {real.snp_report()[0x1A0:0x1E0].hex()}"}
    assert name_chips(sign_member(member_key("node"), Evidence("software", b"", b""))) == frozenset()


def test_a_client_remembers_by_default_in_a_file_that_only_its_user_reads(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ask_once(world, world.session(remember=False))
    assert list(tmp_path.iterdir()) == []
    ask_once(world, world.session(remember=True))
    kept = state_file(world.cloud.trust.log).expanduser()
    assert kept.is_relative_to(tmp_path)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    asyncio.run(world.cloud.enter(Spell({"x": 1, "y": 1})))
    assert refusal(world, world.session(remember=True)).reason == Reason.MEMBERSHIP_CHANGED


def test_what_an_older_version_remembered_is_not_taken_for_a_log_without_members(tmp_path: Path) -> None:
    (tmp_path / "seen.json").write_text('{"size":7,"frontier":[],"checkpoint":"","epoch":3,"minimum":0}')
    with pytest.raises(ConfigError, match="remove it to read the log"):
        Memory(tmp_path / "seen.json").load()


def test_limits_that_are_none_are_refused_and_the_command_has_the_same() -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Limits(most_share=1.5)
    assert (Limits().least_present, Limits().most_share) == (LEAST_PRESENT, MOST_SHARE)
