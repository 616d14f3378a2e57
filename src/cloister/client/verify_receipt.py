"""Verifies a stored receipt offline: its signer, the signer's release, and the request and answer it covers. No I/O.

Every check is made as of the time at which clients could first verify the epoch: certificates and cosignatures that have
expired since do not invalidate a receipt.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from cloister.client.node_verification import fill_policy, judge_node, know_profile
from cloister.trust.attestation import (
    AttestationError,
    AttestationPolicy,
    EvidenceError,
    Findings,
    Statement,
    read_evidence,
    read_statement,
)
from cloister.trust.attestation.verify import verify_evidence
from cloister.trust.receipts import (
    SALT_BYTES,
    Claims,
    Receipt,
    ReceiptError,
    digest_pieces,
    digest_request,
    is_signed,
    read_jws,
)
from cloister.trust.transparency.checks import recall
from cloister.trust.transparency.epoch import epoch_leaf
from cloister.trust.transparency.merkle import hash_leaf
from cloister.trust.transparency.refusal import TransparencyError
from cloister.trust.transparency.trust import Trust


@dataclass(frozen=True)
class Shown:
    """What the holder presents with the receipt; None for anything not presented.

    Attributes:
        request: the exact content of the request.
        answer: the exact content of the answer.
        method, target: of the request; target is path and query.
    """

    request: bytes | None = field(default=None, repr=False)
    answer: bytes | None = field(default=None, repr=False)
    method: str = "POST"
    target: str = "/v1/chat/completions"


@dataclass(frozen=True)
class Proof:
    """The result of the verification.

    Attributes:
        findings: every step.
        claims: the signed claims; None if malformed.
        statement: the node's statement; None if malformed.
        release: number and version of the release in the log; empty if no log was checked.
        moment: Unix seconds as of which the node was verified; 0 if it was not.
    """

    findings: Findings
    claims: Claims | None = None
    statement: Statement | None = None
    release: str = ""
    moment: float = 0.0


def verify_receipt(receipt: Receipt, shown: Shown, trust: Trust | None, policy: AttestationPolicy) -> Proof:
    """Runs every step, even after failures.

    Args:
        trust: keys of log, witnesses and releases; None skips the check that the node was in a public epoch.
        policy: requirements for nodes; unset ones are filled from the log.
    """
    findings = Findings()
    try:
        claims, signature = read_jws(receipt.jws)
        statement = read_statement(read_evidence(receipt.evidence).statement)
    except (ReceiptError, EvidenceError) as error:
        findings.fail("receipt", error.message)
        return Proof(findings)
    _check_signature(findings, receipt, claims, signature, statement)
    release, moment = _check_node(findings, receipt, claims, statement, trust, policy)
    _check_texts(findings, receipt, claims, shown)
    return Proof(findings, claims, statement, release, moment)


def _check_signature(findings: Findings, receipt: Receipt, claims: Claims, signature: bytes, statement: Statement) -> None:
    findings.check(
        "signature",
        is_signed(claims, signature, statement.receipt_key),
        "the key that the evidence binds signed the receipt",
        "the key that the evidence binds did not sign this receipt",
    )
    findings.check(
        "evidence",
        hashlib.sha256(receipt.evidence).hexdigest() == claims.evidence,
        "the evidence is the one that the receipt names",
        "the evidence in the file is not the one that the receipt names",
    )
    findings.check(
        "profile",
        claims.profile == statement.profile,
        f"the node answered under the profile {claims.profile}, as its evidence says",
        f"the node signed for the profile {claims.profile}, but its evidence says {statement.profile}",
    )


def _check_node(
    findings: Findings, receipt: Receipt, claims: Claims, statement: Statement, trust: Trust | None, policy: AttestationPolicy
) -> tuple[str, float]:
    try:
        if trust is None:
            findings.leave_open(
                "epoch", "no keys of a log were given, so nothing shows that this node was in the list that everybody was given"
            )
            wanted = know_profile(replace(policy, profile=statement.profile))
            if not wanted.releases:
                findings.leave_open("release-log", f"whether release {statement.release} was ever published is not known")
                wanted = replace(wanted, releases=frozenset({statement.release}))
            findings.extend(verify_evidence(read_evidence(receipt.evidence), wanted, statement.not_before))
            return "", statement.not_before
        return _check_epoch(findings, receipt, claims, trust, policy)
    except AttestationError as error:
        findings.fail("verifier", error.message)
        return "", 0.0


def _check_epoch(
    findings: Findings, receipt: Receipt, claims: Claims, trust: Trust, policy: AttestationPolicy
) -> tuple[str, float]:
    try:
        believed, moment = recall(receipt.bundle, trust)
    except TransparencyError as error:
        findings.fail("epoch", f"the epoch in the file is refused: {error.message}")
        return "", 0.0
    epoch, release = believed.epoch, believed.release
    findings.check(
        "epoch",
        hash_leaf(epoch_leaf(epoch)).hex() == claims.epoch,
        f"epoch {epoch.epoch}, which the receipt names, is in the log {trust.log.name}, cosigned by enough witnesses",
        "the epoch in the file is not the one that the receipt names",
    )
    node = next((node for node in epoch.nodes if node.evidence_sha256 == claims.evidence), None)
    if node is None:
        findings.fail("listed", "no node of that epoch has this evidence")
        return "", moment
    findings.extend(judge_node(node, receipt.evidence, believed, trust, fill_policy(policy, believed), moment))
    return f"{release.number} (version {release.version}, {release.digest})", moment


def _check_texts(findings: Findings, receipt: Receipt, claims: Claims, shown: Shown) -> None:
    if shown.request is None and shown.answer is None:
        findings.leave_open("texts", "neither request nor answer is shown, so this says nothing of what was asked or answered")
        return
    if len(receipt.salt) != SALT_BYTES:
        findings.fail("salt", "the file has no salt, so no text can be held against it; ask its holder for the whole file")
        return
    if shown.request is not None:
        findings.check(
            "request",
            digest_request(receipt.salt, shown.method, shown.target, shown.request) == claims.request,
            f"the request is the one that was shown ({shown.method} {shown.target})",
            f"the receipt is about another request than {shown.method} {shown.target} with the content that was shown",
        )
    if shown.answer is not None:
        findings.check(
            "answer",
            digest_pieces(receipt.salt, (shown.answer,)) == claims.answer,
            f"the answer, with status {claims.status}, is the one that was shown, to its last byte",
            "the receipt is about another answer than the one that was shown, or that one was cut or changed",
        )
