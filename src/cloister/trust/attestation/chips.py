"""Which chips a node's evidence is of, so that one chip cannot stand for two nodes. Pure.

Names are compared only after the evidence was verified: until then they are what somebody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cryptography import x509

from cloister.trust.attestation.certificates import digest_key, load_certificates
from cloister.trust.attestation.evidence import Evidence
from cloister.trust.attestation.nitro import NitroVerifier, read_document
from cloister.trust.attestation.nvidia import chain_extra, list_gpus
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.snp_report import read_report
from cloister.trust.attestation.tdx import TdxVerifier, read_quote

_SGX_EXTENSIONS: Final = x509.ObjectIdentifier("1.2.840.113741.1.13.1")
_PPID: Final = bytes.fromhex("060a2a864886f84d010d01010410")
"""OID 1.2.840.113741.1.13.1.1 and the head of the 16 bytes behind it (Intel's PCK certificate profile, section 1.3.5)."""


def name_chips(evidence: Evidence) -> frozenset[str]:
    """Returns a name for each chip that signed: the processor's (`name_processor`), and the identity key of each GPU.

    Raises:
        EvidenceError: a report or a certificate cannot be read.
    """
    processor = name_processor(evidence)
    return frozenset((*(() if processor is None else (processor,)), *_name_gpus(evidence)))


def name_processor(evidence: Evidence) -> str | None:
    """Returns AMD's CHIP_ID, Intel's platform (PPID), or for Nitro the EC2 instance that the enclave is cut from.

    AWS names no chip. The instance is what its owner can take over, beside AWS.

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
