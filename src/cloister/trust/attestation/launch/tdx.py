"""Measurements of an Intel TDX guest: MRTD of the firmware, RTMRs of what the firmware starts. Pure.

MRTD: "Intel TDX Module Base Architecture Specification" (348549), section "TD Measurement": a SHA-384 over each page that is
added (TDH.MEM.PAGE.ADD) and each 256 bytes that are measured (TDH.MR.EXTEND), in the order in which KVM calls (Linux 6.16 and
newer add and measure page by page). RTMRs: events of edk2 (UEFI specification 2.11, section 38.4.1, maps PCRs to them) and of
the EFI stub of Linux (drivers/firmware/efi/libstub/efi-stub-helper.c).

They apply to a kernel that QEMU 10.1 or newer passes to OVMF unchanged, without a shim and without Secure Boot. RTMR 0 covers
the hypervisor's description of the machine (memory, ACPI tables, firmware variables), and cannot be predicted from an image.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from cloister.trust.attestation.launch.firmware import PAGE_BYTES, DirectBoot, Firmware, TdxAttribute, TdxSection
from cloister.types.errors import ConfigError

# The Authenticode digest of a PE file, which firmware measures before it starts one. Pure.
#
# "Windows Authenticode Portable Executable Signature Format" (2008), "Calculating the PE Image Hash": everything but the
# checksum and the place and content of signatures. As edk2 reads it (OvmfPkg/Tcg/TdTcg2Dxe/MeasureBootPeCoff.c), which adds
# no padding.


_PE_AT: Final = 0x3C
_COFF_BYTES: Final = 20
_SECTION_BYTES: Final = 40
_CHECKSUM_AT, _HEADERS_AT = 64, 60  # of the optional header
_DIRECTORIES_AT: Final = {0x10B: 96, 0x20B: 112}  # by magic: PE32, PE32+
_SECURITY: Final = 4  # number of the directory of signatures, 8 bytes each


def hash_pe(data: bytes) -> bytes:
    """Returns SHA-384 of what Authenticode covers, 48 bytes.

    Raises:
        ConfigError: it is not a PE file, or is truncated.
    """
    try:
        return _hash_authenticode(data)
    except struct.error:
        raise ConfigError("the kernel is no whole PE file; UEFI starts only kernels with an EFI stub") from None


def _hash_authenticode(data: bytes) -> bytes:
    (pe,) = struct.unpack_from("<I", data, _PE_AT)
    signature, _, num_sections, optional_bytes = struct.unpack_from("<4sHH12xH", data, pe)
    optional = pe + 4 + _COFF_BYTES
    magic, headers_bytes = *struct.unpack_from("<H", data, optional), *struct.unpack_from("<I", data, optional + _HEADERS_AT)
    if data[:2] != b"MZ" or signature != b"PE\0\0" or magic not in _DIRECTORIES_AT or headers_bytes > len(data):
        raise struct.error
    directory = optional + _DIRECTORIES_AT[magic] + 8 * _SECURITY
    checksum = optional + _CHECKSUM_AT
    (signatures_bytes,) = struct.unpack_from("<I", data, directory + 4)
    digest = hashlib.sha384(data[:checksum])
    digest.update(data[checksum + 4 : directory])
    digest.update(data[directory + 8 : headers_bytes])
    hashed = headers_bytes
    for size, offset in sorted(_read_sections(data, optional + optional_bytes, num_sections), key=lambda one: one[1]):
        if offset + size > len(data):
            raise struct.error
        digest.update(data[offset : offset + size])
        hashed += size
    end = len(data) - signatures_bytes
    if end < hashed:
        raise struct.error
    digest.update(data[hashed:end])
    return digest.digest()


def _read_sections(data: bytes, at: int, number: int) -> list[tuple[int, int]]:
    """Size and offset in the file, in bytes, of each section that has any."""
    found = (struct.unpack_from("<16xII16x", data, at + index * _SECTION_BYTES) for index in range(number))
    return [(size, offset) for size, offset in found if size]


_CHUNK_BYTES: Final = 256
_CALL: Final = struct.Struct("<16sQ104x")  # name of the call, guest address
_DIGEST_BYTES: Final = 48
_SEPARATOR: Final = bytes(4)
_BOOT_EVENTS: Final = (  # TCG PC Client Platform Firmware Profile, sections 3.3.4.5 and 3.3.4.6
    b"Calling EFI Application from Boot Option",
    _SEPARATOR,
    b"Exit Boot Services Invocation",
    b"Exit Boot Services Returned with Success",
)
_INITRD_ARGUMENT: Final = " initrd=initrd"
"""Text that OVMF appends to the command line if there is an initrd (OvmfPkg/Library/X86QemuLoadImageLib)."""


@dataclass(frozen=True, slots=True)
class TdMeasurements:
    """Measurements in a TDX quote, 48 bytes each.

    Attributes:
        mrtd: the firmware.
        rtmrs: by number: 1 the kernel, 2 command line and initrd, 3 zeros, because nothing in the image extends it.
    """

    mrtd: bytes
    rtmrs: dict[int, bytes]


def measure_td(firmware: Firmware, boot: DirectBoot) -> TdMeasurements:
    """Returns the measurements of a guest that QEMU starts from this firmware and kernel.

    Raises:
        ConfigError: the firmware does not know TDX, or the kernel is not a PE file.
    """
    return TdMeasurements(
        _measure_firmware(firmware), {1: _measure_kernel(boot), 2: _measure_rest(boot), 3: bytes(_DIGEST_BYTES)}
    )


def _measure_firmware(firmware: Firmware) -> bytes:
    if not firmware.tdx_sections:
        raise ConfigError("this firmware does not know TDX; take OVMF's IntelTdx build (Debian: ovmf-inteltdx)")
    digest = hashlib.sha384()
    for section in firmware.tdx_sections:
        if section.offset + section.size > len(firmware.data):
            raise ConfigError("the firmware is cut short: a section of its TDX metadata lies beyond its end")
        if not section.attributes & TdxAttribute.AUGMENT:  # these pages are added later and never measured
            for call in _add_pages(firmware.data, section):
                digest.update(call)
    return digest.digest()


def _add_pages(data: bytes, section: TdxSection) -> list[bytes]:
    calls = []
    content = data[section.offset : section.offset + section.size].ljust(section.memory_size, b"\0")
    for page in range(0, section.memory_size, PAGE_BYTES):
        calls.append(_CALL.pack(b"MEM.PAGE.ADD", section.address + page))
        if section.attributes & TdxAttribute.EXTEND:
            for at in range(page, page + PAGE_BYTES, _CHUNK_BYTES):
                calls += [_CALL.pack(b"MR.EXTEND", section.address + at), content[at : at + _CHUNK_BYTES]]
    return calls


def _measure_kernel(boot: DirectBoot) -> bytes:
    return _chain([hash_pe(boot.kernel), *map(_hash, _BOOT_EVENTS)])


def _measure_rest(boot: DirectBoot) -> bytes:
    if not boot.initrd:
        raise ConfigError("an image of a node has an initrd; give one")
    line = boot.command_line + _INITRD_ARGUMENT + "\0"
    return _chain([_hash(line.encode("utf-16-le")), _hash(boot.initrd)])


def _hash(data: bytes) -> bytes:
    return hashlib.sha384(data).digest()


def _chain(events: list[bytes]) -> bytes:
    """Returns the value of a register after extending it by each digest."""
    value = bytes(_DIGEST_BYTES)
    for event in events:
        value = _hash(value + event)
    return value
