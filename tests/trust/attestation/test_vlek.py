"""SEV-SNP reports that a cloud provider's key (VLEK) signed: proved where the policy names the provider, refused elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloister.trust.attestation import AttestationPolicy, Findings, Outcome, SnpFloor
from cloister.trust.attestation.policy_file import parse_policy
from cloister.trust.attestation.sev_snp import SnpVerifier
from tests.snp_platform import CHIP_ID, NOW, SnpPlatform, make_report

DATA = bytes(range(64))
SIGNED_BY_VLEK = 1 << 2
POLICY = AttestationPolicy(
    measurements={"sev-snp": frozenset({"4d" * 48})},
    snp_floor=SnpFloor(boot_loader=3, snp=23, microcode=219),
    snp_providers=frozenset({"Example Cloud"}),
)


@pytest.fixture(scope="module")
def platform() -> SnpPlatform:
    return SnpPlatform(provider="Example Cloud")


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def verify(
    platform: SnpPlatform, policy: AttestationPolicy = POLICY, extra: dict[str, bytes] | None = None, **fields: object
) -> Findings:
    report = platform.sign(make_report(DATA, **{"flags": SIGNED_BY_VLEK, **fields}))  # type: ignore[arg-type]
    return SnpVerifier(platform.roots).verify_report(report, extra or platform.extra, DATA, policy, NOW)


def test_a_report_of_a_provider_that_the_policy_names_is_proved_in_every_step(platform: SnpPlatform):
    findings = verify(platform)
    assert findings.proved, failures(findings)
    assert any("Example Cloud" in step.text for step in findings)


def test_a_report_of_a_provider_is_refused_unless_the_policy_names_it(platform: SnpPlatform):
    findings = verify(platform, replace(POLICY, snp_providers=frozenset()))
    (step,) = findings.of(Outcome.FAILED)
    assert step.slug == "provider"
    assert "Example Cloud" in step.text
    assert "snp_providers" in step.text
    assert failures(verify(platform, replace(POLICY, snp_providers=frozenset({"Example"})))) == ["provider"]


def test_a_policy_file_names_providers():
    assert parse_policy(b'{"snp_providers": ["Example Cloud"]}').snp_providers == {"Example Cloud"}


@pytest.mark.parametrize("masked", [False, True])
def test_a_provider_may_withhold_the_chip(platform: SnpPlatform, masked: bool):
    chip, flag = (bytes(64), 2) if masked else (CHIP_ID, 0)
    assert verify(platform, flags=SIGNED_BY_VLEK | flag, chip_id=chip).proved


def test_a_provider_cannot_claim_other_firmware_than_its_certificate(platform: SnpPlatform):
    assert failures(verify(platform, tcb=bytes((4, 0, 0, 0, 0, 0, 23, 219)))) == ["chip-tcb"]


def test_a_provider_key_cannot_pass_for_a_chip(platform: SnpPlatform):
    as_chip = {"vcek": platform.extra["vlek"], "ask": platform.extra["asvk"], "ark": platform.extra["ark"]}
    findings = verify(platform, extra=as_chip, flags=0)
    assert failures(findings) == ["report-form"]
    assert "lacks the extension" in findings.of(Outcome.FAILED)[0].text


def test_a_chip_key_cannot_pass_for_a_provider():
    chip = SnpPlatform()
    as_provider = {"vlek": chip.extra["vcek"], "asvk": chip.extra["ask"], "ark": chip.extra["ark"]}
    assert failures(verify(chip, extra=as_provider)) == ["report-form"]


def test_a_report_that_says_another_key_than_signed_it_is_refused(platform: SnpPlatform):
    chip = SnpPlatform()
    both = platform.extra | {name: chip.extra[name] for name in ("vcek", "ask")}
    report = platform.sign(make_report(DATA, flags=0))
    findings = SnpVerifier(platform.roots).verify_report(report, both, DATA, POLICY, NOW)
    assert failures(findings) == ["chain-signature"]


@pytest.mark.parametrize("name", ["vlek", "asvk", "ark"])
def test_a_missing_certificate_is_named(platform: SnpPlatform, name: str):
    extra = {key: value for key, value in platform.extra.items() if key != name}
    findings = verify(platform, extra=extra)
    assert failures(findings) == ["report-form"]
    assert name.upper() in findings.of(Outcome.FAILED)[0].text


def test_a_provider_key_whose_intermediate_amd_revoked_is_refused():
    assert failures(verify(SnpPlatform(provider="Example Cloud", revokes_ask=True))) == ["revocation"]


@pytest.mark.parametrize("where", range(0, 0x2A0, 7))
def test_a_provider_report_with_one_bit_changed_is_refused(platform: SnpPlatform, where: int):
    report = bytearray(platform.sign(make_report(DATA, flags=SIGNED_BY_VLEK)))
    report[where] ^= 0x04
    findings = SnpVerifier(platform.roots).verify_report(bytes(report), platform.extra, DATA, POLICY, NOW)
    assert set(failures(findings)) & {"report-signature", "report-form"}
