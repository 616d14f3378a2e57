"""GPUs with what NVIDIA signed beside their reports: reference measurements decide, and revoked chains are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cryptography.x509 import ocsp

from cloister.trust.attestation import AttestationPolicy, Evidence, Findings, Outcome, gpu_nonce, report_data
from cloister.trust.attestation.gpu_report import GpuReport, read_gpu_report
from cloister.trust.attestation.nvidia import GpuVerifier, chain_extra, report_extra
from cloister.trust.attestation.policy_file import parse_policy
from cloister.trust.attestation.revocation import encode_statuses
from cloister.trust.attestation.rim import REVOCATION, RIM_ROOTS, rim_extra
from cloister.types.errors import ConfigError
from tests import attestation_vectors as real
from tests.gpu_platform import MAKER

NOW = real.NOW
STATEMENT = b"a statement"
REPORT = MAKER.report(gpu_nonce(report_data(STATEMENT)))
MEASURED = read_gpu_report(REPORT)
PRIVATE = AttestationPolicy(gpu=True)
VERIFIER = GpuVerifier(MAKER.root.roots, MAKER.rim_root.roots)


def values_of(report: GpuReport, indexes: range) -> dict[int, list[bytes]]:
    return {index: [report.measurements[index]] for index in indexes}


DRIVER = MAKER.rim(MEASURED.driver, values_of(MEASURED, range(14, 65)))
VBIOS = MAKER.rim(MEASURED.vbios.lower(), values_of(MEASURED, range(1, 14)))
EXTRA = {
    report_extra(0): REPORT,
    chain_extra(0): MAKER.signer.pem,
    rim_extra(0): DRIVER,
    rim_extra(1): VBIOS,
    REVOCATION: MAKER.statuses(NOW - 3600),
}


def verify(
    policy: AttestationPolicy = PRIVATE, now: float = NOW, verifier: GpuVerifier = VERIFIER, **changes: bytes | None
) -> Findings:
    extra = EXTRA | {name.replace("_", "-"): value for name, value in changes.items()}
    kept = {name: value for name, value in extra.items() if value is not None}
    return verifier.verify(Evidence("tdx", STATEMENT, b"", kept), policy, now)


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def failed_text(findings: Findings) -> str:
    (step,) = findings.of(Outcome.FAILED)
    return step.text


def test_a_gpu_that_measures_what_its_maker_signed_is_proved_in_every_step():
    findings = verify()
    assert failures(findings) == []
    assert findings.proved


def test_a_real_gpu_is_proved_by_the_real_reference_measurements_of_its_vbios():
    """Those of its driver were never published beside it: that half is signed here."""
    data, chain = real.old_gpu_evidence()
    report = read_gpu_report(data)
    driver = MAKER.rim(report.driver, values_of(report, range(14, 65)))
    extra = {report_extra(0): data, chain_extra(0): chain, rim_extra(0): real.vbios_rim(), rim_extra(1): driver}
    verifier = GpuVerifier(rim_roots=RIM_ROOTS | MAKER.rim_root.roots)
    findings = verifier.verify(Evidence("tdx", STATEMENT, b"", extra), AttestationPolicy(profile="team"), real.RIM_NOW)
    assert failures(findings) == ["gpu-nonce"], "it was made for somebody else long ago"
    assert "gpu-measurement" in [step.slug for step in findings.of(Outcome.PROVED)]


@pytest.mark.parametrize("number", [1, 13, 14, 64])
def test_a_gpu_that_measures_something_else_is_refused_by_its_index(number: int):
    values = values_of(MEASURED, range(1, 14)), values_of(MEASURED, range(14, 65))
    for part in values:
        if number in part:
            part[number] = [b"\xab" * 48, b"\xcd" * 48]
    vbios, driver = (MAKER.rim(version, part) for version, part in zip((MEASURED.vbios, MEASURED.driver), values, strict=True))
    findings = verify(gpu_rim_0=driver, gpu_rim_1=vbios)
    assert failures(findings) == ["gpu-measurement"]
    assert failed_text(findings).endswith(f"at index {number}")


def test_one_of_several_alternatives_is_enough():
    values = values_of(MEASURED, range(1, 14))
    values[5] = [b"\xab" * 48, MEASURED.measurements[5]]
    assert verify(gpu_rim_1=MAKER.rim(MEASURED.vbios, values)).proved


def test_an_index_that_the_gpu_does_not_measure_is_refused():
    values = values_of(MEASURED, range(1, 14)) | {65: [bytes(48)]}
    assert failures(verify(gpu_rim_1=MAKER.rim(MEASURED.vbios, values))) == ["gpu-measurement"]


def test_the_measurement_of_a_video_decoder_that_is_off_is_not_compared():
    assert not MEASURED.has_nvdec
    values = values_of(MEASURED, range(14, 65)) | {36: [b"\xab" * 48]}
    assert verify(gpu_rim_0=MAKER.rim(MEASURED.driver, values)).proved


@pytest.mark.parametrize("missing", ["gpu_rim_0", "gpu_rim_1"])
def test_a_gpu_without_reference_measurements_of_driver_or_vbios_is_refused(missing: str):
    findings = verify(**{missing: None})
    assert failures(findings) == ["gpu-measurement"]
    version = MEASURED.driver if missing == "gpu_rim_0" else MEASURED.vbios
    assert version in failed_text(findings)
    assert "--nvidia-collateral" in failed_text(findings)
    assert verify(AttestationPolicy(profile="team"), **{missing: None}).accepted


def test_reference_measurements_of_another_version_do_not_count():
    assert failures(verify(gpu_rim_0=MAKER.rim("1.2.3", values_of(MEASURED, range(14, 65))))) == ["gpu-measurement"]


def test_reference_measurements_that_both_name_an_index_are_refused():
    overlapping = MAKER.rim(MEASURED.vbios, values_of(MEASURED, range(1, 15)))
    assert "both name index 14" in failed_text(verify(gpu_rim_1=overlapping))


def test_altered_reference_measurements_are_refused_by_every_profile():
    altered = DRIVER.replace(b'active="True"', b'active="False"', 1)
    assert failures(verify(AttestationPolicy(profile="team"), gpu_rim_0=altered)) == ["rim-signature"]


def test_a_policy_with_values_of_its_own_needs_no_reference_measurements():
    values = {index: frozenset({value.hex()}) for index, value in MEASURED.measurements.items()}
    assert verify(replace(PRIVATE, gpu_measurements=values), gpu_rim_0=None, gpu_rim_1=None).proved
    wrong = replace(PRIVATE, gpu_measurements=values | {9: frozenset({"ab" * 48})})
    assert failures(verify(wrong)) == ["gpu-measurement"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [("gpu", "gpu-revocation"), ("identity", "gpu-revocation"), ("reference signer", "rim-revocation")],
)
def test_a_certificate_that_nobody_answers_for_is_refused_by_its_name(name: str, slug: str):
    findings = verify(gpu_revocation=MAKER.statuses(NOW - 3600, without=name))
    assert set(failures(findings)) == {slug}
    assert all(name in step.text for step in findings.of(Outcome.FAILED))


def test_stale_statuses_are_refused_until_the_policy_takes_them():
    old = MAKER.statuses(NOW - 3 * 86_400)
    assert set(failures(verify(gpu_revocation=old))) == {"gpu-revocation", "rim-revocation"}
    assert verify(replace(PRIVATE, revocation_max_age_s=4 * 86_400), gpu_revocation=old).proved


@pytest.mark.parametrize("who", ["gpu", "reference signer"])
def test_what_the_maker_revoked_is_refused_by_every_profile(who: str):
    revoked = MAKER.gpu if who == "gpu" else MAKER.rim_signer
    answer = revoked.chain[1].answer(revoked.certificate, NOW - 3600, status=ocsp.OCSPCertStatus.REVOKED)
    both = MAKER.statuses(NOW - 3600) + encode_statuses([answer], [])
    findings = verify(AttestationPolicy(profile="open"), gpu_revocation=both)
    assert not findings.accepted
    assert f"revoked the certificate {who}" in findings.of(Outcome.FAILED)[0].text


def test_a_revoked_chip_that_signs_reports_itself_is_refused():
    """The key of a chip makes the certificates of its firmware; who has it can leave those out."""
    data = MAKER.report(gpu_nonce(report_data(STATEMENT)), MAKER.gpu)
    answer = MAKER.identity.answer(MAKER.gpu.certificate, NOW - 3600, status=ocsp.OCSPCertStatus.REVOKED)
    statuses = MAKER.statuses(NOW - 3600) + encode_statuses([answer], [])
    changes = {report_extra(0): data, chain_extra(0): MAKER.gpu.pem, REVOCATION: statuses}
    findings = VERIFIER.verify(Evidence("tdx", STATEMENT, b"", EXTRA | changes), AttestationPolicy(profile="open"), NOW)
    assert "gpu-revocation" in failures(findings)


FLOORS = {
    "older than the driver": ({"driver": "590.11.99"}, True),
    "the driver": ({"driver": "590.12"}, True),
    "newer than the driver": ({"driver": "590.12.1"}, False),
    "newer, with more digits": ({"driver": "1000.1"}, False),
    "older than the VBIOS": ({"vbios": "96.00.A4.FF.FF"}, True),
    "the VBIOS": ({"vbios": "96.00.A5.00.01"}, True),
    "newer than the VBIOS": ({"vbios": "96.00.A5.00.02"}, False),
}


@pytest.mark.parametrize("case", FLOORS)
def test_a_driver_or_vbios_below_the_floor_is_refused_though_its_maker_signed_for_it(case: str):
    floor, accepted = FLOORS[case]
    assert (MEASURED.driver, MEASURED.vbios) == ("590.12", "96.00.A5.00.01")
    policy = parse_policy(json.dumps({"gpu": True, "gpu_floor": floor}).encode())
    findings = verify(policy)
    assert failures(findings) == ([] if accepted else ["gpu-floor"])
    assert accepted or next(iter(floor.values())) in failed_text(findings)


@pytest.mark.parametrize("floor", [{"driver": "new"}, {"driver": "550."}, {"vbios": "96.0G"}, {"firmware": "1"}])
def test_a_floor_with_a_slip_is_an_error(floor: dict[str, str]):
    with pytest.raises(ConfigError):
        parse_policy(json.dumps({"gpu_floor": floor}).encode())


def test_statuses_that_cannot_be_read_are_refused_by_every_profile():
    assert "gpu-revocation" in failures(verify(AttestationPolicy(profile="open"), gpu_revocation=b"nonsense"))
