"""Checks evidence of Intel TDX: signatures, collateral and TCB by dcap-qvl, then what the quote says. No I/O, no clock.

Collateral (TCB info, identity of the quoting enclave, revocation lists) is signed by Intel and travels with the evidence, so a
client asks nobody; it expires after a month, and a node then fetches it anew.
"""

from __future__ import annotations

from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.privacy.attestation.base import AttestationError, AttestationPolicy, Findings
from cloister.privacy.attestation.certificates import check_chain, digest_key, load_certificates
from cloister.privacy.attestation.evidence import Evidence, EvidenceError
from cloister.privacy.attestation.registers import check_register
from cloister.privacy.attestation.td_quote import TdReport, read_quote

INTEL_ROOTS = frozenset({"a0af031289f5d5d4132f9186068a7fc13628633ba235777472e29b6b6c67a49e"})
"""SHA-256 of the key of Intel's SGX Root CA as SubjectPublicKeyInfo; dcap-qvl brings the certificate itself."""

COLLATERAL = "collateral"
"""Name of the extra: JSON as dcap-qvl reads it."""

_ATTRIBUTES = ("Debug mode", "SEPT_VE_DISABLE", "TD migration", "service TD")
"""What dcap-qvl refuses of a quote whose signatures it has checked; the reason is then given in our words."""

_STATES = {
    "OutOfDate": "its firmware is out of date",
    "OutOfDateConfigurationNeeded": "its firmware is out of date, and its configuration must change",
    "ConfigurationNeeded": "its configuration must change",
    "SWHardeningNeeded": "software on it must be hardened",
    "ConfigurationAndSWHardeningNeeded": "its configuration must change, and software on it must be hardened",
    "Revoked": "Intel revoked it",
}


class TdxVerifier:
    """Checks `tdx` evidence.

    Args:
        root: the root that is trusted; Intel's unless given.
    """

    kind = "tdx"

    def __init__(self, root: x509.Certificate | None = None) -> None:
        self._root = root
        self._roots = INTEL_ROOTS if root is None else frozenset({digest_key(root.public_key())})

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """See `Verifier.verify`."""
        return self.verify_quote(evidence.report, evidence.extra.get(COLLATERAL, b""), evidence.report_data, policy, now)

    def verify_quote(self, data: bytes, collateral: bytes, expected: bytes, policy: AttestationPolicy, now: float) -> Findings:
        """Checks a quote by itself.

        Args:
            data: the quote.
            collateral: Intel's collateral for it, JSON.
            expected: the 64 bytes that its REPORT_DATA must be.
            policy: what is accepted.
            now: Unix seconds.

        Raises:
            AttestationError: dcap-qvl is not installed.
        """
        library = _import_library()
        findings = Findings()
        try:
            quote = read_quote(data)
            if not check_chain(findings, load_certificates(quote.pck_chain), self._roots, now, "Intel"):
                return findings
        except EvidenceError as error:
            findings.fail("report-form", error.message)
            return findings
        if not collateral:
            findings.fail("collateral", "the evidence has no collateral of Intel, so its platform cannot be judged")
            return findings
        try:
            read = library.QuoteCollateralV3.from_json(collateral.decode())
            verified = self._verify(library, data, read, int(now))
        except ValueError as error:
            if any(words in str(error) for words in _ATTRIBUTES):
                judge_td(findings, quote.report, expected, policy)
            if findings.accepted:
                findings.fail("report-signature", f"the quote does not hold against Intel's collateral: {_shorten(error)}")
            return findings
        findings.prove("report-signature", "the quote was signed on a platform of Intel, whose collateral is up to date")
        _check_platform(findings, verified.status, verified.advisory_ids, policy)
        judge_td(findings, quote.report, expected, policy)
        return findings

    def _verify(self, library: Any, data: bytes, collateral: Any, now: int) -> Any:
        if self._root is None:
            return library.verify(data, collateral, now)
        return library.verify_with_root_ca(data, collateral, self._root.public_bytes(Encoding.DER), now)


def judge_td(findings: Findings, report: TdReport, expected: bytes, policy: AttestationPolicy) -> None:
    """Adds what a signed quote says, measured against a policy."""
    findings.check(
        "report-data",
        report.report_data == expected,
        "the processor signed this very statement",
        "the processor signed another statement than the one that was sent (REPORT_DATA differs)",
    )
    findings.check(
        "debug",
        not report.allows_debug,
        "the trust domain cannot be debugged by its host",
        "the trust domain allows DEBUG (TUD attributes): its host can read its memory",
    )
    findings.check(
        "sept-ve",
        report.disables_sept_ve,
        "the host cannot take pages from under the trust domain unseen (SEPT_VE_DISABLE)",
        "the host can take pages from under the trust domain (SEPT_VE_DISABLE is not set)",
    )
    findings.check(
        "migration",
        not report.allows_migration,
        "no migration domain can carry the trust domain away",
        "the trust domain allows migration, which could carry its memory to another machine",
    )
    findings.check(
        "service-td",
        not any(report.mrservicetd),
        "no service domain is bound to the trust domain",
        f"service domains are bound to the trust domain and may reach into it (MRSERVICETD is {report.mrservicetd.hex()})",
    )
    findings.check(
        "module",
        report.seam_attributes == 0,
        "the TDX module is one of production",
        "the TDX module is not one of production (SEAMATTRIBUTES)",
    )
    _check_measurements(findings, report, policy)


def _check_platform(findings: Findings, status: str, advisories: list[str], policy: AttestationPolicy) -> None:
    told = f" ({', '.join(sorted(advisories))})" if advisories else ""
    findings.check(
        "tcb",
        status in policy.tdx_statuses,
        f"Intel calls the platform {status}{told}",
        f"Intel calls the platform {status}: {_STATES.get(status, 'its state is not known here')}{told}",
    )


def _check_measurements(findings: Findings, report: TdReport, policy: AttestationPolicy) -> None:
    kind = TdxVerifier.kind
    check_register(findings, policy, "measurement", kind, report.mrtd, "the measurement of the started image (MRTD)")
    for number, value in enumerate(report.rtmrs):
        check_register(
            findings, policy, f"rtmr-{number}", f"{kind}-rtmr{number}", value, f"run-time measurement {number} (RTMR{number})"
        )
    host = {"mrconfigid": report.mrconfigid, "mrowner": report.mrowner, "mrownerconfig": report.mrownerconfig}
    for name, value in host.items():
        label = f"what the host gave as {name.upper()}"
        check_register(findings, policy, name, f"{kind}-{name}", value, label, may_be_zero=True)


def _import_library() -> Any:
    try:
        import dcap_qvl  # type: ignore[import-untyped]
    except ImportError:
        raise AttestationError(
            "checking Intel TDX needs the library dcap-qvl; install it with: pip install 'cloister[attest]'"
        ) from None
    return dcap_qvl


def _shorten(error: ValueError) -> str:
    text = " ".join(str(error).split())
    return "".join(letter for letter in text if letter.isprintable())[:200]
