"""Which chips a node's evidence is of, so that one chip cannot stand for two nodes. Pure.

Names are compared only after the evidence was verified: until then they are what somebody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cryptography import x509

from cloister.privacy.attestation.certificates import digest_key, load_certificates
from cloister.privacy.attestation.evidence import Evidence
from cloister.privacy.attestation.nvidia import chain_extra, list_gpus
from cloister.privacy.attestation.sev_snp import SnpVerifier
from cloister.privacy.attestation.snp_report import read_report
from cloister.privacy.attestation.td_quote import read_quote
from cloister.privacy.attestation.tdx import TdxVerifier

_SGX_EXTENSIONS: Final = x509.ObjectIdentifier("1.2.840.113741.1.13.1")
_PPID: Final = bytes.fromhex("060a2a864886f84d010d01010410")
"""OID 1.2.840.113741.1.13.1.1 and the head of the 16 bytes behind it (Intel's PCK certificate profile, section 1.3.5)."""


def name_chips(evidence: Evidence) -> frozenset[str]:
    """Returns a name for each chip that signed: AMD's CHIP_ID, Intel's platform (PPID), the identity key of each GPU.

    Software has none, and a platform whose owner masks its identity neither.

    Raises:
        EvidenceError: a report or a certificate cannot be read.
    """
    return frozenset((*_name_processor(evidence), *_name_gpus(evidence)))


def _name_processor(evidence: Evidence) -> Iterator[str]:
    if evidence.kind == SnpVerifier.kind:
        report = read_report(evidence.report)
        if not report.is_chip_masked:
            yield f"sev-snp {report.chip_id.hex()}"
    elif evidence.kind == TdxVerifier.kind:
        leaf = load_certificates(read_quote(evidence.report).pck_chain)[0]
        yield f"tdx {_read_platform(leaf) or digest_key(leaf.public_key())}"


def _name_gpus(evidence: Evidence) -> Iterator[str]:
    for number in list_gpus(evidence.extra):
        chain = load_certificates(evidence.extra.get(chain_extra(number), b""))
        device = chain[min(1, len(chain) - 1)]  # the leaf is of the firmware, the one above it of the GPU
        yield f"gpu {digest_key(device.public_key())}"


def _read_platform(leaf: x509.Certificate) -> str:
    try:
        value = leaf.extensions.get_extension_for_oid(_SGX_EXTENSIONS).value
    except x509.ExtensionNotFound:
        return ""
    assert isinstance(value, x509.UnrecognizedExtension)
    _, head, rest = value.value.partition(_PPID)
    return rest[:16].hex() if head else ""
