"""The whole check: a statement counts for what vouches for it, and a stale, downgraded or foreign one is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cloister.trust.attestation import AttestationPolicy, Evidence, Findings, Outcome, SnpFloor, Statement
from cloister.trust.attestation.nvidia import chain_extra, report_extra
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import VERIFIERS, verify_evidence
from tests import attestation_vectors as real
from tests.snp_platform import NOW, SnpPlatform, make_report

STATEMENT = Statement(
    release="0a" * 32,
    model="0b" * 32,
    profile="private",
    profile_digest="0c" * 32,
    configuration={"setting quant": '"none"'},
    hardening={"front.seccomp": "applied: on", "engine.seccomp": "applied: on", "host": "missing: host not excluded"},
    keys=b"\x00\x04keys",
    capacity=1,
    not_before=int(NOW) - 600,
    not_after=int(NOW) + 3000,
)
POLICY = AttestationPolicy(
    releases=frozenset({"0a" * 32}),
    models=frozenset({"0b" * 32}),
    profile_digests=frozenset({"0c" * 32}),
    configuration={"setting quant": '"none"'},
    hardening=frozenset({"seccomp"}),
    measurements={"sev-snp": frozenset({"4d" * 48})},
    snp_floor=SnpFloor(boot_loader=3, snp=23, microcode=219),
)
SOFTWARE = replace(POLICY, accept_software=True)


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def verify(policy: AttestationPolicy = SOFTWARE, now: float = NOW, **changes: object) -> Findings:
    statement = msgspec.structs.replace(STATEMENT, **changes)
    return verify_evidence(SoftwareAttester().attest(statement.encode()), policy, now)


def test_software_is_refused_unless_it_is_asked_for():
    findings = verify(POLICY)
    assert failures(findings) == ["hardware"]
    assert "--accept-software" in findings.of(Outcome.FAILED)[0].text


def test_software_that_was_asked_for_is_accepted_and_said_to_be_not_proved():
    findings = verify()
    assert findings.accepted
    assert not findings.proved
    assert findings.of(Outcome.NOT_PROVED)[0].text.startswith("NOT PROVED")
    assert "whose owner can read what it is sent" in findings.of(Outcome.NOT_PROVED)[0].text


def test_on_hardware_every_step_is_proved():
    platform = SnpPlatform()
    statement = STATEMENT.encode()
    data = Evidence("sev-snp", statement, b"").report_data
    evidence = Evidence("sev-snp", statement, platform.sign(make_report(data)), platform.extra)
    trusted = {**VERIFIERS, "sev-snp": SnpVerifier(platform.roots)}
    findings = verify_evidence(evidence, POLICY, NOW, verifiers=trusted)
    assert findings.accepted
    assert findings.proved
    assert failures(verify_evidence(evidence, POLICY, NOW)) == ["chain-root"], "AMD did not make that platform"
    other = Evidence("sev-snp", msgspec.structs.replace(STATEMENT, capacity=2).encode(), evidence.report, evidence.extra)
    assert failures(verify_evidence(other, POLICY, NOW, verifiers=trusted)) == ["report-data"]


@pytest.mark.parametrize("where", range(0, 96, 5))
def test_altered_software_evidence_is_refused(where: int):
    evidence = SoftwareAttester().attest(STATEMENT.encode())
    report = bytearray(evidence.report)
    report[where] ^= 1
    assert failures(verify_evidence(msgspec.structs.replace(evidence, report=bytes(report)), SOFTWARE, NOW)) != []


def test_software_evidence_does_not_fit_another_statement():
    evidence = SoftwareAttester().attest(STATEMENT.encode())
    other = msgspec.structs.replace(STATEMENT, capacity=999_999).encode()
    assert failures(verify_evidence(msgspec.structs.replace(evidence, statement=other), SOFTWARE, NOW)) == ["report-signature"]


REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "downgrade to open": ({"profile": "open"}, "profile"),
    "downgrade to team": ({"profile": "team"}, "profile"),
    "the name of private with the rules of another": ({"profile_digest": "1c" * 32}, "profile-digest"),
    "another release": ({"release": "1a" * 32}, "release"),
    "another model": ({"model": "1b" * 32}, "model"),
    "no hardening": ({"hardening": {}}, "hardening"),
    "a measure missing in one process": (
        {"hardening": {"front.seccomp": "applied: on", "engine.seccomp": "missing: no filter"}},
        "hardening",
    ),
    "a measure that was not asked for missing": (
        {"hardening": {"front.seccomp": "applied: on", "front.swap": "missing: there is swap"}},
        "hardening",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_each_wrong_thing_in_a_statement_is_refused_for_its_reason(case: str):
    changes, slug = REFUSALS[case]
    assert failures(verify(**changes)) == [slug]


def test_a_stale_statement_is_refused_to_the_second():
    assert verify(now=STATEMENT.not_after - 1).accepted
    assert failures(verify(now=STATEMENT.not_after)) == ["expiry"]


def test_a_statement_of_the_future_is_refused_beyond_what_clocks_may_differ():
    assert verify(now=STATEMENT.not_before - 300).accepted
    assert failures(verify(now=STATEMENT.not_before - 301)) == ["expiry"]


@pytest.mark.parametrize("field", ["releases", "profile_digests"])
def test_private_refuses_what_nobody_published(field: str):
    slug = {"releases": "release", "profile_digests": "profile-digest"}[field]
    assert failures(verify(replace(SOFTWARE, **{field: frozenset()}))) == [slug]
    relaxed = verify(replace(SOFTWARE, profile="team", **{field: frozenset()}), profile="team")
    assert relaxed.accepted
    assert slug in [step.slug for step in relaxed.of(Outcome.NOT_PROVED)]


def test_another_kind_than_accepted_is_refused():
    evidence = Evidence("sgx", STATEMENT.encode(), b"")
    assert failures(verify_evidence(evidence, POLICY, NOW)) == ["kind"]
    assert failures(verify_evidence(evidence, replace(POLICY, kinds=frozenset({"sgx"})), NOW)) == ["kind"]
    tdx_only = replace(POLICY, kinds=frozenset({"tdx"}))
    assert failures(verify_evidence(Evidence("sev-snp", STATEMENT.encode(), b""), tdx_only, NOW)) == ["kind"]


def test_a_statement_that_is_none_is_refused():
    assert failures(verify_evidence(Evidence("software", b"{}", b""), SOFTWARE, NOW)) == ["statement"]


def test_a_gpu_of_another_node_is_refused():
    report, chain, _ = real.gpu_evidence()
    evidence = SoftwareAttester().attest(STATEMENT.encode())
    with_gpu = msgspec.structs.replace(evidence, extra={report_extra(0): report, chain_extra(0): chain})
    assert failures(verify_evidence(with_gpu, SOFTWARE, NOW)) == ["gpu-nonce", "gpu-revocation", "gpu-measurement"]


def test_a_text_never_has_what_the_node_wrote_where_it_was_refused():
    findings = verify_evidence(Evidence("software", b'{"type":"canary"}', b""), SOFTWARE, NOW)
    assert "canary" not in "".join(step.text for step in findings)
