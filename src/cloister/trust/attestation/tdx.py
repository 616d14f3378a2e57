"""Checks evidence of Intel TDX: signatures, collateral and TCB by dcap-qvl, then the quote's content. No I/O, no clock.

Collateral (TCB info, identity of the quoting enclave, revocation lists) is signed by Intel and stapled to the evidence, so a
client queries no server; it expires after a month, and the node then fetches it again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.trust.attestation.base import NUM_RTMRS, AttestationError, AttestationPolicy, Findings, check_register
from cloister.trust.attestation.certificates import check_chain, digest_key, load_certificates
from cloister.trust.attestation.evidence import Evidence, EvidenceError
from cloister.types.extras import install_command

# An Intel TDX quote, version 4 or 5, as fields ("Intel TDX DCAP Quoting Library API", appendix A). Pure; verifies nothing.
#
# dcap-qvl checks signatures. It ignores some fields: a length, bytes after the signature, the copy of the root. This parser
# reads the whole quote, so that no byte of it can be changed unnoticed.


VERSIONS = (4, 5)
_TDX = 0x81
_HEADER_BYTES = 48
_BODY_BYTES = 584
_BODY_TYPES = {2: _BODY_BYTES, 3: _BODY_BYTES + 64}  # version 5: TDX 1.0 and TDX 1.5, which adds a TCB and MRSERVICETD
_SIGNATURE_BYTES = 64 + 64  # over the quote, and its key
_ENCLAVE_BYTES = 384 + 64  # the quoting enclave's report, and the signature over it
_ENCLAVE_DATA = 6
_PCK_CHAIN = 5
_DEBUG = 0xFF  # attribute bits 7:0, the "TUD" group: a TD with any of them set is not trustworthy
_SEPT_VE_DISABLE = 28
_MIGRATABLE = 29


@dataclass(frozen=True, slots=True)
class TdReport:
    """The body of a quote: the TDX module's report of a trust domain.

    Attributes:
        attributes: TDATTRIBUTES.
        seam_attributes: attributes of the TDX module, 0 in production.
        mrtd: measurement of the domain's initial image.
        mrconfigid, mrowner, mrownerconfig: the host's values for configuration and owner at the domain's creation.
        rtmrs: the four run-time measurements.
        mrservicetd: bound service domains, such as one for migration; zeros before TDX 1.5.
    """

    attributes: int
    seam_attributes: int
    mrtd: bytes
    mrconfigid: bytes
    mrowner: bytes
    mrownerconfig: bytes
    rtmrs: tuple[bytes, ...]
    report_data: bytes
    mrservicetd: bytes = bytes(48)

    @property
    def allows_debug(self) -> bool:
        """Whether the host may read and change the domain's memory."""
        return bool(self.attributes & _DEBUG)

    @property
    def disables_sept_ve(self) -> bool:
        """Whether the host cannot inject faults by removing pages (SEPT_VE_DISABLE)."""
        return bool(self.attributes >> _SEPT_VE_DISABLE & 1)

    @property
    def allows_migration(self) -> bool:
        """Whether a migration domain may move it to another machine."""
        return bool(self.attributes >> _MIGRATABLE & 1)


@dataclass(frozen=True, slots=True)
class TdQuote:
    """A quote.

    Attributes:
        report: its body.
        pck_chain: PEM, from the platform's key to the root.
    """

    report: TdReport
    pck_chain: bytes


def read_quote(data: bytes) -> TdQuote:
    """Reads a quote.

    Raises:
        EvidenceError: another version, not of TDX, or inconsistent lengths.
    """
    try:
        version, _key_type, tee = struct.unpack_from("<HHI", data, 0)
        if version not in VERSIONS or tee != _TDX:
            raise EvidenceError(f"a TDX quote of version 4 or 5 is read here, not version {version} of type {tee:#x}")
        body, start = _find_body(data, version)
        (length,) = struct.unpack_from("<I", data, start)
        end = start + 4 + length
        at = start + 4 + _SIGNATURE_BYTES
        kind, outer = struct.unpack_from("<HI", data, at)
        at += 6
        outer_end = at + outer
        at += _ENCLAVE_BYTES
        (authentication,) = struct.unpack_from("<H", data, at)
        at += 2 + authentication
        chain_kind, inner = struct.unpack_from("<HI", data, at)
        at += 6
    except struct.error:
        raise EvidenceError("the TDX quote ends too early") from None
    if (kind, chain_kind) != (_ENCLAVE_DATA, _PCK_CHAIN):
        raise EvidenceError(f"the TDX quote has certification data of type {kind}/{chain_kind}; 6/5 is read (a PCK chain)")
    # The quoting service rounds the buffer up with zeros.
    if not at + inner == outer_end == end <= len(data) or any(data[end:]):
        raise EvidenceError("the lengths in the TDX quote do not fit together")
    return TdQuote(_read_report(data[body:start]), data[at:end])


def _find_body(data: bytes, version: int) -> tuple[int, int]:
    """Returns the start and end of the body."""
    if version == VERSIONS[0]:
        return _HEADER_BYTES, _HEADER_BYTES + _BODY_BYTES
    kind, length = struct.unpack_from("<HI", data, _HEADER_BYTES)
    if _BODY_TYPES.get(kind) != length:
        raise EvidenceError(f"the TDX quote has a body of type {kind} with {length} bytes, which is not known here")
    body = _HEADER_BYTES + 6
    return body, body + length


def _read_report(body: bytes) -> TdReport:
    return TdReport(
        seam_attributes=int.from_bytes(body[112:120], "little"),
        attributes=int.from_bytes(body[120:128], "little"),
        mrtd=body[136:184],
        mrconfigid=body[184:232],
        mrowner=body[232:280],
        mrownerconfig=body[280:328],
        rtmrs=tuple(body[328 + 48 * number : 376 + 48 * number] for number in range(NUM_RTMRS)),
        report_data=body[520:584],
        mrservicetd=body[600:648] or bytes(48),
    )


INTEL_ROOTS = frozenset({"a0af031289f5d5d4132f9186068a7fc13628633ba235777472e29b6b6c67a49e"})
"""SHA-256 of the key of Intel's SGX Root CA as SubjectPublicKeyInfo; dcap-qvl includes the certificate."""

COLLATERAL = "collateral"
"""Name of the extra: JSON in dcap-qvl's format."""

_ATTRIBUTES = ("Debug mode", "SEPT_VE_DISABLE", "TD migration", "service TD")
"""Errors of dcap-qvl about a quote with verified signatures, for which we report our own reason."""

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
        root: the trusted root; default: Intel's.
    """

    kind = "tdx"

    def __init__(self, root: x509.Certificate | None = None) -> None:
        self._root = root
        self._roots = INTEL_ROOTS if root is None else frozenset({digest_key(root.public_key())})

    def verify(self, evidence: Evidence, policy: AttestationPolicy, now: float) -> Findings:
        """See `Verifier.verify`."""
        return self.verify_quote(evidence.report, evidence.extra.get(COLLATERAL, b""), evidence.report_data, policy, now)

    def verify_quote(self, data: bytes, collateral: bytes, expected: bytes, policy: AttestationPolicy, now: float) -> Findings:
        """Checks a single quote.

        Args:
            data: the quote.
            collateral: Intel's collateral for it, JSON.
            expected: the required REPORT_DATA, 64 bytes.
            policy: the client's policy.
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
    """Checks the content of a signed quote against a policy."""
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
            f"checking Intel TDX needs the library dcap-qvl; install it with: {install_command('attest')}"
        ) from None
    return dcap_qvl


def _shorten(error: ValueError) -> str:
    text = " ".join(str(error).split())
    return "".join(letter for letter in text if letter.isprintable())[:200]
