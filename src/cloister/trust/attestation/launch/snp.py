"""The launch digest of an SEV-SNP guest, as the processor computes it: MEASUREMENT of its reports. Pure.

"SEV Secure Nested Paging Firmware ABI Specification" (document 56860), section 8.17.2: each page that the hypervisor adds
extends the digest by PAGE_INFO. QEMU defines these pages (target/i386/sev.c), and the layout of the hashes of kernel, initrd
and command line.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID

from cloister.trust.attestation.launch.firmware import PAGE_BYTES, DirectBoot, Firmware, SevPages
from cloister.types.errors import ConfigError

# The initial state of a processor of an SEV-SNP guest, which is measured with the guest. Pure.
#
# Fields and offsets: AMD64 Architecture Programmer's Manual, volume 2, appendix B, table B-4 (VMSA). Values: what QEMU sets
# at reset (target/i386/cpu.c, `x86_cpu_reset_hold`) as KVM writes it (arch/x86/kvm/svm/sev.c, `sev_es_sync_vmsa`).


FIRST_ADDRESS: Final = 0xFFFFFFF0
"""Start address of the first processor: the reset vector."""
_SEGMENTS: Final = {  # offset: (selector, attributes, limit)
    0x00: (0, 0x93, 0xFFFF),  # ES
    0x20: (0, 0x93, 0xFFFF),  # SS
    0x30: (0, 0x93, 0xFFFF),  # DS
    0x40: (0, 0x93, 0xFFFF),  # FS
    0x50: (0, 0x93, 0xFFFF),  # GS
    0x60: (0, 0x00, 0xFFFF),  # GDTR
    0x70: (0, 0x82, 0xFFFF),  # LDTR
    0x80: (0, 0x00, 0xFFFF),  # IDTR
    0x90: (0, 0x8B, 0xFFFF),  # TR
}
_REGISTERS: Final = {
    0x0D0: 0x1000,  # EFER: SVME, which KVM sets
    0x148: 0x40,  # CR4: MCE, which KVM sets
    0x158: 0x10,  # CR0: ET
    0x160: 0x400,  # DR7
    0x168: 0xFFFF0FF0,  # DR6
    0x170: 0x2,  # RFLAGS
    0x268: 0x0007040600070406,  # PAT (volume 2, appendix A.3)
    0x3E8: 0x1,  # XCR0
}
_CS, _RIP, _RDX, _FEATURES, _MXCSR, _FCW = 0x10, 0x178, 0x310, 0x3B0, 0x408, 0x410


def make_vmsa(address: int, cpu_signature: int, features: int) -> bytes:
    """Returns the page of one processor, 4096 bytes.

    Args:
        address: its start address.
        cpu_signature: EAX of CPUID function 1, which QEMU leaves in RDX.
        features: SEV_FEATURES, such as 1 (SNP).
    """
    page = bytearray(PAGE_BYTES)
    for offset, (selector, attributes, limit) in _SEGMENTS.items():
        struct.pack_into("<HHIQ", page, offset, selector, attributes, limit, 0)
    struct.pack_into("<HHIQ", page, _CS, 0xF000, 0x9B, 0xFFFF, address & 0xFFFF0000)
    values = {**_REGISTERS, _RIP: address & 0xFFFF, _RDX: cpu_signature, _FEATURES: features}
    for offset, value in values.items():
        struct.pack_into("<Q", page, offset, value)
    struct.pack_into("<I", page, _MXCSR, 0x1F80)
    struct.pack_into("<H", page, _FCW, 0x37F)
    return bytes(page)


SNP_ACTIVE: Final = 1
"""SEV_FEATURES of a guest that enables only SNP."""
MAX_VCPUS: Final = 512
_DIGEST_BYTES: Final = 48
_PAGE_INFO: Final = struct.Struct("<48s48sHBB4xQ")  # digest, contents, length, type, IMI; permissions 0; address
_VMSA_ADDRESS: Final = 0xFFFFFFFFF000
_TABLE: Final = UUID("9438d606-4f22-4cc9-b479-a793d411fd21")
_COMMAND_LINE: Final = UUID("97d02dd8-bd20-4c94-aa78-e7714d36ab2a")
_INITRD: Final = UUID("44baf731-3a2f-4bd7-9af1-41e29169781d")
_KERNEL: Final = UUID("4de79437-abd2-427f-b835-d5b172d2045b")
_HASH_ENTRY: Final = struct.Struct("<16sH32s")
_HASH_HEAD: Final = struct.Struct("<16sH")


class _PageType(IntEnum):
    NORMAL = 1
    VMSA = 2
    ZERO = 3
    UNMEASURED = 4
    SECRETS = 5
    CPUID = 6


_PAGE_TYPES: Final = {
    SevPages.SECURE_MEMORY: _PageType.ZERO,
    SevPages.CALLING_AREA: _PageType.ZERO,
    SevPages.KERNEL_HASHES: _PageType.ZERO,  # if no kernel is given
    SevPages.SECRETS: _PageType.SECRETS,
    SevPages.CPUID: _PageType.CPUID,
}


def _sign(family: int, model: int, stepping: int) -> int:
    """CPUID function 1, EAX ("CPUID Specification", document 25481); families from 15 on."""
    return (family - 15) << 20 | model >> 4 << 16 | 15 << 8 | (model & 15) << 4 | stepping


CPU_SIGNATURES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "EPYC": _sign(23, 1, 2),
        "EPYC-v4": _sign(23, 1, 2),
        "EPYC-Rome": _sign(23, 49, 0),
        "EPYC-Milan": _sign(25, 1, 1),
        "EPYC-Genoa": _sign(25, 17, 0),
        "EPYC-Turin": _sign(26, 0, 0),
    }
)
"""CPUID signature by QEMU's name of the processor (`-cpu`, target/i386/cpu.c)."""


def measure_snp(
    firmware: Firmware, boot: DirectBoot | None, *, vcpus: int, cpu_signature: int, features: int = SNP_ACTIVE
) -> bytes:
    """Returns the launch digest, 48 bytes, of a guest that QEMU starts.

    Args:
        boot: the files measured by `kernel-hashes=on`; None: whatever the firmware finds, unmeasured.
        vcpus: number of processors.
        cpu_signature: signature of the guest's processor, see `CPU_SIGNATURES`.
        features: SEV_FEATURES that the host's kernel sets.

    Raises:
        ConfigError: the firmware does not know SEV-SNP, or does not check the kernel; or the number of processors is invalid.
    """
    if not 1 <= vcpus <= MAX_VCPUS:
        raise ConfigError(f"a guest has 1 to {MAX_VCPUS} processors, not {vcpus}")
    if not firmware.sev_sections:
        raise ConfigError("this firmware does not know SEV-SNP; take OVMF's AmdSev build (Debian: ovmf-amdsev)")
    if boot is not None and not firmware.checks_hashes:
        raise ConfigError(
            "this firmware starts any kernel: it has no place for hashes; take OVMF's AmdSev build (Debian: ovmf-amdsev)"
        )
    if vcpus > 1 and not firmware.reset_address:
        raise ConfigError("this firmware does not say where the second processor begins; take OVMF's AmdSev build")
    digest = _LaunchDigest()
    digest.add_data(firmware.address, firmware.data)
    for section in firmware.sev_sections:
        if section.pages is SevPages.KERNEL_HASHES and boot is not None:
            digest.add_data(section.address, _make_hashes_page(boot, firmware.hashes_address % PAGE_BYTES))
        else:
            digest.add_blank(_PAGE_TYPES[section.pages], section.address, section.size)
    for number in range(vcpus):
        address = firmware.reset_address if number else FIRST_ADDRESS
        digest.add_vmsa(make_vmsa(address, cpu_signature, features))
    return digest.value


class _LaunchDigest:
    """GCTX.LD: a hash chain over everything that was added."""

    def __init__(self) -> None:
        self.value = bytes(_DIGEST_BYTES)

    def add_data(self, address: int, data: bytes) -> None:
        for offset in range(0, len(data), PAGE_BYTES):
            page = hashlib.sha384(data[offset : offset + PAGE_BYTES]).digest()
            self._extend(_PageType.NORMAL, address + offset, page)

    def add_blank(self, kind: _PageType, address: int, size: int) -> None:
        """Adds pages whose content is not measured, or is all zeros."""
        for offset in range(0, size, PAGE_BYTES):
            self._extend(kind, address + offset, bytes(_DIGEST_BYTES))

    def add_vmsa(self, page: bytes) -> None:
        self._extend(_PageType.VMSA, _VMSA_ADDRESS, hashlib.sha384(page).digest())

    def _extend(self, kind: _PageType, address: int, contents: bytes) -> None:
        info = _PAGE_INFO.pack(self.value, contents, _PAGE_INFO.size, kind, 0, address)
        self.value = hashlib.sha384(info).digest()


def _make_hashes_page(boot: DirectBoot, offset: int) -> bytes:
    """QEMU's `struct PaddedSevHashTable` at its place in a page of zeros."""
    try:
        line = boot.command_line.encode("ascii") + b"\0"
    except UnicodeEncodeError:
        raise ConfigError("the kernel's command line has a letter beyond ASCII; leave it out") from None
    hashed = {_COMMAND_LINE: line, _INITRD: boot.initrd, _KERNEL: boot.kernel}
    length = _HASH_HEAD.size + len(hashed) * _HASH_ENTRY.size
    table = _HASH_HEAD.pack(_TABLE.bytes_le, length)
    for guid, data in hashed.items():
        table += _HASH_ENTRY.pack(guid.bytes_le, _HASH_ENTRY.size, hashlib.sha256(data).digest())
    if offset + len(table) > PAGE_BYTES:
        raise ConfigError("the firmware's place for hashes reaches over its page, which QEMU cannot fill")
    return bytes(offset) + table + bytes(PAGE_BYTES - offset - len(table))
