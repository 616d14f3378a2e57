"""The report of AMD SEV-SNP as fields (SEV-SNP Firmware ABI, document 56860, table 23 "ATTESTATION_REPORT"). Pure.

Versions 2 to 5 share the layout of all fields that are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from cryptography import x509

from cloister.trust.attestation.base import AttestationPolicy, Findings
from cloister.trust.attestation.certificates import load_certificates
from cloister.trust.attestation.evidence import EvidenceError

REPORT_BYTES = 0x4A0
SIGNED_BYTES = 0x2A0
VERSIONS = range(2, 6)
ECDSA_P384_SHA384 = 1
NO_MIGRATION_AGENT = b"\xff" * 32

_COMPONENT_BYTES = 72
_SIGNATURE_BYTES = 48
_TURIN_FAMILY = 0x1A


@dataclass(frozen=True, slots=True)
class Tcb:
    """Security versions of a platform's parts; `fmc` exists since Turin."""

    boot_loader: int
    tee: int
    snp: int
    microcode: int
    fmc: int | None = None

    def __str__(self) -> str:
        fmc = "" if self.fmc is None else f"FMC {self.fmc}, "
        return f"{fmc}boot loader {self.boot_loader}, TEE {self.tee}, SNP {self.snp}, microcode {self.microcode}"


@dataclass(frozen=True, slots=True)
class SnpReport:
    """The fields that a verifier checks; byte strings unchanged.

    Attributes:
        signing_key: 0 VCEK (the chip's own), 1 VLEK (the cloud provider's), 7 none.
        is_chip_masked: whether the host withheld the chip's identity.
        host_data: the host's data at the start of the guest.
        report_id_ma: identity of the migration agent, all ones without one.
        family: CPU family, 0 if the report's version lacks it.
        r, s: the signature's numbers.
        signed: the signed bytes.
    """

    version: int
    policy: int
    vmpl: int
    signing_key: int
    is_chip_masked: bool
    report_data: bytes
    measurement: bytes
    host_data: bytes
    report_id_ma: bytes
    family: int
    current_tcb: Tcb
    reported_tcb: Tcb
    launch_tcb: Tcb
    chip_id: bytes
    r: int
    s: int
    signed: bytes

    @property
    def allows_debug(self) -> bool:
        """POLICY bit 19: the host may read and change the guest's memory."""
        return bool(self.policy >> 19 & 1)

    @property
    def allows_migration(self) -> bool:
        """POLICY bit 18, or an existing agent: the guest's memory may be migrated to another machine."""
        return bool(self.policy >> 18 & 1) or self.report_id_ma != NO_MIGRATION_AGENT

    @property
    def is_turin(self) -> bool:
        """Whether the TCB has Turin's layout (family 1Ah)."""
        return self.family >= _TURIN_FAMILY


def read_report(data: bytes) -> SnpReport:
    """Parses a report, without verifying it.

    Raises:
        EvidenceError: unknown version or signature format.
    """
    if len(data) != REPORT_BYTES:
        raise EvidenceError(f"an SEV-SNP report has {REPORT_BYTES} bytes, not {len(data)}")
    version, _svn, policy = struct.unpack_from("<IIQ", data, 0)
    if version not in VERSIONS:
        raise EvidenceError(f"an SEV-SNP report of version {version} is not known here")
    vmpl, algorithm = struct.unpack_from("<II", data, 0x30)
    if algorithm != ECDSA_P384_SHA384:
        raise EvidenceError(f"the SEV-SNP report names signature algorithm {algorithm}; 1 (ECDSA P-384) is known")
    (flags,) = struct.unpack_from("<I", data, 0x48)
    family = data[0x188] if version >= 3 else 0
    signature = data[SIGNED_BYTES:]
    r, s = signature[:_COMPONENT_BYTES], signature[_COMPONENT_BYTES : 2 * _COMPONENT_BYTES]
    if any(signature[2 * _COMPONENT_BYTES :]) or any(r[_SIGNATURE_BYTES:]) or any(s[_SIGNATURE_BYTES:]):
        raise EvidenceError("the SEV-SNP report's signature is longer than one of P-384")
    return SnpReport(
        version=version,
        policy=policy,
        vmpl=vmpl,
        signing_key=flags >> 2 & 7,
        is_chip_masked=bool(flags >> 1 & 1),
        report_data=data[0x50:0x90],
        measurement=data[0x90:0xC0],
        host_data=data[0xC0:0xE0],
        report_id_ma=data[0x160:0x180],
        family=family,
        current_tcb=_read_tcb(data[0x38:0x40], family),
        reported_tcb=_read_tcb(data[0x180:0x188], family),
        launch_tcb=_read_tcb(data[0x1F0:0x1F8], family),
        chip_id=data[0x1A0:0x1E0],
        r=int.from_bytes(r, "little"),
        s=int.from_bytes(s, "little"),
        signed=data[:SIGNED_BYTES],
    )


def _read_tcb(tcb: bytes, family: int) -> Tcb:
    if family >= _TURIN_FAMILY:
        return Tcb(fmc=tcb[0], boot_loader=tcb[1], tee=tcb[2], snp=tcb[3], microcode=tcb[7])
    return Tcb(boot_loader=tcb[0], tee=tcb[1], snp=tcb[6], microcode=tcb[7])


# The keys that sign SEV-SNP reports, and the chip, provider and firmware in their certificates. No I/O, no clock.
#
# The VCEK is unique to a chip and its firmware, and its certificate names the chip. The VLEK is a key that AMD issues to a
# cloud provider for all its chips, and its certificate names the provider (AMD's document 57230, "Versioned Chip Endorsement
# Key (VCEK) Certificate and KDS Interface Specification"). SIGNING_KEY in the report says which of them signed it.


VCEK, ASK, VLEK, ASVK, ARK, CRL = "vcek", "ask", "vlek", "asvk", "ark", "crl"
"""Names of the extras: DER or PEM."""

SIGNED_BY_VCEK: Final = 0
SIGNED_BY_VLEK: Final = 1
CHAINS: Final[Mapping[int, tuple[str, str, str]]] = MappingProxyType(
    {SIGNED_BY_VCEK: (VCEK, ASK, ARK), SIGNED_BY_VLEK: (VLEK, ASVK, ARK)}
)
"""By SIGNING_KEY, the certificates from the signing one to the root."""

_AMD = "1.3.6.1.4.1.3704.1."
_BOOT_LOADER, _TEE, _SNP, _MICROCODE, _FMC = (f"{_AMD}3.{part}" for part in ("1", "2", "3", "8", "9"))
_CHIP_ID = _AMD + "4"
_CSP_ID = _AMD + "5"
_TURIN_ID_BYTES = 8
_DER_INTEGER = 0x02
_DER_OCTETS = 0x04
_DER_TEXTS = (0x0C, 0x13, 0x16)  # UTF8String, PrintableString, IA5String
_MAX_NAME = 64


def name_chain(signing_key: int) -> tuple[str, str, str]:
    """Returns the names of the certificates for a report, from the signing one to the root.

    Raises:
        EvidenceError: no key, or an unknown one, signed the report.
    """
    if signing_key not in CHAINS:
        raise EvidenceError(f"the report says that neither VCEK nor VLEK signed it (SIGNING_KEY is {signing_key})")
    return CHAINS[signing_key]


def load_chain(extra: Mapping[str, bytes], signing_key: int) -> list[x509.Certificate]:
    """Returns the certificates for a report, from the signing one to the root.

    Raises:
        EvidenceError: one is missing or malformed, or no key signed the report.
    """
    return [_load_one(extra, name) for name in name_chain(signing_key)]


def check_key(findings: Findings, report: SnpReport, leaf: x509.Certificate, policy: AttestationPolicy) -> None:
    """Adds steps for whether chip or provider, and firmware, match the signing certificate.

    Raises:
        EvidenceError: the certificate lacks an extension that AMD requires.
    """
    if report.signing_key == SIGNED_BY_VLEK:
        _check_provider(findings, leaf, policy)
    else:
        _check_chip(findings, report, leaf)
    tcb = Tcb(
        boot_loader=_read_number(leaf, _BOOT_LOADER),
        tee=_read_number(leaf, _TEE),
        snp=_read_number(leaf, _SNP),
        microcode=_read_number(leaf, _MICROCODE),
        fmc=_read_number(leaf, _FMC) if report.is_turin else None,
    )
    findings.check(
        "chip-tcb",
        tcb == report.reported_tcb,
        "the report names the firmware of the certificate",
        f"the report names firmware {report.reported_tcb}, but the certificate is for {tcb}",
    )


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


def _check_provider(findings: Findings, vlek: x509.Certificate, policy: AttestationPolicy) -> None:
    provider = _read_text(vlek, _CSP_ID)
    accepted = ", ".join(sorted(policy.snp_providers)) or "none"
    findings.check(
        "provider",
        provider in policy.snp_providers,
        f"the report was signed with the key that AMD gave to {provider} (VLEK), which the policy accepts for all its chips",
        f"the report was signed with the key that AMD gave to {provider} (VLEK) and not with the chip's own (VCEK); the policy "
        f"accepts the keys of {accepted}: name this provider in snp_providers, or take a node that attests with a VCEK",
    )


def _load_one(extra: Mapping[str, bytes], name: str) -> x509.Certificate:
    if name not in extra:
        raise EvidenceError(f"the evidence has no {name.upper()} certificate")
    certificates = load_certificates(extra[name])
    if len(certificates) != 1:
        raise EvidenceError(f"the evidence has {len(certificates)} certificates where its {name.upper()} should be")
    return certificates[0]


def _read_extension(certificate: x509.Certificate, oid: str) -> bytes:
    try:
        value = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
    except x509.ExtensionNotFound:
        raise EvidenceError(f"the certificate that signed the report lacks the extension {oid}") from None
    assert isinstance(value, x509.UnrecognizedExtension)
    return value.value


def _read_number(certificate: x509.Certificate, oid: str) -> int:
    value = _read_extension(certificate, oid)
    if len(value) < 3 or value[0] != _DER_INTEGER or value[1] != len(value) - 2:
        raise EvidenceError(f"the extension {oid} of the certificate that signed the report is no number")
    return int.from_bytes(value[2:], "big", signed=True)


def _read_text(certificate: x509.Certificate, oid: str) -> str:
    value = _read_extension(certificate, oid)
    if 2 < len(value) <= _MAX_NAME and value[0] in _DER_TEXTS and value[1] == len(value) - 2:
        text = value[2:].decode(errors="replace")
        if text.isprintable():
            return text
    raise EvidenceError(f"the extension {oid} of the certificate that signed the report is no name")
