"""The state in which a processor of an SEV-SNP guest begins, which is measured with the guest. Pure.

Fields and offsets: AMD64 Architecture Programmer's Manual, volume 2, appendix B, table B-4 (VMSA). Values: what QEMU sets at
reset (target/i386/cpu.c, `x86_cpu_reset_hold`) as KVM writes it (arch/x86/kvm/svm/sev.c, `sev_es_sync_vmsa`).
"""

from __future__ import annotations

import struct
from typing import Final

from cloister.privacy.attestation.launch.firmware import PAGE_BYTES

FIRST_ADDRESS: Final = 0xFFFFFFF0
"""Where the first processor begins: the reset vector."""
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
        address: where it begins to execute.
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
