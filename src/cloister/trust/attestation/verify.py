"""The complete verification of a node's evidence: its statement, its processor, its GPUs. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from cryptography import x509

from cloister.trust.attestation.base import MAX_CLOCK_SKEW_S, AttestationPolicy, Findings, Verifier
from cloister.trust.attestation.certificates import digest_key, load_certificates
from cloister.trust.attestation.configuration import configuration_digest, find_differences
from cloister.trust.attestation.evidence import Evidence, EvidenceError, Statement, read_statement
from cloister.trust.attestation.nitro import NitroVerifier, read_document
from cloister.trust.attestation.nvidia import GpuVerifier, chain_extra, list_gpus
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.snp_report import read_report
from cloister.trust.attestation.software import SoftwareVerifier
from cloister.trust.attestation.tdx import TdxVerifier, read_quote
from cloister.trust.attestation.unit import check_members, check_unit, read_members

_MOST_NAMED = 8

HOST = "host"
"""The measure for excluding the host's root. Only hardware can prove it, so it is not checked here."""

VERIFIERS: Mapping[str, Verifier] = MappingProxyType(
    {verifier.kind: verifier for verifier in (SoftwareVerifier(), SnpVerifier(), TdxVerifier(), NitroVerifier())}
)


def verify_evidence(
    evidence: Evidence,
    policy: AttestationPolicy,
    now: float,
    *,
    verifiers: Mapping[str, Verifier] = VERIFIERS,
) -> Findings:
    """Returns all verification steps; `accepted` is whether a prompt may be sent to the node.

    Args:
        now: Unix seconds.
        verifiers: by kind.

    Raises:
        AttestationError: a check cannot run, because a library is missing.
    """
    findings = Findings()
    try:
        statement = read_statement(evidence.statement)
    except EvidenceError as error:
        findings.fail("statement", error.message)
        return findings
    verifier = verifiers.get(evidence.kind)
    is_software = evidence.kind == SoftwareVerifier.kind
    if verifier is None or not (is_software or evidence.kind in policy.kinds):
        accepted = ", ".join(sorted(policy.kinds))
        findings.fail(
            "kind",
            f"evidence of kind {evidence.kind} is not accepted; accepted are {accepted}: take a node with one of these, or "
            "name another in the policy (kinds)",
        )
        return findings
    findings.extend(verifier.verify(evidence, policy, now))
    findings.extend(GpuVerifier().verify(evidence, policy, now))
    if findings.accepted:  # do not check an unattested statement
        judge_statement(findings, statement, policy, now)
        _check_unit_members(findings, evidence, statement, policy, now, verifiers)
    return findings


def _check_unit_members(
    findings: Findings,
    evidence: Evidence,
    statement: Statement,
    policy: AttestationPolicy,
    now: float,
    verifiers: Mapping[str, Verifier],
) -> None:
    check_members(findings, evidence, statement, lambda member: verify_evidence(member, policy, now, verifiers=verifiers))
    if findings.accepted:
        counts = Counter(chip for one in list_machines(evidence) for chip in name_chips(one))
        if any(count > 1 for count in counts.values()):
            findings.fail("chip", "two machines of the node's unit are on the same chip, so they are one; take another node")


def list_machines(evidence: Evidence) -> list[Evidence]:
    """Returns a node's evidence, and that of each other machine of its unit. Raises EvidenceError if one cannot be read."""
    return [evidence, *(member for member, _ in read_members(evidence))]


def judge_statement(findings: Findings, statement: Statement, policy: AttestationPolicy, now: float) -> None:
    """Checks the content of a statement against a policy."""
    if now < statement.not_before - MAX_CLOCK_SKEW_S:
        findings.fail("expiry", "the statement does not hold yet; check this machine's clock")
    else:
        left_s = statement.not_after - int(now)
        findings.check(
            "expiry",
            left_s > 0,
            f"the statement is fresh: it holds for another {left_s // 60} min",
            f"the statement is stale: it ended {-left_s} s ago",
        )
    findings.check(
        "profile",
        statement.profile == policy.profile,
        f"the node runs under the profile {statement.profile}",
        f"the node runs under the profile {statement.profile}, but {policy.profile} was asked for",
    )
    _check_listed(
        findings, policy, "profile-digest", statement.profile_digest, policy.profile_digests, "what the profile rules"
    )
    _check_listed(findings, policy, "release", statement.release, policy.releases, "the code that runs")
    _check_model(findings, statement, policy)
    _check_configuration(findings, statement, policy)
    _check_hardening(findings, statement, policy)
    check_unit(findings, statement)


def _check_listed(
    findings: Findings, policy: AttestationPolicy, slug: str, digest: str, known: frozenset[str], what: str
) -> None:
    if not known:
        findings.doubt(policy, slug, f"there is no reference value for {what}; the node says {digest}")
    else:
        findings.check(
            slug,
            digest in known,
            f"{what} is what was published ({digest[:16]})",
            f"{what} is not what was published; the node says {digest}",
        )


def _check_model(findings: Findings, statement: Statement, policy: AttestationPolicy) -> None:
    if not policy.models:
        findings.leave_open("model", f"any model is accepted; this one is {statement.model}")
    else:
        findings.check(
            "model",
            statement.model in policy.models,
            f"the model is the one that was asked for ({statement.model[:16]})",
            f"the model is another one than was asked for: {statement.model}",
        )


def _check_configuration(findings: Findings, statement: Statement, policy: AttestationPolicy) -> None:
    digest = configuration_digest(statement.configuration)
    if not policy.configuration:
        findings.leave_open("configuration", f"any configuration is accepted; this one is {digest}")
        return
    differences = find_differences(statement.configuration, policy.configuration)
    more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
    findings.check(
        "configuration",
        not differences,
        f"the configuration is what was published, all {len(statement.configuration)} entries ({digest[:16]})",
        f"the configuration is not what was published: {'; '.join(differences[:_MOST_NAMED])}{more}",
    )


def _check_hardening(findings: Findings, statement: Statement, policy: AttestationPolicy) -> None:
    measures = {name: told for name, told in statement.hardening.items() if name != HOST}
    missing = {name for name, told in measures.items() if told.startswith("missing:")}
    applied = {name.rpartition(".")[2] for name in measures.keys() - missing}
    wanted = policy.hardening - applied | {name for name in missing if name.rpartition(".")[2] in policy.hardening}
    if wanted:
        findings.fail("hardening", f"hardening measures are missing: {', '.join(sorted(wanted))}")
    elif missing or not measures:
        shown = ", ".join(sorted(missing)) or "all of them"
        findings.doubt(policy, "hardening", f"hardening measures that are not in force: {shown}")
    else:
        num_processes = len({name.rpartition(".")[0] for name in measures})
        told = f"{len(applied)} hardening measures are in force, {len(measures)} times in {num_processes} processes"
        findings.prove("hardening", f"{told}: {', '.join(sorted(applied))}")


# Identifies the chips of a node's evidence, so that one chip cannot count as two nodes.
#
# Names are compared only after the evidence was verified: before that they are untrusted.

_SGX_EXTENSIONS: Final = x509.ObjectIdentifier("1.2.840.113741.1.13.1")
_PPID: Final = bytes.fromhex("060a2a864886f84d010d01010410")
"""OID 1.2.840.113741.1.13.1.1 and the header of the 16 bytes after it (Intel's PCK certificate profile, section 1.3.5)."""


def name_chips(evidence: Evidence) -> frozenset[str]:
    """Returns a name for each signing chip: the processor's (`name_processor`), and the identity key of each GPU.

    Raises:
        EvidenceError: a report or a certificate cannot be read.
    """
    processor = name_processor(evidence)
    return frozenset((*(() if processor is None else (processor,)), *_name_gpus(evidence)))


def name_processor(evidence: Evidence) -> str | None:
    """Returns AMD's CHIP_ID, Intel's platform (PPID), or for Nitro the EC2 instance that the enclave is cut from.

    AWS identifies no chip. The instance is the unit that its owner can control, besides AWS.

    Returns:
        None for software, and for a platform whose owner masks its identity (SEV-SNP, MASK_CHIP_ID).

    Raises:
        EvidenceError: a report or a certificate cannot be read.
    """
    if evidence.kind == SnpVerifier.kind:
        report = read_report(evidence.report)
        return None if report.is_chip_masked else f"sev-snp {report.chip_id.hex()}"
    if evidence.kind == TdxVerifier.kind:
        leaf = load_certificates(read_quote(evidence.report).pck_chain)[0]
        return f"tdx {_read_platform(leaf) or digest_key(leaf.public_key())}"
    if evidence.kind == NitroVerifier.kind:
        instance, _, _ = read_document(evidence.report).module_id.partition("-enc")  # i-INSTANCE-encENCLAVE
        return f"nitro {instance}" if instance else None
    return None


def _name_gpus(evidence: Evidence) -> Iterator[str]:
    for number in list_gpus(evidence.extra):
        chain = load_certificates(evidence.extra.get(chain_extra(number), b""))
        device = chain[min(1, len(chain) - 1)]  # the leaf belongs to the firmware, its issuer to the GPU
        yield f"gpu {digest_key(device.public_key())}"


def _read_platform(leaf: x509.Certificate) -> str:
    try:
        value = leaf.extensions.get_extension_for_oid(_SGX_EXTENSIONS).value
    except x509.ExtensionNotFound:
        return ""
    assert isinstance(value, x509.UnrecognizedExtension)
    _, head, rest = value.value.partition(_PPID)
    return rest[:16].hex() if head else ""
