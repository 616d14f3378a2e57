"""The charges of an audit against an operator, by kind. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cloister.client.errors import EpochRefusedError, EvidenceRefusedError, NoTokensError, SealedError
from cloister.client.routing_audit.audit import Audit
from cloister.client.routing_audit.hypotheses import HONEST_ABOVE, HypothesisResult, compare_times, examine
from cloister.client.routing_audit.tails import holm
from cloister.trust.transparency.refusal import Reason

_OUT_OF_TOKENS = re.compile(r"gave none \(4\d\d\)")
_KINDS = {
    Reason.NO_MEMBERSHIP: "membership",
    Reason.NOT_A_MEMBER: "membership",
    Reason.TOO_FEW_PRESENT: "membership",
    Reason.MEMBERSHIP_CHANGED: "membership",
    Reason.WRONG_CAPACITY: "capacity",
    Reason.SHARE_TOO_LARGE: "capacity",
    Reason.TOO_FAST: "pace",
    Reason.TOO_LATE: "pace",
    Reason.TOO_EARLY: "pace",
    Reason.SPLIT_VIEW: "partition",
    Reason.ROLLED_BACK: "partition",
    Reason.NOT_CONSISTENT: "partition",
}
_STEPS = {"member": "membership", "key": "membership", "listed": "evidence", "capacity": "capacity", "chip": "chip"}
_SAID = {
    "epoch": ("partition", "users are shown different epochs, each time they look"),
    "issuer": ("issuer", "users are shown different keys of the issuer, each time they look"),
}
_FOUND = {
    "loss": "draws that bring no answer do not fall on all alike: requests are withheld or misdelivered",
    "draw": "nodes are not drawn by their capacity",
    "nodes": "nodes are not drawn by their capacity",
    "land": "answers do not come from nodes by their capacity",
    "timing": "answers to this user take another time than those to all others",
}


@dataclass(frozen=True)
class OperatorFault:
    """One charge against the operator.

    Attributes:
        kind: `membership`, `capacity`, `chip`, `evidence`, `partition`, `pace`, `issuer`, `log`, or the family of a finding.
        user: the affected user; empty for all.
        text: a sentence for users.
    """

    kind: str
    user: str
    text: str


@dataclass(frozen=True)
class AuditVerdict:
    """The result of an audit.

    Attributes:
        charges: empty if there is no evidence against the operator.
        unfinished: why the audit is incomplete, by user; then the absence of charges proves nothing.
        p_value: the smallest p-value, with Holm's correction.
        tests: number of tests.
    """

    charges: tuple[OperatorFault, ...]
    unfinished: tuple[str, ...]
    p_value: float
    tests: int


def judge_audit(audit: Audit) -> AuditVerdict:
    """Tests every hypothesis, and adds observations that an honest operator cannot cause."""
    findings = [*examine(audit.log), *compare_times(audit.times)]
    corrected = holm(finding.p_value for finding in findings)
    found = [
        _charge_finding(finding, p) for finding, p in sorted(zip(findings, corrected, strict=True), key=lambda pair: pair[1])
        if p <= HONEST_ABOVE
    ]  # fmt: skip
    charges = dict.fromkeys((*_charge_refusals(audit), *_charge_nodes(audit), *_charge_differences(audit), *found))
    unfinished = [f"{refusal.user}: {refusal.error.message}" for refusal in audit.refusals if not _kind_of(refusal.error)]
    return AuditVerdict(tuple(charges), tuple(unfinished), min(corrected, default=1.0), len(findings))


def _charge_refusals(audit: Audit) -> Iterator[OperatorFault]:
    for refusal in audit.refusals:
        kind = _kind_of(refusal.error)
        if kind:
            yield OperatorFault(kind, refusal.user, refusal.error.message)


def _kind_of(error: SealedError) -> str:
    """Returns the charge that a refusal implies; empty for none, such as an exhausted quota."""
    if isinstance(error, EpochRefusedError):
        return _KINDS.get(Reason(error.reason), "log") if error.reason else ""
    if isinstance(error, EvidenceRefusedError):
        return next((_STEPS[step] for step in error.steps if step in _STEPS), "evidence")
    if isinstance(error, NoTokensError):
        return "" if _OUT_OF_TOKENS.search(error.message) else "issuer"
    return ""


def _charge_nodes(audit: Audit) -> Iterator[OperatorFault]:
    for member, steps in sorted(audit.failed_steps.items()):
        for step in sorted(steps & _STEPS.keys()):
            yield OperatorFault(_STEPS[step], "", f"the node that the epoch names for {member} fails the step {step}")


def _charge_differences(audit: Audit) -> Iterator[OperatorFault]:
    for what in audit.differences:
        kind, text = _SAID[what]
        yield OperatorFault(kind, "", text)


def _charge_finding(finding: HypothesisResult, p_value: float) -> OperatorFault:
    about = f" (nodes {' '.join(finding.captured)})" if finding.captured else ""
    user = finding.user if finding.user != "everybody" else ""
    return OperatorFault(finding.family, user, f"{_FOUND[finding.family]}{about}: p = {p_value:.1e}, corrected for all tests")
