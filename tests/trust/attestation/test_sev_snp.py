"""AMD SEV-SNP: a real report is proved up to AMD's root, and each thing that is wrong with one is refused for its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from cloister.trust.attestation import AttestationPolicy, Findings, Outcome, SnpFloor
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.snp_report import read_report
from tests import attestation_vectors as real
from tests.snp_platform import NOW, TCB, SnpPlatform, make_report

DATA = bytes(range(64))
FLOOR = SnpFloor(boot_loader=3, snp=23, microcode=219)
POLICY = AttestationPolicy(measurements={"sev-snp": frozenset({"4d" * 48})}, snp_floor=FLOOR)
RELAXED = AttestationPolicy(profile="team")


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def verify_real(report: bytes, policy: AttestationPolicy = RELAXED, now: float = real.NOW, **extra: bytes) -> Findings:
    expected = read_report(real.snp_report()).report_data
    return SnpVerifier().verify_report(report, real.snp_certificates() | extra, expected, policy, now)


@pytest.fixture(scope="module")
def platform() -> SnpPlatform:
    return SnpPlatform()


@pytest.fixture
def verify(platform: SnpPlatform) -> Callable[..., Findings]:
    def run(policy: AttestationPolicy = POLICY, now: float = NOW, data: bytes = DATA, **fields: object) -> Findings:
        report = platform.sign(make_report(data, **fields))  # type: ignore[arg-type]
        return SnpVerifier(platform.roots).verify_report(report, platform.extra, DATA, policy, now)

    return run


def test_the_chain_and_the_signature_of_a_real_report_verify():
    findings = {step.slug: step.outcome for step in verify_real(real.snp_report())}
    for slug in ("chain", "report-signature", "chip", "chip-tcb", "report-data", "migration", "vmpl"):
        assert findings[slug] is Outcome.PROVED


def test_the_real_report_is_refused_because_its_guest_allows_debug():
    findings = verify_real(real.snp_report())
    assert failures(findings) == ["debug"]
    assert "DEBUG" in findings.of(Outcome.FAILED)[0].text


@pytest.mark.parametrize("where", range(0, 0x4A0, 13))
def test_a_real_report_with_one_bit_changed_is_refused(where: int):
    report = bytearray(real.snp_report())
    report[where] ^= 0x10
    findings = verify_real(bytes(report))
    assert set(failures(findings)) & {"report-signature", "report-form"}
    assert "debug" not in failures(findings), "nothing is read from a report that nobody signed"


@pytest.mark.parametrize("name", ["vcek", "ask", "ark"])
@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_real_certificate_with_one_bit_changed_is_refused(name: str, part: float):
    encoded = bytearray(real.snp_certificates()[name])
    where = int(len(encoded) * part)
    encoded[where] ^= 0x01
    assert not verify_real(real.snp_report(), **{name: bytes(encoded)}).accepted
    assert "debug" not in failures(verify_real(real.snp_report(), **{name: bytes(encoded)}))


@pytest.mark.parametrize("oid", ["06052b81040022", "06072a8648ce3d0201"], ids=["curve", "kind of key"])
def test_a_certificate_with_a_key_that_nobody_knows_is_refused(oid: str):
    vcek = real.snp_certificates()["vcek"]
    known = bytes.fromhex(oid)
    assert known in vcek
    findings = verify_real(real.snp_report(), vcek=vcek.replace(known, known[:-1] + b"\x7f"))
    assert failures(findings) == ["report-form"]


def test_a_real_report_is_refused_when_its_certificates_are_over():
    in_2046 = 2_400_000_000
    findings = verify_real(real.snp_report(), now=in_2046)
    assert failures(findings) == ["chain-expired"]


def test_a_real_report_is_refused_before_its_certificates_begin():
    assert failures(verify_real(real.snp_report(), now=1_600_000_000)) == ["chain-expired"]


def test_a_strict_profile_refuses_what_could_not_be_checked_of_a_real_report():
    assert failures(verify_real(real.snp_report(), AttestationPolicy())) == ["revocation", "debug", "tcb", "measurement"]


def test_a_good_report_is_proved_in_every_step(verify: Callable[..., Findings]):
    findings = verify()
    assert failures(findings) == []
    assert findings.proved


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_every_known_version_is_read(verify: Callable[..., Findings], version: int):
    assert verify(version=version).proved


REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "debug": ({"guest_policy": 0x30000 | 1 << 19}, "debug"),
    "migration by policy": ({"guest_policy": 0x30000 | 1 << 18}, "migration"),
    "migration agent is there": ({"report_id_ma": b"\x01" * 32}, "migration"),
    "VMPL 1": ({"vmpl": 1}, "vmpl"),
    "VMPL 3": ({"vmpl": 3}, "vmpl"),
    "another image": ({"measurement": b"\x4e" * 48}, "measurement"),
    "another statement": ({"data": bytes(64)}, "report-data"),
    "another chip": ({"chip_id": bytes(range(2, 66))}, "chip"),
    "chip masked": ({"flags": 2}, "chip"),
    "other firmware than the certificate": ({"tcb": bytes((4, 0, 0, 0, 0, 0, 23, 219))}, "chip-tcb"),
    "started under old firmware": ({"launch_tcb": bytes((3, 0, 0, 0, 0, 0, 22, 219))}, "tcb"),
    "signed by the provider": ({"flags": 1 << 2}, "report-form"),
    "signed by nobody": ({"flags": 7 << 2}, "report-form"),
    "unknown version": ({"version": 6}, "report-form"),
    "unknown signature": ({"algorithm": 2}, "report-form"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_each_wrong_thing_in_a_signed_report_is_refused_for_its_reason(verify: Callable[..., Findings], case: str):
    fields, slug = REFUSALS[case]
    assert failures(verify(**fields)) == [slug]


def test_what_the_host_gave_a_guest_is_refused_until_it_is_named(verify: Callable[..., Findings]):
    given = b"\x5a" * 32
    assert failures(verify(host_data=given)) == ["host-data"]
    named = replace(POLICY, measurements={**POLICY.measurements, "sev-snp-host-data": frozenset({given.hex()})})
    assert verify(named, host_data=given).proved
    assert failures(verify(named)) == ["host-data"], "zeros are not what was named"


@pytest.mark.parametrize("part", ["boot_loader", "tee", "snp", "microcode"])
def test_firmware_below_the_floor_is_refused_in_every_part(verify: Callable[..., Findings], part: str):
    tcb = read_report(SnpPlatform().sign(make_report(DATA, tcb=TCB))).reported_tcb
    floor = msgspec.structs.replace(FLOOR, **{part: getattr(tcb, part) + 1})
    assert failures(verify(replace(POLICY, snp_floor=floor))) == ["tcb"]


def test_a_platform_that_amd_did_not_certify_is_refused(platform: SnpPlatform):
    report = platform.sign(make_report(DATA))
    findings = SnpVerifier().verify_report(report, platform.extra, DATA, POLICY, NOW)
    assert failures(findings) == ["chain-root"]


def test_a_chain_under_another_root_is_refused(platform: SnpPlatform):
    mixed = platform.extra | {"ark": SnpPlatform().extra["ark"]}
    findings = SnpVerifier(platform.roots).verify_report(platform.sign(make_report(DATA)), mixed, DATA, POLICY, NOW)
    assert failures(findings) == ["chain-root"]
    foreign = platform.extra | {"vcek": SnpPlatform().extra["vcek"]}
    findings = SnpVerifier(platform.roots).verify_report(platform.sign(make_report(DATA)), foreign, DATA, POLICY, NOW)
    assert failures(findings) == ["chain-signature"]


def test_a_chip_cannot_certify_another_chip(platform: SnpPlatform):
    extra = platform.extra
    shifted = extra | {"ask": extra["vcek"]}
    findings = SnpVerifier(platform.roots).verify_report(platform.sign(make_report(DATA)), shifted, DATA, POLICY, NOW)
    assert failures(findings) == ["chain-authority"]


def test_an_expired_chip_certificate_is_refused(verify: Callable[..., Findings]):
    assert failures(verify(now=NOW + 366 * 86400)) == ["chain-expired"]


def test_what_amd_revoked_is_refused():
    platform = SnpPlatform(revokes_ask=True)
    report = platform.sign(make_report(DATA))
    assert failures(SnpVerifier(platform.roots).verify_report(report, platform.extra, DATA, POLICY, NOW)) == ["revocation"]


def test_an_old_list_of_revoked_certificates_is_refused():
    platform = SnpPlatform(crl_days=30)
    report = platform.sign(make_report(DATA))
    assert failures(SnpVerifier(platform.roots).verify_report(report, platform.extra, DATA, POLICY, NOW)) == ["revocation"]


def test_a_list_of_revoked_certificates_by_somebody_else_is_refused(platform: SnpPlatform):
    extra = platform.extra | {"crl": SnpPlatform().extra["crl"]}
    findings = SnpVerifier(platform.roots).verify_report(platform.sign(make_report(DATA)), extra, DATA, POLICY, NOW)
    assert failures(findings) == ["revocation"]


@pytest.mark.parametrize("name", ["vcek", "ask", "ark"])
def test_a_missing_certificate_is_named(platform: SnpPlatform, name: str):
    extra = {key: value for key, value in platform.extra.items() if key != name}
    findings = SnpVerifier(platform.roots).verify_report(platform.sign(make_report(DATA)), extra, DATA, POLICY, NOW)
    assert failures(findings) == ["report-form"]
    assert name.upper() in findings.of(Outcome.FAILED)[0].text
