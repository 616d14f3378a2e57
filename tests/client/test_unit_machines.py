"""A node whose unit has further machines, in an epoch: a client verifies each machine before it sends, and says so."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from cloister.client.limits import Limits
from cloister.client.node_verification import refuse_shared_chips
from cloister.trust.attestation import Evidence, Findings, Outcome, read_evidence
from cloister.trust.attestation.unit import member_extra
from cloister.trust.transparency.membership import sign_member
from tests.client.test_membership import snp
from tests.client.test_verify_node import HARDENING, ServedCloud, only_node, sign, slugs
from tests.trust.attestation.test_verify import STATEMENT
from tests.trust.transparency.world import member_key

MEASURED = {**HARDENING, "engine.seccomp": "applied: on"}
STATED = STATEMENT.encode()
LEADER, FIRST, SECOND = (bytes([number]) * 32 for number in (1, 2, 3))


class UnitCloud(ServedCloud):
    """A cloud whose one node is a unit of three machines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        configuration = {**self.release.configuration, "setting router": '"capacity_random"'}
        self.release = msgspec.structs.replace(self.release, configuration=configuration)
        self.log_release(self.release)

    def machine(self, key: bytes, **changes: object) -> bytes:
        return self.state(unit_key=key, keys=b"\x00\x04" + key, **{"hardening": MEASURED, **changes})

    def leader(self, *members: bytes, **changes: object) -> bytes:
        """Evidence of the node, which lists the first and the second machine."""
        listed = tuple(sorted(hashlib.sha256(key).hexdigest() for key in (FIRST, SECOND)))
        alone = read_evidence(self.state(unit_key=LEADER, unit_members=listed, hardening=MEASURED, **changes))
        extra = {member_extra(number): member for number, member in enumerate(members, 1)}
        return msgspec.structs.replace(alone, extra={**alone.extra, **extra}).encode()


@pytest.fixture
def cloud(tmp_path: Path) -> UnitCloud:
    return UnitCloud(tmp_path)


def failed(cloud: UnitCloud, evidence: bytes) -> list[str]:
    cloud.serve(evidence)
    return slugs(only_node(cloud.check()), Outcome.FAILED)


def test_every_machine_of_a_unit_is_verified_before_anything_is_sent(cloud: UnitCloud):
    cloud.serve(cloud.leader(cloud.machine(FIRST), cloud.machine(SECOND)))
    checked = cloud.check()
    assert checked.accepted, [step.text for step in only_node(checked).of(Outcome.FAILED)]
    told = {
        slug: [step.text for step in only_node(checked) if step.slug == slug] for slug in ("unit-member", "member", "nonce")
    }
    assert [len(texts) for texts in told.values()] == [2, 3, 3]
    assert "of machine 2 of its unit" in told["member"][2]
    (unit,) = [step.text for step in only_node(checked) if step.slug == "unit"]
    assert "1 engine and of as many on each of 2 further machines" in unit


def test_a_machine_that_the_node_lists_and_does_not_show_is_refused(cloud: UnitCloud):
    assert failed(cloud, cloud.leader(cloud.machine(FIRST))) == ["unit-member"]


def test_an_attested_machine_of_somebody_else_is_refused(cloud: UnitCloud):
    """It runs the release on good hardware, and no member of the cloud signed for it, or another one."""
    stranger = read_evidence(cloud.machine(SECOND))
    unsigned = msgspec.structs.replace(stranger, extra={})
    for foreign in (unsigned, sign_member(member_key("b"), unsigned)):
        assert failed(cloud, cloud.leader(cloud.machine(FIRST), foreign.encode())) == ["member"]


def test_a_machine_whose_evidence_is_older_than_any_checkpoint_is_refused(cloud: UnitCloud):
    """Its host may have set its clock forward, long ago, and have kept what the hardware signed then."""
    assert failed(cloud, cloud.leader(cloud.machine(FIRST), cloud.machine(SECOND, checkpoint=""))) == ["nonce"]
    forged = cloud.machine(SECOND, checkpoint="log.example\n1\nAAAA\n")
    assert failed(cloud, cloud.leader(cloud.machine(FIRST), forged)) == ["nonce"]


def test_a_machine_whose_evidence_ends_before_the_epoch_is_refused(cloud: UnitCloud):
    early = cloud.machine(SECOND, not_after=int(cloud.now) + 1800)
    assert failed(cloud, cloud.leader(cloud.machine(FIRST), early)) == ["unit-member"]


def test_a_machine_of_another_release_is_refused(cloud: UnitCloud):
    other = sign(read_evidence(cloud.machine(SECOND, release="1a" * 32)))
    assert failed(cloud, cloud.leader(cloud.machine(FIRST), other)) == ["unit-member"]


def test_a_machine_on_the_chip_of_another_node_is_refused_with_its_unit():
    def with_member(leader: Evidence, member: Evidence) -> Evidence:
        listed = msgspec.structs.replace(member, statement=STATED)
        return msgspec.structs.replace(leader, extra={member_extra(1): listed.encode()})

    here, there, elsewhere = (snp(chip=bytes([number]) * 64) for number in (1, 2, 3))
    unit = with_member(here, there)
    assert judge_chips(unit, elsewhere) == [[], []]
    assert judge_chips(unit, there) == [["chip"], ["chip"]]
    assert judge_chips(unit, with_member(elsewhere, there)) == [["chip"], ["chip"]]
    masked = with_member(here, snp(masked=True))
    assert judge_chips(masked) == [["chip"]], "it could be the chip of its own leader"
    assert judge_chips(masked, accept_masked_chips=True) == [[]]


def judge_chips(*evidence: Evidence, **limits: bool) -> list[list[str]]:
    documents = {str(number): msgspec.structs.replace(one, statement=STATED).encode() for number, one in enumerate(evidence)}
    findings = {name: Findings() for name in documents}
    for found in findings.values():
        found.prove("report-signature", "the chip signed it")
    refuse_shared_chips(findings, documents, Limits(**limits))
    return [[step.slug for step in found.of(Outcome.FAILED)] for found in findings.values()]
