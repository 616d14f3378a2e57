"""An Intel TDX quote, version 4 or 5, as fields ("Intel TDX DCAP Quoting Library API", appendix A). Pure; nothing is believed.

Signatures are dcap-qvl's work. It skips what it does not need: a length, what follows the signature, the copy of the root.
Here all of a quote is read, so that no byte of it can be changed unseen.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cloister.privacy.attestation.evidence import EvidenceError
from cloister.privacy.attestation.registers import NUM_RTMRS

VERSIONS = (4, 5)
_TDX = 0x81
_HEADER_BYTES = 48
_BODY_BYTES = 584
_BODY_TYPES = {2: _BODY_BYTES, 3: _BODY_BYTES + 64}  # version 5: TDX 1.0 and TDX 1.5, which adds a TCB and MRSERVICETD
_SIGNATURE_BYTES = 64 + 64  # over the quote, and the key that made it
_ENCLAVE_BYTES = 384 + 64  # the quoting enclave's report, and the signature over it
_ENCLAVE_DATA = 6
_PCK_CHAIN = 5
_DEBUG = 0xFF  # attribute bits 7:0, the "TUD" group: any of them and the TD is not to be trusted
_SEPT_VE_DISABLE = 28
_MIGRATABLE = 29


@dataclass(frozen=True, slots=True)
class TdReport:
    """The body of a quote: what the TDX module says of a trust domain.

    Attributes:
        attributes: TDATTRIBUTES.
        seam_attributes: attributes of the TDX module, 0 in production.
        mrtd: measurement of the image that the domain was built from.
        mrconfigid, mrowner, mrownerconfig: what the host said of configuration and owner when it built the domain.
        rtmrs: the four run-time measurements.
        mrservicetd: the service domains that are bound to it, such as one for migration; zeros before TDX 1.5, which has none.
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
        """Whether the host cannot make the domain stumble over pages that it takes away."""
        return bool(self.attributes >> _SEPT_VE_DISABLE & 1)

    @property
    def allows_migration(self) -> bool:
        """Whether a migration domain may carry it to another machine."""
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
        EvidenceError: another version, not of TDX, or its lengths do not fit together.
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
    """Returns where the body begins and ends."""
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
