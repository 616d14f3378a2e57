"""The attestation report of an NVIDIA GPU as fields: SPDM 1.1 GET_MEASUREMENTS, request and response (DMTF DSP0274). Pure.

The report is the request (with our nonce) followed by the response (with the measurements), so the signature is over both.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cloister.trust.attestation.evidence import EvidenceError

SIGNATURE_BYTES = 96
_REQUEST_BYTES = 37
_NONCE_BYTES = 32
_GET_MEASUREMENTS = b"\x11\xe0"
_MEASUREMENTS = b"\x11\x60"
_DMTF = 1
_DRIVER, _VBIOS, _NVDEC, _FWID = 3, 6, 11, 20
_NVDEC_DISABLED = b"\x55"


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The fields that a verifier looks at.

    Attributes:
        nonce: what was asked with, 32 bytes.
        measurements: by index from 1, SHA-384 or a bit field.
        driver, vbios: versions for a person.
        firmware_id: digest of the firmware that holds the signing key.
        has_nvdec: whether the first video decoder is in use; without it its measurement says nothing.
        signature: r and s, 48 bytes each, big endian.
        signed: the bytes that the signature is over.
    """

    nonce: bytes
    measurements: dict[int, bytes]
    driver: str
    vbios: str
    firmware_id: bytes
    has_nvdec: bool
    signature: bytes
    signed: bytes


def read_gpu_report(data: bytes) -> GpuReport:
    """Reads a report; nothing in it is believed yet.

    Raises:
        EvidenceError: not a report, or its lengths do not fit together.
    """
    if data[:2] != _GET_MEASUREMENTS or data[_REQUEST_BYTES : _REQUEST_BYTES + 2] != _MEASUREMENTS:
        raise EvidenceError("the GPU's report is no SPDM 1.1 measurement")
    try:
        blocks = data[_REQUEST_BYTES + 4]
        at = _REQUEST_BYTES + 8
        record_end = at + int.from_bytes(data[_REQUEST_BYTES + 5 : at], "little")
        measurements = _read_measurements(data[at:record_end], blocks)
        (opaque,) = struct.unpack_from("<H", data, record_end + _NONCE_BYTES)
        at = record_end + _NONCE_BYTES + 2
        fields = _read_fields(data[at : at + opaque])
    except (struct.error, IndexError):
        raise EvidenceError("the GPU's report ends too early") from None
    if len(data) != at + opaque + SIGNATURE_BYTES:
        raise EvidenceError("the lengths in the GPU's report do not fit together")
    return GpuReport(
        nonce=data[4 : 4 + _NONCE_BYTES],
        measurements=measurements,
        driver=_to_text(fields.get(_DRIVER, b"")),
        vbios=_to_version(fields.get(_VBIOS, b"")),
        firmware_id=fields.get(_FWID, b""),
        has_nvdec=fields.get(_NVDEC) != _NVDEC_DISABLED,
        signature=data[-SIGNATURE_BYTES:],
        signed=data[:-SIGNATURE_BYTES],
    )


def _read_measurements(record: bytes, blocks: int) -> dict[int, bytes]:
    """Each block: index, 1 for DMTF, length; then DMTF's own head, type and length, and the value."""
    measurements: dict[int, bytes] = {}
    at = 0
    for _ in range(blocks):
        index, specification, length = struct.unpack_from("<BBH", record, at)
        _kind, size = struct.unpack_from("<BH", record, at + 4)
        value = record[at + 7 : at + 7 + size]
        if specification != _DMTF or size != length - 3 or len(value) != size or index in measurements:
            raise EvidenceError("a measurement in the GPU's report is broken")
        measurements[index] = value
        at += 4 + length
    if at != len(record):
        raise EvidenceError("the lengths in the GPU's report do not fit together")
    return measurements


def _read_fields(opaque: bytes) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(opaque):
        kind, size = struct.unpack_from("<HH", opaque, at)
        fields.setdefault(kind, opaque[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(opaque):
        raise EvidenceError("the lengths in the GPU's report do not fit together")
    return fields


def _to_text(field: bytes) -> str:
    return "".join(chr(code) for code in field.rstrip(b"\0")[:32] if 32 <= code < 127)


def _to_version(field: bytes) -> str:
    """VBIOS versions are printed as 96.00.A5.00.01: the first word little endian, then the byte after it."""
    if len(field) < 5:
        return ""
    return ".".join(f"{byte:02X}" for byte in (*reversed(field[:4]), field[4]))
