"""Intel TDX: a real quote is proved with its real collateral; each thing that is wrong with one is refused for its reason."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from cloister.trust.attestation import AttestationError, AttestationPolicy, Findings, Outcome
from cloister.trust.attestation.tdx import TdReport, TdxVerifier, judge_td, read_quote
from tests import attestation_vectors as real
from tests.tdx_platform import TdxPlatform, make_body

REPORT = read_quote(real.td_quote()).report
POLICY = AttestationPolicy(
    measurements={"tdx": frozenset({REPORT.mrtd.hex()})}
    | {f"tdx-rtmr{number}": frozenset({value.hex()}) for number, value in enumerate(REPORT.rtmrs)},
)


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def verify(
    quote: bytes | None = None,
    collateral: bytes | None = None,
    policy: AttestationPolicy = POLICY,
    now: float = real.NOW,
    expected: bytes = REPORT.report_data,
) -> Findings:
    quote = real.td_quote() if quote is None else quote
    collateral = real.td_collateral() if collateral is None else collateral
    return TdxVerifier().verify_quote(quote, collateral, expected, policy, now)


def with_registers(named: dict[str, frozenset[str]]) -> AttestationPolicy:
    return replace(POLICY, measurements={**POLICY.measurements, **named})


def judge(report: TdReport, policy: AttestationPolicy = POLICY) -> list[str]:
    findings = Findings()
    judge_td(findings, report, REPORT.report_data, policy)
    return failures(findings)


def test_a_real_quote_is_proved_in_every_step():
    findings = verify()
    assert failures(findings) == []
    assert findings.proved


def test_collateral_that_is_over_is_refused():
    findings = verify(now=real.NOW + 400 * 86400)
    assert failures(findings) == ["report-signature"]
    assert "Expired" in findings.of(Outcome.FAILED)[0].text


def test_certificates_that_are_over_are_refused():
    assert failures(verify(now=2_600_000_000)) == ["chain-expired"]


def test_collateral_of_the_future_is_refused():
    assert failures(verify(now=1_745_000_000)) == ["report-signature"]


@pytest.mark.parametrize("where", [*range(0, 48, 5), *range(48, 632, 23), *range(632, 5006, 97)])
def test_a_real_quote_with_one_bit_changed_is_refused(where: int):
    quote = bytearray(real.td_quote())
    quote[where] ^= 0x04
    findings = verify(bytes(quote))
    assert not findings.accepted
    assert "debug" not in failures(findings), "nothing is read from a quote that nobody signed"


@pytest.mark.parametrize("length", [0, 10, 631, 640, 1000, 4935])
def test_a_quote_that_ends_early_is_refused(length: int):
    assert failures(verify(real.td_quote()[:length])) == ["report-form"]


def test_a_quote_with_more_behind_it_is_refused():
    assert failures(verify(real.td_quote() + b"more")) == ["report-form"]


@pytest.mark.parametrize("field", ["tcb_info", "qe_identity"])
def test_collateral_that_intel_did_not_sign_is_refused(field: str):
    collateral = json.loads(real.td_collateral())
    assert '"tcbStatus":"UpToDate"' in collateral[field]
    collateral[field] = collateral[field].replace('"tcbStatus":"UpToDate"', '"tcbStatus":"Revoked"', 1)
    assert failures(verify(collateral=json.dumps(collateral).encode())) == ["report-signature"]


def test_without_collateral_a_platform_cannot_be_judged():
    assert failures(verify(collateral=b"")) == ["collateral"]
    assert failures(verify(collateral=b"{}")) == ["report-signature"]
    assert failures(verify(collateral=b"\xff")) == ["report-signature"]


def test_collateral_of_another_platform_is_refused():
    assert failures(verify(real.td_quote_without_sept_ve())) == ["report-form"], "it has a word behind its end"
    whole = real.td_quote_without_sept_ve()[:4935]
    assert failures(verify(whole)) == ["report-signature"]


def test_another_statement_is_refused():
    assert failures(verify(expected=bytes(64))) == ["report-data"]


def test_another_image_is_refused():
    assert failures(verify(policy=with_registers({"tdx": frozenset({"00" * 48})}))) == ["measurement"]


@pytest.mark.parametrize("number", range(4))
def test_another_run_time_measurement_is_refused(number: int):
    findings = verify(policy=with_registers({f"tdx-rtmr{number}": frozenset({"11" * 48})}))
    assert failures(findings) == [f"rtmr-{number}"]
    (step,) = findings.of(Outcome.FAILED)
    assert REPORT.rtmrs[number].hex() in step.text, "what was measured"
    assert "11" * 48 in step.text, "what was published"


@pytest.mark.parametrize("name", ["tdx", *(f"tdx-rtmr{number}" for number in range(4))])
def test_a_strict_profile_refuses_a_register_that_nobody_named(name: str):
    named = {register: values for register, values in POLICY.measurements.items() if register != name}
    findings = verify(policy=replace(POLICY, measurements=named))
    (step,) = findings.of(Outcome.FAILED)
    assert f"--launch {name}=HEX" in step.text, "the message says how to name it"
    relaxed = verify(policy=AttestationPolicy(profile="team", measurements=named))
    assert relaxed.accepted
    assert [left.slug for left in relaxed.of(Outcome.NOT_PROVED)] == [step.slug]


@pytest.mark.parametrize("name", ["mrconfigid", "mrowner", "mrownerconfig"])
def test_what_the_host_gave_a_domain_is_refused_until_it_is_named(platform: TdxPlatform, name: str):
    given = {name: b"\x5a" * 48}
    assert verify_ours(platform, **given) == [name]
    assert verify_ours(platform, with_registers({f"tdx-{name}": frozenset({"5a" * 48})}), **given) == []
    assert verify_ours(platform, with_registers({f"tdx-{name}": frozenset({"5a" * 48})})) == [name], (
        "zeros are not what was named"
    )


def test_a_platform_state_that_is_not_good_enough_is_refused():
    policy = replace(POLICY, tdx_statuses=frozenset({"SWHardeningNeeded"}))
    assert failures(verify(policy=policy)) == ["tcb"]


def test_a_strict_profile_refuses_unknown_measurements():
    assert failures(verify(policy=AttestationPolicy())) == ["measurement", "rtmr-0", "rtmr-1", "rtmr-2", "rtmr-3"]
    relaxed = verify(policy=AttestationPolicy(profile="team"))
    assert relaxed.accepted
    assert not relaxed.proved


@pytest.fixture(scope="module")
def platform() -> TdxPlatform:
    return TdxPlatform()


def verify_ours(platform: TdxPlatform, policy: AttestationPolicy = POLICY, **changes: bytes | int) -> list[str]:
    quote = platform.quote(make_body(**changes))
    return failures(TdxVerifier(platform.root).verify_quote(quote, platform.collateral, REPORT.report_data, policy, real.NOW))


def test_a_signed_quote_of_a_platform_of_our_own_is_proved_under_its_root_only(platform: TdxPlatform):
    assert verify_ours(platform) == []
    assert failures(verify(platform.quote(make_body()), platform.collateral)) == ["chain-root"]
    assert failures(verify(collateral=platform.collateral)) == ["report-signature"]


def verify_version_5(platform: TdxPlatform, body: bytes, body_type: int = 3, policy: AttestationPolicy = POLICY) -> list[str]:
    quote = platform.quote(body, body_type=body_type)
    return failures(TdxVerifier(platform.root).verify_quote(quote, platform.collateral, REPORT.report_data, policy, real.NOW))


TDX_1_5 = make_body() + make_body()[:16] + bytes(48)  # its second TCB like its first, and no service domain


def test_a_quote_of_version_5_is_proved_with_either_body(platform: TdxPlatform):
    assert verify_version_5(platform, make_body(), body_type=2) == []
    assert verify_version_5(platform, TDX_1_5) == []


def test_a_domain_that_service_domains_are_bound_to_is_refused_for_that_reason(platform: TdxPlatform):
    assert verify_version_5(platform, TDX_1_5[:-48] + b"\x5a" * 48) == ["service-td"]


@pytest.mark.parametrize("length", [0, 583, 585, 647, 649])
def test_a_body_of_another_length_than_its_type_is_refused(platform: TdxPlatform, length: int):
    assert verify_version_5(platform, bytes(length)) == ["report-form"]
    assert verify_version_5(platform, TDX_1_5, body_type=1) == ["report-form"]


@pytest.mark.parametrize("where", [*range(54), *range(54, 702, 29), *range(702, 2000, 61)])
def test_a_quote_of_version_5_with_one_bit_changed_is_refused(platform: TdxPlatform, where: int):
    quote = bytearray(platform.quote(TDX_1_5, body_type=3))
    quote[where] ^= 0x04
    verifier = TdxVerifier(platform.root)
    findings = verifier.verify_quote(bytes(quote), platform.collateral, REPORT.report_data, POLICY, real.NOW)
    assert not findings.accepted
    assert "debug" not in failures(findings)


SIGNED: dict[str, tuple[dict[str, bytes | int], list[str]]] = {
    "debug": ({"attributes": 1 << 28 | 1}, ["debug"]),
    "migration": ({"attributes": 1 << 28 | 1 << 29}, ["migration"]),
    "no SEPT_VE_DISABLE": ({"attributes": 0}, ["sept-ve"]),
    "another image": ({"mrtd": b"\x4e" * 48}, ["measurement"]),
    "another statement": ({"report_data": bytes(64)}, ["report-data"]),
}


@pytest.mark.parametrize("case", SIGNED)
def test_each_wrong_thing_in_a_signed_quote_is_refused_for_its_reason(platform: TdxPlatform, case: str):
    changes, slugs = SIGNED[case]
    assert verify_ours(platform, **changes) == slugs


@pytest.mark.parametrize("status", ["OutOfDate", "ConfigurationNeeded", "SWHardeningNeeded"])
def test_a_platform_that_intel_calls_out_of_date_is_refused_unless_the_policy_takes_it(status: str):
    platform = TdxPlatform(status)
    assert verify_ours(platform) == ["tcb"]
    assert verify_ours(platform, replace(POLICY, tdx_statuses=frozenset({"UpToDate", status}))) == []


def test_the_report_as_it_is_passes_the_policy():
    assert judge(REPORT) == []


@pytest.mark.parametrize("bit", range(8))
def test_every_debug_attribute_is_refused(bit: int):
    assert judge(replace(REPORT, attributes=REPORT.attributes | 1 << bit)) == ["debug"]


def test_a_domain_that_may_migrate_is_refused():
    assert judge(replace(REPORT, attributes=REPORT.attributes | 1 << 29)) == ["migration"]


def test_a_real_domain_without_sept_ve_disable_is_refused():
    report = read_quote(real.td_quote_without_sept_ve()[:4935]).report
    findings = Findings()
    judge_td(findings, report, report.report_data, AttestationPolicy(profile="team"))
    assert failures(findings) == ["sept-ve"]


def test_a_module_that_is_not_of_production_is_refused():
    assert judge(replace(REPORT, seam_attributes=1)) == ["module"]


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)
    with pytest.raises(AttestationError, match=r"pip install 'cloister\[attest\]'"):
        verify()
