"""NVIDIA GPUs: a real Hopper report is proved up to NVIDIA's root; without reference values its firmware stays unchecked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloister.trust.attestation import AttestationPolicy, Evidence, Findings, Outcome, gpu_nonce
from cloister.trust.attestation.gpu_report import read_gpu_report
from cloister.trust.attestation.nvidia import GpuVerifier, chain_extra, report_extra
from tests import attestation_vectors as real

REPORT, CHAIN, NONCE = real.gpu_evidence()
VALUES = {index: frozenset({value.hex()}) for index, value in read_gpu_report(REPORT).measurements.items()}
POLICY = AttestationPolicy(gpu=True, gpu_measurements=VALUES)
TEAM = replace(POLICY, profile="team")


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def verify(report: bytes = REPORT, chain: bytes = CHAIN, nonce: bytes = NONCE, policy: AttestationPolicy = POLICY) -> Findings:
    return GpuVerifier().verify_report(report, chain, nonce, policy, real.NOW)


def test_a_real_report_is_proved_but_for_the_revocation_that_nobody_answered_for():
    findings = verify()
    assert failures(findings) == ["gpu-revocation"]
    relaxed = verify(policy=replace(POLICY, profile="team"))
    assert relaxed.accepted
    assert [step.slug for step in relaxed.of(Outcome.NOT_PROVED)] == ["gpu-revocation"]
    assert len(VALUES) == 64


def test_without_reference_values_the_measurement_is_unchecked_and_private_refuses_it():
    findings = verify(policy=AttestationPolicy(profile="private"))
    assert failures(findings) == ["gpu-revocation", "gpu-measurement"]
    assert "GPU measurement unchecked" in findings.of(Outcome.FAILED)[1].text


def test_without_reference_values_another_profile_says_so_and_goes_on():
    findings = verify(policy=AttestationPolicy(profile="team"))
    assert findings.accepted
    assert [step.slug for step in findings.of(Outcome.NOT_PROVED)] == ["gpu-revocation", "gpu-measurement"]


def test_another_nonce_is_refused():
    assert failures(verify(nonce=bytes(32), policy=TEAM)) == ["gpu-nonce"]


def test_another_measurement_is_refused_by_its_index():
    policy = replace(TEAM, gpu_measurements=VALUES | {9: frozenset({"ab" * 48})})
    findings = verify(policy=policy)
    assert failures(findings) == ["gpu-measurement"]
    assert findings.of(Outcome.FAILED)[0].text.endswith("at index 9")


@pytest.mark.parametrize("where", [*range(0, 45, 4), *range(45, len(REPORT), 61), len(REPORT) - 1])
def test_a_real_report_with_one_bit_changed_is_refused(where: int):
    report = bytearray(REPORT)
    report[where] ^= 0x20
    findings = verify(bytes(report))
    assert set(failures(findings)) & {"gpu-report-signature", "gpu-report-form"}
    assert "gpu-nonce" not in failures(findings), "nothing is read from a report that nobody signed"


@pytest.mark.parametrize("length", [0, 36, 45, 1000, len(REPORT) - 1])
def test_a_report_that_ends_early_is_refused(length: int):
    assert failures(verify(REPORT[:length])) == ["gpu-report-form"]


def test_the_certificates_of_another_gpu_are_refused():
    _, other_chain = real.old_gpu_evidence()
    assert failures(verify(chain=other_chain)) == ["gpu-report-signature"]


def test_certificates_out_of_order_are_refused():
    end = b"-----END CERTIFICATE-----\n"
    certificates = [part + end for part in CHAIN.split(end)[:-1]]
    assert failures(verify(chain=b"".join(reversed(certificates)))) == ["chain-root"]
    assert failures(verify(chain=b"".join([certificates[1], certificates[0], *certificates[2:]]))) != []


def test_a_gpu_whose_root_is_not_trusted_is_refused():
    findings = GpuVerifier(frozenset({"00" * 32})).verify_report(REPORT, CHAIN, NONCE, POLICY, real.NOW)
    assert failures(findings) == ["chain-root"]


def test_an_old_driver_that_says_no_firmware_id_is_refused_by_a_strict_profile():
    report, chain = real.old_gpu_evidence()
    findings = verify(report, chain, nonce=report[4:36], policy=AttestationPolicy(profile="private"))
    assert failures(findings) == ["gpu-firmware-id", "gpu-revocation", "gpu-measurement"]


def test_a_gpu_report_cannot_be_carried_to_another_statement():
    evidence = Evidence("tdx", b"some statement", b"", {report_extra(0): REPORT, chain_extra(0): CHAIN})
    assert gpu_nonce(evidence.report_data) != NONCE
    assert failures(GpuVerifier().verify(evidence, TEAM, real.NOW)) == ["gpu-nonce"]


def test_a_gpu_that_is_wanted_and_not_there_is_refused():
    assert failures(GpuVerifier().verify(Evidence("tdx", b"", b""), POLICY, real.NOW)) == ["gpu"]
    assert list(GpuVerifier().verify(Evidence("tdx", b"", b""), AttestationPolicy(), real.NOW)) == []
