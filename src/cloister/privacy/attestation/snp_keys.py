"""The keys that sign SEV-SNP reports, and what their certificates say of chip, provider and firmware. No I/O, no clock.

The VCEK is a key that only this chip with this firmware has, and its certificate names the chip. The VLEK is a key that AMD
gives a cloud provider for all its chips, and its certificate names the provider (AMD's document 57230, "Versioned Chip
Endorsement Key (VCEK) Certificate and KDS Interface Specification"). SIGNING_KEY in the report says which of them signed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from cryptography import x509

from cloister.privacy.attestation.base import AttestationPolicy, Findings
from cloister.privacy.attestation.certificates import load_certificates
from cloister.privacy.attestation.evidence import EvidenceError
from cloister.privacy.attestation.snp_report import SnpReport, Tcb

VCEK, ASK, VLEK, ASVK, ARK, CRL = "vcek", "ask", "vlek", "asvk", "ark", "crl"
"""Names of the extras: DER or PEM."""

SIGNED_BY_VCEK: Final = 0
SIGNED_BY_VLEK: Final = 1
CHAINS: Final[Mapping[int, tuple[str, str, str]]] = MappingProxyType(
    {SIGNED_BY_VCEK: (VCEK, ASK, ARK), SIGNED_BY_VLEK: (VLEK, ASVK, ARK)}
)
"""By SIGNING_KEY, the certificates from the one that signs to the root."""

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
    """Returns the names of the certificates for a report, from the one that signs to the root.

    Raises:
        EvidenceError: no key signed the report, or one that is not known.
    """
    if signing_key not in CHAINS:
        raise EvidenceError(f"the report says that neither VCEK nor VLEK signed it (SIGNING_KEY is {signing_key})")
    return CHAINS[signing_key]


def load_chain(extra: Mapping[str, bytes], signing_key: int) -> list[x509.Certificate]:
    """Returns the certificates for a report, from the one that signs to the root.

    Raises:
        EvidenceError: one is missing or broken, or no key signed the report.
    """
    return [_load_one(extra, name) for name in name_chain(signing_key)]


def check_key(findings: Findings, report: SnpReport, leaf: x509.Certificate, policy: AttestationPolicy) -> None:
    """Adds whether chip or provider, and firmware, are those of the certificate that signed.

    Raises:
        EvidenceError: the certificate lacks what AMD writes into one of its kind.
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
