"""The other machines of a node's unit, as clients see them: each has evidence of its own and is verified as the node is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from cloister.trust.attestation import Evidence, EvidenceError, Findings, Outcome, SnpFloor, Statement
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.tdx import TdxVerifier
from cloister.trust.attestation.unit import member_extra, read_members
from cloister.trust.attestation.verify import VERIFIERS, verify_evidence
from tests.snp_platform import CHIP_ID, NOW, SnpPlatform, make_report
from tests.trust.attestation.test_verify import POLICY, SOFTWARE, STATEMENT, failures

CONFIGURATION = {**STATEMENT.configuration, "setting router": '"capacity_random"', "setting replicas": "1"}
ACCEPTING = replace(SOFTWARE, configuration=CONFIGURATION)
LEADER, FIRST, SECOND = (bytes([number]) * 32 for number in (1, 2, 3))


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def state(key: bytes, *members: bytes, **changes: object) -> Statement:
    listed = tuple(sorted(map(digest, members)))
    made = msgspec.structs.replace(STATEMENT, configuration=CONFIGURATION, unit_key=key, unit_members=listed)
    return msgspec.structs.replace(made, **changes)


def attest(statement: Statement) -> Evidence:
    return SoftwareAttester().attest(statement.encode())


def with_members(leader: Evidence, *members: Evidence) -> Evidence:
    extra = {member_extra(number): member.encode() for number, member in enumerate(members, 1)}
    return msgspec.structs.replace(leader, extra={**leader.extra, **extra})


def verify(*machines: Evidence) -> Findings:
    return verify_evidence(with_members(*machines), ACCEPTING, NOW)


def unit_of(findings: Findings) -> str:
    return "; ".join(step.text for step in findings if step.slug == "unit-member")


def test_every_machine_of_a_unit_is_said_to_be_verified():
    findings = verify(attest(state(LEADER, FIRST, SECOND)), attest(state(FIRST)), attest(state(SECOND)))
    assert findings.accepted
    assert [step.outcome for step in findings if step.slug == "unit-member"] == [Outcome.NOT_PROVED] * 2
    assert "machine 1 of the node's unit is verified as the node is" in unit_of(findings)
    assert "NOT PROVED: no hardware vouches" in unit_of(findings), "software proves nothing of a member either"


def test_a_node_alone_is_judged_as_before():
    assert not [step for step in verify_evidence(attest(STATEMENT), SOFTWARE, NOW) if step.slug.startswith("unit")]
    assert verify(attest(state(LEADER))).accepted, "a member, or a leader whose members are all lost"


CHANGED: Mapping[str, dict[str, object]] = {
    "another release": {"release": "1a" * 32},
    "another model": {"model": "1b" * 32},
    "another profile": {"profile": "open"},
    "other rules": {"profile_digest": "1c" * 32},
    "another setting": {"configuration": {**CONFIGURATION, "setting quant": '"int8"'}},
    "less hardening": {"hardening": {"front.seccomp": "applied: on", "engine.seccomp": "missing: no filter"}},
    "no hardening": {"hardening": {}},
    "ended": {"not_before": int(NOW) - 3600, "not_after": int(NOW)},
    "not yet valid": {"not_before": int(NOW) + 301, "not_after": int(NOW) + 3600},
    "ends before the node's": {"not_after": STATEMENT.not_after - 1},
    "leads a unit": {"unit_members": ("0d" * 32,)},
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_client_refuses_a_unit_with_a_machine_that_is_not_what_the_node_is(case: str):
    findings = verify(attest(state(LEADER, FIRST, SECOND)), attest(state(FIRST)), attest(state(SECOND, **CHANGED[case])))
    assert failures(findings) == ["unit-member"]
    assert "machine 2 of the node's unit is refused" in unit_of(findings)


def test_machines_that_are_all_something_else_are_refused_with_their_leader():
    other: dict[str, object] = {"model": "1b" * 32}
    findings = verify(attest(state(LEADER, FIRST, **other)), attest(state(FIRST, **other)))
    assert "model" in failures(findings)


def test_a_machine_of_another_model_is_refused_where_the_client_takes_any():
    findings = verify_evidence(
        with_members(attest(state(LEADER, FIRST)), attest(state(FIRST, model="1b" * 32))),
        replace(ACCEPTING, models=frozenset()),
        NOW,
    )
    assert failures(findings) == ["unit-member"]
    assert "its model is not the node's" in unit_of(findings)


LISTED = state(LEADER, FIRST, SECOND)


@pytest.mark.parametrize(
    "machines",
    [
        (LISTED,),
        (LISTED, state(FIRST)),
        (LISTED, state(FIRST), state(FIRST)),
        (LISTED, state(FIRST), state(b"\x09" * 32)),
        (LISTED, state(FIRST), state(SECOND), state(b"\x09" * 32)),
        (LISTED, state(FIRST), msgspec.structs.replace(STATEMENT, configuration=CONFIGURATION)),
        (state(LEADER), state(FIRST)),
        (msgspec.structs.replace(STATEMENT, configuration=CONFIGURATION), state(FIRST)),
    ],
    ids=["none", "one left out", "one twice", "exchanged", "added", "no key", "not listed", "no unit"],
)
def test_members_that_the_statement_does_not_list_and_listed_ones_that_are_missing_are_refused(machines: tuple[Statement, ...]):
    """The statement is what the processor signed; what comes beside it anybody on the way may have changed."""
    findings = verify(*map(attest, machines))
    assert failures(findings) == ["unit-member"]
    assert "added, left out or exchanged" in unit_of(findings)


def test_a_member_that_brings_members_and_gaps_in_their_numbers_are_refused():
    for member in (state(FIRST), state(FIRST, SECOND)):  # the second is a whole unit, by itself
        nested = with_members(attest(member), attest(state(SECOND)))
        assert failures(verify(attest(state(LEADER, FIRST)), nested)) == ["unit-member"]
    leader = attest(state(LEADER, FIRST))
    gap = msgspec.structs.replace(leader, extra={member_extra(2): attest(state(FIRST)).encode()})
    assert failures(verify_evidence(gap, ACCEPTING, NOW)) == ["unit-member"]
    for broken in (b"", b"{}", attest(state(FIRST)).encode() + b" "):
        bad = msgspec.structs.replace(leader, extra={member_extra(1): broken})
        assert failures(verify_evidence(bad, ACCEPTING, NOW)) == ["unit-member"]
        with pytest.raises(EvidenceError):
            read_members(bad)


def test_a_members_evidence_that_was_altered_is_refused():
    member = attest(state(FIRST))
    report = bytearray(member.report)
    report[50] ^= 1
    findings = verify(attest(state(LEADER, FIRST)), msgspec.structs.replace(member, report=bytes(report)))
    assert failures(findings) == ["unit-member"]


def test_a_unit_of_machines_with_one_engine_each_is_drawn_or_refused():
    configuration = {**CONFIGURATION, "setting router": '"least_load"'}
    machines = (state(LEADER, FIRST, configuration=configuration), state(FIRST, configuration=configuration))
    findings = verify_evidence(with_members(*map(attest, machines)), replace(ACCEPTING, configuration=configuration), NOW)
    assert failures(findings) == ["unit"]


# on simulated hardware


def on_chip(platform: SnpPlatform, statement: Statement, chip_id: bytes) -> Evidence:
    evidence = Evidence("sev-snp", statement.encode(), b"", platform.extra)
    report = make_report(evidence.report_data, chip_id=chip_id)
    return msgspec.structs.replace(evidence, report=platform.sign(report))


def test_two_machines_on_one_chip_are_refused_and_on_two_proved():
    one, two = SnpPlatform(), SnpPlatform(chip_id=bytes(reversed(CHIP_ID)))
    trusted = {**VERIFIERS, "sev-snp": SnpVerifier(one.roots | two.roots)}
    policy = replace(POLICY, configuration=CONFIGURATION, snp_floor=SnpFloor())
    leader = on_chip(one, state(LEADER, FIRST), CHIP_ID)
    member = on_chip(two, state(FIRST), two.chip_id)
    findings = verify_evidence(with_members(leader, member), policy, NOW, verifiers=trusted)
    assert findings.proved, [step for step in findings if step.outcome is not Outcome.PROVED]
    assert "evidence of kind sev-snp" in unit_of(findings)
    same = on_chip(one, state(FIRST), CHIP_ID)
    assert failures(verify_evidence(with_members(leader, same), policy, NOW, verifiers=trusted)) == ["chip"]


def test_software_beside_hardware_is_refused_and_never_proved():
    platform = SnpPlatform()
    trusted = {**VERIFIERS, "sev-snp": SnpVerifier(platform.roots), "tdx": TdxVerifier()}
    leader = on_chip(platform, state(LEADER, FIRST), CHIP_ID)
    mixed = with_members(leader, attest(state(FIRST)))
    policy = replace(POLICY, configuration=CONFIGURATION)
    assert failures(verify_evidence(mixed, policy, NOW, verifiers=trusted)) == ["unit-member"]
    lenient = verify_evidence(mixed, replace(policy, accept_software=True), NOW, verifiers=trusted)
    assert lenient.accepted
    assert not lenient.proved


def test_a_members_other_measurement_is_refused():
    one, two = SnpPlatform(), SnpPlatform(chip_id=bytes(reversed(CHIP_ID)))
    trusted = {**VERIFIERS, "sev-snp": SnpVerifier(one.roots | two.roots)}
    policy = replace(POLICY, configuration=CONFIGURATION)
    leader = on_chip(one, state(LEADER, FIRST), CHIP_ID)
    evidence = Evidence("sev-snp", state(FIRST).encode(), b"", two.extra)
    report = make_report(evidence.report_data, chip_id=two.chip_id, measurement=b"\x4e" * 48)
    member = msgspec.structs.replace(evidence, report=two.sign(report))
    findings = verify_evidence(with_members(leader, member), policy, NOW, verifiers=trusted)
    assert failures(findings) == ["unit-member"]
    assert "measurement" in unit_of(findings).lower()
