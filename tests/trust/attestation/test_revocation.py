"""Stapled OCSP responses and CRLs: believed from those who may say it, while they are fresh, and never instead of another's."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from cloister.trust.attestation import AttestationPolicy, EvidenceError, Findings, Outcome
from cloister.trust.attestation.revocation import check_revocation, encode_statuses, read_statuses
from tests.authority import Authority

NOW = 1_752_000_000.0
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

ROOT = Authority("root")
MIDDLE = Authority("middle", ROOT)
LEAF = Authority("leaf", MIDDLE, is_authority=False)
ABOUT_MIDDLE = ROOT.answer(MIDDLE.certificate, NOW - HOUR_S)
REVOKED = ocsp.OCSPCertStatus.REVOKED


def check(
    *responses: bytes, lists: tuple[bytes, ...] = (), policy: AttestationPolicy | None = None, now: float = NOW
) -> Findings:
    findings = Findings()
    statuses = read_statuses(encode_statuses([ABOUT_MIDDLE, *responses], lists))
    check_revocation(findings, policy or AttestationPolicy(), LEAF.certificates, statuses, now, "revocation")
    return findings


def about_leaf(since: float = NOW - HOUR_S, **changes: object) -> bytes:
    return MIDDLE.answer(LEAF.certificate, since, **changes)  # type: ignore[arg-type]


def test_a_chain_is_good_when_each_issuer_says_so():
    assert check(about_leaf()).proved


@pytest.mark.parametrize("algorithm", [SHA256(), SHA384()], ids=["sha256", "sha384"])
def test_a_certificate_may_be_named_by_any_digest(algorithm: SHA256 | SHA384):
    assert check(about_leaf(algorithm=algorithm)).proved


def test_a_chain_is_good_when_one_issuer_lists_what_it_revoked():
    assert check(lists=(MIDDLE.list_revoked(NOW - HOUR_S),)).proved


def test_a_revoked_certificate_is_refused_by_every_profile():
    for findings in (
        check(about_leaf(status=REVOKED), policy=AttestationPolicy(profile="open")),
        check(lists=(MIDDLE.list_revoked(NOW - HOUR_S, LEAF.certificate),), policy=AttestationPolicy(profile="open")),
    ):
        assert not findings.accepted
        assert findings.of(Outcome.FAILED)[0].text == "middle revoked the certificate leaf"


def test_a_good_answer_does_not_undo_a_revocation():
    assert not check(about_leaf(status=REVOKED), about_leaf(), policy=AttestationPolicy(profile="open")).accepted
    assert not check(about_leaf(NOW - 300 * DAY_S, status=REVOKED), about_leaf()).accepted, "however old it is"


def unchecked(findings: Findings) -> bool:
    (step,) = findings
    return step.outcome is Outcome.FAILED and "leaf" in step.text and "middle" not in step.text


def test_a_certificate_that_nobody_answers_for_is_unchecked():
    assert unchecked(check())
    relaxed = check(policy=AttestationPolicy(profile="team"))
    assert relaxed.accepted
    assert not relaxed.proved


def test_an_issuer_that_does_not_know_a_certificate_leaves_it_unchecked():
    assert unchecked(check(about_leaf(status=ocsp.OCSPCertStatus.UNKNOWN)))


def test_an_answer_is_good_for_a_day_unless_the_policy_says_another_time():
    assert check(about_leaf(NOW - DAY_S)).proved
    assert unchecked(check(about_leaf(NOW - DAY_S - 1)))
    assert check(about_leaf(NOW - 2 * DAY_S), policy=AttestationPolicy(revocation_max_age_s=2 * 86_400)).proved
    old = (MIDDLE.list_revoked(NOW - DAY_S - 1, days=365),)
    assert unchecked(check(lists=old)), "a list that calls itself good for a year too"


def test_an_answer_that_is_over_or_not_yet_there_is_not_believed():
    assert unchecked(check(about_leaf(NOW - HOUR_S, days=0.01)))
    assert unchecked(check(about_leaf(NOW + 301)))
    assert check(about_leaf(NOW + 299)).proved, "clocks differ"


def test_an_answer_without_an_end_is_good_for_the_bound_of_the_policy():
    assert check(about_leaf(NOW - HOUR_S, days=None)).proved
    assert unchecked(check(about_leaf(NOW - DAY_S - 1, days=None)))


def test_an_answer_of_a_responder_that_the_issuer_named_is_believed():
    assert check(about_leaf(signer=Authority("responder", MIDDLE, is_authority=False, answers=True))).proved


def test_a_responder_may_send_other_certificates_too():
    responder = Authority("responder", MIDDLE, is_authority=False, answers=True)
    assert check(about_leaf(signer=responder, beside=(MIDDLE, ROOT, Authority("other", answers=True)))).proved


STRANGERS = {
    "nobody's": Authority("responder", answers=True),
    "the root's": Authority("responder", ROOT, is_authority=False, answers=True),
    "one that may not answer": Authority("responder", MIDDLE, is_authority=False),
    "the certificate itself": LEAF,
}


@pytest.mark.parametrize("who", STRANGERS)
def test_an_answer_of_another_responder_is_not_believed(who: str):
    assert unchecked(check(about_leaf(signer=STRANGERS[who])))


def test_an_answer_about_another_certificate_or_issuer_is_not_believed():
    other = Authority("leaf", MIDDLE, is_authority=False)
    assert unchecked(check(MIDDLE.answer(other.certificate, NOW - HOUR_S)))
    namesake = Authority("middle", ROOT)
    assert unchecked(check(namesake.answer(LEAF.certificate, NOW - HOUR_S)))


def test_a_list_of_somebody_else_or_of_a_part_is_not_believed():
    assert unchecked(check(lists=(Authority("middle", ROOT).list_revoked(NOW - HOUR_S),)))
    assert unchecked(check(lists=(MIDDLE.list_revoked(NOW - HOUR_S, signer=ROOT),)))
    assert unchecked(check(lists=(MIDDLE.list_revoked(NOW - HOUR_S, partial=True),)))


def test_an_answer_with_one_bit_changed_is_never_believed():
    answer = about_leaf()
    for where in range(0, len(answer) * 8, 7):
        changed = bytearray(answer)
        changed[where // 8] ^= 1 << where % 8
        try:
            statuses = read_statuses(encode_statuses([ABOUT_MIDDLE, bytes(changed)], []))
        except EvidenceError:
            continue
        findings = Findings()
        check_revocation(findings, AttestationPolicy(), LEAF.certificates, statuses, NOW, "revocation")
        assert not findings.accepted, where


def test_a_list_whose_parts_are_broken_is_refused_by_every_profile():
    """The library reads the parts of a list when they are asked for."""
    broken = MIDDLE.list_revoked(NOW - HOUR_S).replace(b"middle", b"\xff\xfeddle")  # no UTF-8
    findings = check(lists=(broken,), policy=AttestationPolicy(profile="open"))
    assert not findings.accepted
    assert "cannot be read" in findings.of(Outcome.FAILED)[0].text


@pytest.mark.parametrize("data", [b"x", b"-----BEGIN OCSP RESPONSE-----\nAAAA\n-----END OCSP RESPONSE-----\n", ABOUT_MIDDLE])
def test_something_else_than_statuses_is_an_error(data: bytes):
    with pytest.raises(EvidenceError):
        read_statuses(data)


def test_a_responder_that_could_not_answer_is_an_error():
    later = ocsp.OCSPResponseBuilder.build_unsuccessful(ocsp.OCSPResponseStatus.TRY_LATER)
    with pytest.raises(EvidenceError, match="fetch it again"):
        read_statuses(encode_statuses([later.public_bytes(Encoding.DER)], []))


def test_more_statuses_than_are_read_are_an_error():
    with pytest.raises(EvidenceError, match="64"):
        read_statuses(encode_statuses([ABOUT_MIDDLE] * 65, []))
