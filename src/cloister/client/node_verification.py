"""Verifies that a node is the one in the epoch, and that its evidence satisfies the policy. No I/O; time is an argument."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from cloister.client.errors import EpochRefusedError
from cloister.client.limits import Limits
from cloister.policy.verdict import Profile
from cloister.trust.attestation import (
    AttestationError,
    AttestationPolicy,
    Evidence,
    EvidenceError,
    Findings,
    Outcome,
    Statement,
    read_evidence,
    read_statement,
)
from cloister.trust.attestation.measuring import measure_profile
from cloister.trust.attestation.software import SoftwareVerifier
from cloister.trust.attestation.unit import read_members
from cloister.trust.attestation.verify import list_machines, name_chips, name_processor, verify_evidence
from cloister.trust.sealing import KEMS, KeyConfigurationError, choose_configuration, parse_keys
from cloister.trust.transparency.checks import Logged, VerifiedEpoch
from cloister.trust.transparency.epoch import Epoch, NodeEntry
from cloister.trust.transparency.membership import Membership, find_member
from cloister.trust.transparency.refusal import TransparencyError
from cloister.trust.transparency.trust import Trust


def fill_policy(policy: AttestationPolicy, believed: Logged) -> AttestationPolicy:
    """Returns the policy for an epoch: unless the user names digests, releases published in the log are accepted.

    Args:
        policy: the user's policy; its digests and requirements are kept.
        believed: a verified epoch, and the release that it names.
    """
    release = believed.release
    launch = {register: frozenset({value}) for register, value in release.launch.items()}
    return replace(
        policy,
        profile=believed.epoch.profile,
        releases=policy.releases or frozenset({release.digest}),
        models=policy.models or frozenset({release.model}),
        profile_digests=policy.profile_digests or frozenset({release.profile_digest}),
        configuration=policy.configuration or release.configuration,
        measurements={**launch, **policy.measurements},
    )


def know_profile(policy: AttestationPolicy) -> AttestationPolicy:
    """Returns the policy for evidence without a log or release: the rules of profiles are those of this program."""
    if policy.profile_digests or policy.profile not in list(Profile):
        return policy
    return replace(policy, profile_digests=frozenset({measure_profile(policy.profile)}))


def judge_node(
    node: NodeEntry, evidence: bytes | None, believed: Logged, trust: Trust, policy: AttestationPolicy, now: float
) -> Findings:
    """Returns every step of the verification of one node; requests may be sent to it if they are `accepted`.

    Args:
        node: the node's entry in the epoch.
        evidence: this node's evidence from the gateway; None if there is none.
        policy: filled (`fill_policy`).
        now: Unix seconds.
    """
    findings = Findings()
    if evidence is None:
        findings.fail("evidence", "the gateway does not serve this node's evidence")
        return findings
    listed = hashlib.sha256(evidence).hexdigest() == node.evidence_sha256
    if not findings.check(
        "listed", listed, "the evidence is the one that the epoch names", "the evidence is not the one that the epoch names"
    ):
        return findings
    try:
        read = read_evidence(evidence)
        statement = read_statement(read.statement)
        members = read_members(read)
    except EvidenceError as error:
        findings.fail("evidence", error.message)
        return findings
    _bind(findings, node, statement)
    judge_keys(findings, "the node", statement.keys, policy)
    if isinstance(believed, VerifiedEpoch):
        _check_member(findings, node, [read, *(one for one, _ in members)], believed.membership)
    _check_life(findings, statement, believed)
    for stated in (statement, *(of_member for _, of_member in members)):
        _check_nonce(findings, stated, believed, trust, policy, now)
    try:
        findings.extend(verify_evidence(read, policy, now))
    except AttestationError as error:
        findings.fail("verifier", error.message)
    return findings


def refuse_shared_chips(findings: Mapping[str, Findings], evidence: Mapping[str, bytes], limits: Limits) -> None:
    """Adds a failed step to every node that shares a chip with another node, or a machine of its unit does: capturing one chip
    must not give two shares.

    A node whose processor is not identified could share any other's, so it fails too if another node is on hardware.

    Args:
        findings: findings of each node, by node_id.
        evidence: the documents, by node_id.
        limits: whether unidentified processors are accepted.
    """
    read = {node_id: list_machines(read_evidence(evidence[node_id])) for node_id, found in findings.items() if found.accepted}
    num_on_hardware = sum(_is_on_hardware(one) for machines in read.values() for one in machines)
    # evidence that no chip signed identifies none
    chips = {node_id: [name for one in machines for name in name_chips(one)] for node_id, machines in read.items()}

    def is_masked(node_id: str) -> bool:
        return any(_is_on_hardware(one) and name_processor(one) is None for one in read[node_id])

    counts = Counter(chip for of_node in chips.values() for chip in of_node)
    for node_id, of_node in chips.items():
        if any(counts[chip] > 1 for chip in of_node):
            findings[node_id].fail(
                "chip", "another node of the epoch is on the same chip, so one owner would have both shares; run one node on it"
            )
        elif is_masked(node_id) and num_on_hardware > 1 and not limits.accept_masked_chips:
            findings[node_id].fail(
                "chip",
                "the evidence names no processor (its host masks CHIP_ID), so it could be the one of another node; have it "
                "unmasked, or accept that with accept_masked_chips (--accept-masked-chips)",
            )


def _is_on_hardware(evidence: Evidence) -> bool:
    return evidence.kind != SoftwareVerifier.kind


def _check_member(findings: Findings, node: NodeEntry, machines: Sequence[Evidence], membership: Membership) -> None:
    """The machines of a node's unit sign as the same member: that a machine is attested does not make it the operator's."""
    for number, evidence in enumerate(machines):
        member = find_member(membership, evidence)
        of = f" of machine {number} of its unit" if number else ""
        findings.check(
            "member",
            member is not None and member.name == node.member,
            f"{node.member} of membership {membership.number} signed the statement{of}",
            f"the epoch calls the node {node.member}, which did not sign the statement{of}",
        )


def _bind(findings: Findings, node: NodeEntry, statement: Statement) -> None:
    findings.check(
        "key",
        node.keys in (statement.keys, b"") and statement.node_id == node.node_id,
        "the key that is sealed to is the one that the evidence binds",
        "the epoch names another key for this node than its evidence binds",
    )
    findings.check(
        "capacity",
        statement.capacity == node.capacity,
        f"the node states the capacity that it is drawn by ({node.capacity})",
        f"the node is drawn by the capacity {node.capacity}, but states {statement.capacity}",
    )


def _check_life(findings: Findings, statement: Statement, believed: Logged) -> None:
    """Checks are not repeated before the epoch ends, so evidence that expires earlier would be used after its expiry."""
    if statement.not_after < believed.epoch.not_after:
        findings.fail("life", "the evidence ends before the epoch that names the node, which would be sent to afterwards")


def _check_nonce(
    findings: Findings, statement: Statement, believed: Logged, trust: Trust, policy: AttestationPolicy, now: float
) -> None:
    """The nonce of evidence is a checkpoint of the log: evidence cannot be older than the checkpoint that witnesses
    cosigned."""
    if not statement.checkpoint:
        findings.doubt(policy, "nonce", "the evidence names no checkpoint of the log, so nothing shows when it was made")
        return
    try:
        checkpoint, _ = trust.open_checkpoint(statement.checkpoint, now)
    except TransparencyError as error:
        findings.fail("nonce", f"the checkpoint that the evidence was made for is refused: {error.message}")
        return
    findings.check(
        "nonce",
        checkpoint.size <= believed.checkpoint.size,
        "the evidence was made for a checkpoint that witnesses cosigned lately",
        "the evidence was made for a checkpoint that the log has not reached yet",
    )


STEP: Final = "key-exchange"
_REMEDY: Final = "install the wheel of `cryptography`, which brings one that does"


def judge_keys(findings: Findings, whose: str, keys: bytes, policy: AttestationPolicy) -> None:
    """Adds a step for the encryption of requests to the holder of `keys`.

    An X25519 key alone adds no step unless the policy requires more: every older program has one.

    Args:
        whose: "the node" or "the gateway".
        keys: `application/ohttp-keys`.
    """
    try:
        kem = choose_configuration(parse_keys(keys)).kem
    except KeyConfigurationError as error:
        findings.fail(STEP, f"{whose} offers no key that can be sealed to: {error.message}")
        return
    if kem.is_post_quantum:
        findings.prove(STEP, f"requests to {whose} are sealed with {kem.name}: a quantum computer does not open recorded ones")
    elif policy.post_quantum and not any(one.is_post_quantum for one in KEMS):
        findings.fail(STEP, "the policy asks for post-quantum encryption, and this machine's OpenSSL has no ML-KEM; " + _REMEDY)
    elif policy.post_quantum:
        findings.fail(STEP, f"{whose} offers {kem.name} only, and the policy asks for post-quantum encryption; update {whose}")


def check_gateway(epoch: Epoch, policy: AttestationPolicy) -> None:
    """Refuses an epoch whose gateway has no key that the policy accepts.

    Raises:
        EpochRefusedError: nothing was sent.
    """
    findings = Findings()
    judge_keys(findings, "the gateway", epoch.gateway.keys, policy)
    for failed in findings.of(Outcome.FAILED):
        raise EpochRefusedError(f"Nothing was sent: {failed.text}.", failed.slug)
