"""Checks evidence of AMD SEV-SNP: ARK -> ASK -> VCEK -> report, then what the report says. No I/O, no clock.

The VCEK is a key that only this chip with this firmware has; its certificate names the chip and the firmware's versions (AMD's
"VCEK Certificate and KDS Interface Specification", document 57230, table 8), and the report must say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from cloister.privacy.attestation.base import Findings, Policy, SnpFloor
from cloister.privacy.attestation.certificates import check_chain, elliptic_key, load_certificates
from cloister.privacy.attestation.evidence import Evidence, EvidenceError
from cloister.privacy.attestation.snp_report import SnpReport, Tcb, read_report

AMD_ROOTS = frozenset(
    {
        "9f056bee44377e29308cb5ffa895bdfb62d18881fa6bed8d6f075b0204089cb9",  # ARK-Milan
        "429a69c9422aa258ee4d8db5fcda9c6470ef15f8cd5a9cebd6cbc7d90b863831",  # ARK-Genoa, Siena and Bergamo too
        "4f125410563a2ab9a50356f9243f6fe0b6f73de98603f53f90339c70e9d7ad08",  # ARK-Turin
    }
)
"""SHA-256 of AMD's root keys as SubjectPublicKeyInfo."""

VCEK, ASK, ARK, CRL = "vcek", "ask", "ark", "crl"
"""Names of the extras: DER or PEM."""

_SPL = "1.3.6.1.4.1.3704.1.3."
_BOOT_LOADER, _TEE, _SNP, _MICROCODE, _FMC = (_SPL + part for part in ("1", "2", "3", "8", "9"))
_CHIP_ID = "1.3.6.1.4.1.3704.1.4"
_TURIN_ID_BYTES = 8
_DER_INTEGER = 0x02
_DER_OCTETS = 0x04


class SnpVerifier:
    """Checks `sev-snp` evidence.

    Args:
        roots: SHA-256 of the root keys that are trusted, hex.
    """

    kind = "sev-snp"

    def __init__(self, roots: frozenset[str] = AMD_ROOTS) -> None:
        self._roots = roots

    def verify(self, evidence: Evidence, policy: Policy, now: float) -> Findings:
        """See `Verifier.verify`."""
        return self.verify_report(evidence.report, evidence.extra, evidence.report_data, policy, now)

    def verify_report(self, data: bytes, extra: Mapping[str, bytes], expected: bytes, policy: Policy, now: float) -> Findings:
        """Checks a report by itself.

        Args:
            data: the report.
            extra: `vcek`, `ask`, `ark`, and `crl` if there is one.
            expected: the 64 bytes that its REPORT_DATA must be.
            policy: what is accepted.
            now: Unix seconds.
        """
        findings = Findings()
        try:
            report = read_report(data)
            chain = [_load_one(extra, name) for name in (VCEK, ASK, ARK)]
            if not check_chain(findings, chain, self._roots, now, "AMD"):
                return findings
            if not _check_signature(findings, report, chain[0]):
                return findings  # what nobody signed is not worth reading on
            _check_chip(findings, report, chain[0])
        except EvidenceError as error:
            findings.fail("report-form", error.message)
            return findings
        _check_revocation(findings, chain, extra.get(CRL), policy, now)
        judge_report(findings, report, expected, policy)
        return findings


def judge_report(findings: Findings, report: SnpReport, expected: bytes, policy: Policy) -> None:
    """Adds what a signed report says, measured against a policy."""
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
        f"the report was asked for at VMPL {report.vmpl}; whoever sits at VMPL 0 was not measured by it",
    )
    _check_floor(findings, report, policy)
    measurement = report.measurement.hex()
    allowed = policy.measurements.get(SnpVerifier.kind, frozenset())
    if not allowed:
        findings.doubt(policy, "measurement", f"nobody said which launch measurement is right; this one is {measurement}")
    else:
        findings.check(
            "measurement",
            measurement in allowed,
            "the guest was started from the published image",
            f"the guest was started from another image than the published one: its launch measurement is {measurement}",
        )


def _check_floor(findings: Findings, report: SnpReport, policy: Policy) -> None:
    floor = policy.snp_floor
    if floor is None:
        findings.doubt(policy, "tcb", f"nobody said how new the firmware must be; it is at {report.reported_tcb}")
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


def _load_one(extra: Mapping[str, bytes], name: str) -> x509.Certificate:
    if name not in extra:
        raise EvidenceError(f"the evidence has no {name.upper()} certificate")
    certificates = load_certificates(extra[name])
    if len(certificates) != 1:
        raise EvidenceError(f"the evidence has {len(certificates)} certificates where its {name.upper()} should be")
    return certificates[0]


def _check_signature(findings: Findings, report: SnpReport, vcek: x509.Certificate) -> bool:
    if report.signing_key != 0:
        findings.fail("signing-key", "the report was not signed with the chip's own key (VCEK), but with one of its provider")
        return False
    key = elliptic_key(vcek)
    try:
        key.verify(encode_dss_signature(report.r, report.s), report.signed, ECDSA(SHA384()))
    except InvalidSignature:
        return findings.check("report-signature", False, "", "the report was altered: the chip's signature does not fit")
    return findings.check("report-signature", True, f"the report was signed by the chip (version {report.version})", "")


def _check_chip(findings: Findings, report: SnpReport, vcek: x509.Certificate) -> None:
    length = _TURIN_ID_BYTES if report.is_turin else len(report.chip_id)
    named = _read_extension(vcek, _CHIP_ID)
    named = named[2:] if named[:2] == bytes((_DER_OCTETS, len(named) - 2)) else named
    is_same = not report.is_chip_masked and any(named) and named == report.chip_id[:length]
    findings.check(
        "chip",
        is_same and not any(report.chip_id[length:]),
        "the report names the chip of the certificate",
        "the report names another chip than its certificate (CHIP_ID)",
    )
    tcb = Tcb(
        boot_loader=_read_number(vcek, _BOOT_LOADER),
        tee=_read_number(vcek, _TEE),
        snp=_read_number(vcek, _SNP),
        microcode=_read_number(vcek, _MICROCODE),
        fmc=_read_number(vcek, _FMC) if report.is_turin else None,
    )
    findings.check(
        "chip-tcb",
        tcb == report.reported_tcb,
        "the report names the firmware of the certificate",
        f"the report names firmware {report.reported_tcb}, but the certificate is for {tcb}",
    )


def _read_extension(certificate: x509.Certificate, oid: str) -> bytes:
    try:
        value = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
    except x509.ExtensionNotFound:
        raise EvidenceError(f"the VCEK certificate lacks the extension {oid}") from None
    assert isinstance(value, x509.UnrecognizedExtension)
    return value.value


def _read_number(certificate: x509.Certificate, oid: str) -> int:
    value = _read_extension(certificate, oid)
    if len(value) < 3 or value[0] != _DER_INTEGER or value[1] != len(value) - 2:
        raise EvidenceError(f"the VCEK certificate's extension {oid} is no number")
    return int.from_bytes(value[2:], "big", signed=True)


def _check_revocation(
    findings: Findings, chain: Sequence[x509.Certificate], encoded: bytes | None, policy: Policy, now: float
) -> None:
    """AMD's list is signed by the ARK and names revoked ASKs."""
    if encoded is None:
        findings.doubt(policy, "revocation", "nobody looked whether AMD revoked the certificates (no CRL in the evidence)")
        return
    _, ask, ark = chain
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
    elif crl.get_revoked_certificate_by_serial_number(ask.serial_number) is not None:
        findings.fail("revocation", "AMD revoked the key that signed the chip's certificate")
    else:
        findings.prove("revocation", "AMD did not revoke the certificates")
