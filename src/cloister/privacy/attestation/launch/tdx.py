"""Measurements of an Intel TDX guest: MRTD of the firmware, RTMRs of what the firmware starts. Pure.

MRTD: "Intel TDX Module Base Architecture Specification" (348549), section "TD Measurement": a SHA-384 over each page that is
added (TDH.MEM.PAGE.ADD) and each 256 bytes that are measured (TDH.MR.EXTEND), in the order in which KVM calls (Linux 6.16 and
newer add and measure page by page). RTMRs: events of edk2 (UEFI specification 2.11, section 38.4.1, maps PCRs to them) and of
the EFI stub of Linux (drivers/firmware/efi/libstub/efi-stub-helper.c).

They hold for a kernel that QEMU 10.1 or newer hands to OVMF as it is, without a shim and without Secure Boot. RTMR 0 covers
what the hypervisor says of the machine (memory, ACPI tables, firmware variables), and cannot be known from an image.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from cloister.privacy.attestation.launch.boot import DirectBoot
from cloister.privacy.attestation.launch.firmware import PAGE_BYTES, Firmware, TdxAttribute, TdxSection
from cloister.privacy.attestation.launch.pe import hash_pe
from cloister.types.errors import ConfigError

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
"""What OVMF appends to the command line where there is an initrd (OvmfPkg/Library/X86QemuLoadImageLib)."""


@dataclass(frozen=True, slots=True)
class TdMeasurements:
    """What a TDX quote says of a guest, 48 bytes each.

    Attributes:
        mrtd: the firmware.
        rtmrs: by number: 1 the kernel, 2 command line and initrd, 3 zeros, for nothing in the image extends it.
    """

    mrtd: bytes
    rtmrs: dict[int, bytes]


def measure_td(firmware: Firmware, boot: DirectBoot) -> TdMeasurements:
    """Returns what a guest measures that QEMU starts from this firmware and kernel.

    Raises:
        ConfigError: the firmware does not know TDX, or the kernel is no PE file.
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
        if not section.attributes & TdxAttribute.AUGMENT:  # those pages are added later, and never measured
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
    """What a register holds after it was extended by each digest."""
    value = bytes(_DIGEST_BYTES)
    for event in events:
        value = _hash(value + event)
    return value
