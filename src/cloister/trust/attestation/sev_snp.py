"""Checks evidence of AMD SEV-SNP: root, intermediate and signing key (`snp_keys`), report, then the report's content. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from cloister.trust.attestation.base import AttestationPolicy, Findings, SnpFloor, check_register
from cloister.trust.attestation.certificates import check_chain, elliptic_key
from cloister.trust.attestation.evidence import Evidence, EvidenceError
from cloister.trust.attestation.snp_report import CRL, SnpReport, Tcb, check_key, load_chain, read_report

AMD_ROOTS = frozenset(
    {
        "9f056bee44377e29308cb5ffa895bdfb62d18881fa6bed8d6f075b0204089cb9",  # ARK-Milan
        "429a69c9422aa258ee4d8db5fcda9c6470ef15f8cd5a9cebd6cbc7d90b863831",  # ARK-Genoa, Siena and Bergamo too
        "4f125410563a2ab9a50356f9243f6fe0b6f73de98603f53f90339c70e9d7ad08",  # ARK-Turin
    }
)
"""SHA-256 of AMD's root keys as SubjectPublicKeyInfo."""


class SnpVerifier:
    """Checks `sev-snp` evidence.

    Args:
        roots: SHA-256 of the trusted root keys, hex.
    """

    kind = "sev-snp"

    def __init__(self, roots: frozenset[str] = AMD_ROOTS) -> None:
        self._roots = roots

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """See `Verifier.verify`."""
        return self.verify_report(evidence.report, evidence.extra, evidence.report_data, policy, now)

    def verify_report(
        self, data: bytes, extra: Mapping[str, bytes], expected: bytes, policy: AttestationPolicy, now: float
    ) -> Findings:
        """Checks a single report.

        Args:
            data: the report.
            extra: the certificates that `snp_keys.CHAINS` names for the report's signing key, and `crl` if there is one.
            expected: the required REPORT_DATA, 64 bytes.
            policy: the client's policy.
            now: Unix seconds.
        """
        findings = Findings()
        try:
            report = read_report(data)
            chain = load_chain(extra, report.signing_key)
            if not check_chain(findings, chain, self._roots, now, "AMD"):
                return findings
            if not _check_signature(findings, report, chain[0]):
                return findings  # do not check the content of an unsigned report
            check_key(findings, report, chain[0], policy)
        except EvidenceError as error:
            findings.fail("report-form", error.message)
            return findings
        _check_revocation(findings, chain, extra.get(CRL), policy, now)
        judge_report(findings, report, expected, policy)
        return findings


def judge_report(findings: Findings, report: SnpReport, expected: bytes, policy: AttestationPolicy) -> None:
    """Checks the content of a signed report against a policy."""
    findings.check(
        "report-data",
        report.report_data == expected,
        "the processor signed this very statement",
        "the processor signed another statement than the one that was sent (REPORT_DATA differs)",
    )
    findings.check(
        "debug",
        not report.allows_debug,
        "the guest cannot be debugged by its host",
        "the guest allows DEBUG: its host can read its memory",
    )
    findings.check(
        "migration",
        not report.allows_migration,
        "no migration agent can carry the guest away",
        "the guest allows a migration agent, which could carry its memory to another machine",
    )
    findings.check(
        "vmpl",
        report.vmpl == 0,
        "the report was asked for at the guest's highest level (VMPL 0)",
        f"the report was asked for at VMPL {report.vmpl}; what runs at VMPL 0 was not measured by it",
    )
    _check_floor(findings, report, policy)
    kind, image, given = (
        SnpVerifier.kind,
        "the measurement of the started image (MEASUREMENT)",
        "what the host gave as HOST_DATA",
    )
    check_register(findings, policy, "measurement", kind, report.measurement, image)
    check_register(findings, policy, "host-data", f"{kind}-host-data", report.host_data, given, may_be_zero=True)


def _check_floor(findings: Findings, report: SnpReport, policy: AttestationPolicy) -> None:
    floor = policy.snp_floor
    if floor is None:
        findings.doubt(policy, "tcb", f"no minimum firmware version is given; it is at {report.reported_tcb}")
        return
    low = next((tcb for tcb in (report.reported_tcb, report.launch_tcb) if not _reaches(tcb, floor)), None)
    findings.check(
        "tcb",
        low is None,
        f"the firmware is new enough ({report.reported_tcb})",
        f"the firmware is too old ({low}); wanted are at least boot loader {floor.boot_loader}, TEE {floor.tee}, "
        f"SNP {floor.snp}, microcode {floor.microcode}",
    )


def _reaches(tcb: Tcb, floor: SnpFloor) -> bool:
    return (
        tcb.boot_loader >= floor.boot_loader
        and tcb.tee >= floor.tee
        and tcb.snp >= floor.snp
        and tcb.microcode >= floor.microcode
    )


def _check_signature(findings: Findings, report: SnpReport, leaf: x509.Certificate) -> bool:
    key = elliptic_key(leaf)
    try:
        key.verify(encode_dss_signature(report.r, report.s), report.signed, ECDSA(SHA384()))
    except InvalidSignature:
        return findings.check(
            "report-signature", False, "", "the report was altered: its signature does not fit the certificate"
        )
    return findings.check("report-signature", True, f"the report was signed by the processor (version {report.version})", "")


def _check_revocation(
    findings: Findings, chain: Sequence[x509.Certificate], encoded: bytes | None, policy: AttestationPolicy, now: float
) -> None:
    """AMD's list is signed by the ARK and names revoked ASKs and ASVKs."""
    if encoded is None:
        findings.doubt(policy, "revocation", "revocation by AMD was not checked (no CRL in the evidence)")
        return
    _, intermediate, ark = chain
    try:
        is_pem = encoded.lstrip().startswith(b"-----BEGIN")
        crl = x509.load_pem_x509_crl(encoded) if is_pem else x509.load_der_x509_crl(encoded)
        key = ark.public_key()
        is_signed = crl.is_signature_valid(key)  # type: ignore[arg-type]  # a key that cannot sign raises TypeError
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        findings.fail("revocation", "AMD's list of revoked certificates cannot be read")
        return
    moment = datetime.fromtimestamp(now, UTC)
    if not is_signed or crl.issuer != ark.subject:
        findings.fail("revocation", "the list of revoked certificates is not AMD's")
    elif crl.next_update_utc is None or not crl.last_update_utc <= moment <= crl.next_update_utc:
        findings.fail("revocation", "AMD's list of revoked certificates is out of date")
    elif crl.get_revoked_certificate_by_serial_number(intermediate.serial_number) is not None:
        findings.fail("revocation", "AMD revoked the key that certifies the processor's (its ASK or ASVK)")
    else:
        findings.prove("revocation", "AMD did not revoke the certificates")
