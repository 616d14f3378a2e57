"""Intel TDX: a real quote is proved with its real collateral; each thing that is wrong with one is refused for its reason."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from cloister.privacy.attestation import AttestationError, Findings, Outcome, Policy
from cloister.privacy.attestation.td_quote import TdReport, read_quote
from cloister.privacy.attestation.tdx import TdxVerifier, judge_td
from tests import attestation_vectors as real
from tests.tdx_platform import TdxPlatform, make_body

REPORT = read_quote(real.td_quote()).report
POLICY = Policy(
    measurements={"tdx": frozenset({REPORT.mrtd.hex()})},
    rtmrs={number: frozenset({value.hex()}) for number, value in enumerate(REPORT.rtmrs)},
)


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def verify(
    quote: bytes | None = None,
    collateral: bytes | None = None,
    policy: Policy = POLICY,
    now: float = real.NOW,
    expected: bytes = REPORT.report_data,
) -> Findings:
    quote = real.td_quote() if quote is None else quote
    collateral = real.td_collateral() if collateral is None else collateral
    return TdxVerifier().verify_quote(quote, collateral, expected, policy, now)


def judge(report: TdReport, policy: Policy = POLICY) -> list[str]:
    findings = Findings()
    judge_td(findings, report, REPORT.report_data, policy)
    return failures(findings)


def test_a_real_quote_is_proved_in_every_step():
    findings = verify()
    assert failures(findings) == []
    assert findings.proved


@pytest.mark.parametrize("number", range(4))
def test_a_run_time_measurement_that_nobody_named_is_refused_by_a_strict_profile(number):
    known = {one: values for one, values in POLICY.rtmrs.items() if one != number}
    assert failures(verify(policy=replace(POLICY, rtmrs=known))) == ["rtmr"]
    findings = verify(policy=replace(POLICY, rtmrs=known, profile="team"))
    assert not findings.proved
    assert f"run-time measurements {number} " in findings.of(Outcome.NOT_PROVED)[0].text


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
    policy = replace(POLICY, measurements={"tdx": frozenset({"00" * 48})})
    assert failures(verify(policy=policy)) == ["measurement"]


@pytest.mark.parametrize("number", range(4))
def test_another_run_time_measurement_is_refused(number: int):
    policy = replace(POLICY, rtmrs={**POLICY.rtmrs, number: frozenset({"11" * 48})})
    assert failures(verify(policy=policy)) == [f"rtmr-{number}"]


def test_a_platform_state_that_is_not_good_enough_is_refused():
    policy = replace(POLICY, tdx_statuses=frozenset({"SWHardeningNeeded"}))
    assert failures(verify(policy=policy)) == ["tcb"]


def test_a_strict_profile_refuses_unknown_measurements():
    assert failures(verify(policy=Policy())) == ["measurement", "rtmr"]
    relaxed = verify(policy=Policy(profile="team"))
    assert relaxed.accepted
    assert not relaxed.proved


@pytest.fixture(scope="module")
def platform() -> TdxPlatform:
    return TdxPlatform()


def verify_ours(platform: TdxPlatform, policy: Policy = POLICY, **changes: bytes | int) -> list[str]:
    quote = platform.quote(make_body(**changes))
    return failures(TdxVerifier(platform.root).verify_quote(quote, platform.collateral, REPORT.report_data, policy, real.NOW))


def test_a_signed_quote_of_a_platform_of_our_own_is_proved_under_its_root_only(platform: TdxPlatform):
    assert verify_ours(platform) == []
    assert failures(verify(platform.quote(make_body()), platform.collateral)) == ["chain-root"]
    assert failures(verify(collateral=platform.collateral)) == ["report-signature"]


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
    judge_td(findings, report, report.report_data, Policy(profile="team"))
    assert failures(findings) == ["sept-ve"]


def test_a_module_that_is_not_of_production_is_refused():
    assert judge(replace(REPORT, seam_attributes=1)) == ["module"]


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)
    with pytest.raises(AttestationError, match=r"pip install 'cloister\[attest\]'"):
        verify()
