"""The report of AMD SEV-SNP as fields (SEV-SNP Firmware ABI, document 56860, table 23 "ATTESTATION_REPORT"). Pure.

Versions 2 to 5 share the layout of every field that is read here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cloister.privacy.attestation.evidence import EvidenceError

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
    """The fields that a verifier looks at; byte strings as they stand.

    Attributes:
        signing_key: 0 VCEK (the chip's own), 1 VLEK (the cloud provider's), 7 none.
        is_chip_masked: whether the host withheld the chip's identity.
        host_data: what the host said when it started the guest.
        report_id_ma: identity of the migration agent, all ones without one.
        family: CPU family, 0 where the report's version does not say.
        r, s: the signature's numbers.
        signed: the bytes that the signature is over.
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
        """POLICY bit 18, or an agent that is there: somebody may carry the guest's memory to another machine."""
        return bool(self.policy >> 18 & 1) or self.report_id_ma != NO_MIGRATION_AGENT

    @property
    def is_turin(self) -> bool:
        """Whether the TCB has Turin's layout (family 1Ah)."""
        return self.family >= _TURIN_FAMILY


def read_report(data: bytes) -> SnpReport:
    """Reads a report; nothing in it is believed yet.

    Raises:
        EvidenceError: not a report of a known version, or not signed as reports are.
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
