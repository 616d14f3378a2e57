"""OVMF's tables: the location of its pages, and what a hypervisor must add to them for SEV-SNP and TDX. Pure.

The last bytes of the file hold a table of entries named by GUIDs, read backwards (edk2, OvmfPkg/ResetVector/Ia16/
ResetVectorVtf0.asm). Two of them lead to the metadata of SEV (OvmfPkg/ResetVector/X64/OvmfSevMetadata.asm) and of TDX
("Intel TDX Virtual Firmware Design Guide", section 11).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final
from uuid import UUID

from cloister.types.errors import ConfigError

PAGE_BYTES: Final = 4096
_FOUR_GIB: Final = 2**32
_MAX_BYTES: Final = 64 * 2**20
_AFTER_TABLE_BYTES: Final = 32  # the reset vector
_ENTRY: Final = struct.Struct("<H16s")  # length with this head, GUID; the data precede it
_FOOTER: Final = UUID("96b582de-1fb2-45f7-baea-a366c55a082d")
_SEV_HASHES: Final = UUID("7255371f-3a3b-4b04-927b-1da6efa8d454")
_SEV_RESET: Final = UUID("00f771de-1a7e-4fcb-890e-68c77e2fb44e")
_SEV_METADATA: Final = UUID("dc886566-984a-4798-a75e-5585a7bf67cc")
_TDX_METADATA: Final = UUID("e47a6535-984a-4798-865e-4685a7bf8ec2")
_METADATA_HEAD: Final = struct.Struct("<4sIII")  # signature, length, version, number of sections
_SEV_SECTION: Final = struct.Struct("<III")
_TDX_SECTION: Final = struct.Struct("<IIQQII")


class SevPages(IntEnum):
    """Type of a section of SEV's metadata."""

    SECURE_MEMORY = 1
    SECRETS = 2
    CPUID = 3
    CALLING_AREA = 4
    KERNEL_HASHES = 0x10


class TdxAttribute(IntFlag):
    """How the hypervisor adds a section of TDX's metadata."""

    EXTEND = 1
    AUGMENT = 2


@dataclass(frozen=True, slots=True)
class SevSection:
    """Pages that a hypervisor adds to the firmware: address and size in bytes of guest memory."""

    address: int
    size: int
    pages: SevPages


@dataclass(frozen=True, slots=True)
class TdxSection:
    """A part of the firmware, or memory for it: its offset in the file and its address in the guest, in bytes."""

    offset: int
    size: int
    address: int
    memory_size: int
    kind: int
    attributes: TdxAttribute


@dataclass(frozen=True, slots=True)
class Firmware:
    """The data of OVMF that launch measurements need.

    Attributes:
        data: the file; it ends at 4 GiB of the guest's memory.
        sev_sections: in the order in which the hypervisor adds them; empty if the firmware does not know SEV-SNP.
        hashes_address: address of the hashes of kernel, initrd and command line; 0 if the firmware does not check them.
        reset_address: start address of processors other than the first; 0 if the firmware does not define it.
        tdx_sections: likewise for TDX.
    """

    data: bytes
    sev_sections: tuple[SevSection, ...]
    hashes_address: int
    reset_address: int
    tdx_sections: tuple[TdxSection, ...]

    @property
    def address(self) -> int:
        """Address of the first byte in the guest's memory."""
        return _FOUR_GIB - len(self.data)

    @property
    def checks_hashes(self) -> bool:
        """Whether it refuses a kernel, initrd or command line other than those measured by SEV-SNP."""
        return bool(self.hashes_address) and any(s.pages is SevPages.KERNEL_HASHES for s in self.sev_sections)


def read_firmware(data: bytes) -> Firmware:
    """Reads OVMF.

    Args:
        data: the whole file: code and variables combined, as for confidential guests.

    Raises:
        ConfigError: it is not such a file, or its tables exceed it.
    """
    if not data or len(data) % PAGE_BYTES or len(data) > _MAX_BYTES:
        raise ConfigError(f"the firmware has {len(data)} bytes; OVMF is whole pages of {PAGE_BYTES} bytes, 64 MiB at most")
    try:
        table = dict(_read_table(data))
        return Firmware(
            data=data,
            sev_sections=tuple(_read_sev(data, table.get(_SEV_METADATA))),
            hashes_address=_read_address(table.get(_SEV_HASHES)),
            reset_address=_read_address(table.get(_SEV_RESET)),
            tdx_sections=tuple(_read_tdx(data, table.get(_TDX_METADATA))),
        )
    except (struct.error, ValueError) as error:
        raise ConfigError(f"the firmware's tables cannot be read ({error}); is this a file of OVMF?") from None


def _read_table(data: bytes) -> Iterator[tuple[UUID, bytes]]:
    end = len(data) - _AFTER_TABLE_BYTES
    length, guid = _ENTRY.unpack_from(data, end - _ENTRY.size)
    if UUID(bytes_le=guid) != _FOOTER or not _ENTRY.size <= length <= end:
        raise ValueError("no table at its end")
    start, end = end - length, end - _ENTRY.size
    while end - start >= _ENTRY.size:
        length, guid = _ENTRY.unpack_from(data, end - _ENTRY.size)
        if not _ENTRY.size <= length <= end - start:
            raise ValueError("an entry of a wrong length")
        yield UUID(bytes_le=guid), data[end - length : end - _ENTRY.size]
        end -= length


def _read_address(entry: bytes | None) -> int:
    return 0 if entry is None else int(struct.unpack_from("<I", entry)[0])


def _read_metadata(data: bytes, offset: int, signature: bytes, section: struct.Struct) -> Iterator[tuple[int, ...]]:
    found, length, version, number = _METADATA_HEAD.unpack_from(data, offset)
    if found != signature or version != 1:
        raise ValueError(f"metadata {found!r} of version {version}, where {signature!r} of version 1 is known")
    if length < _METADATA_HEAD.size + number * section.size:
        raise ValueError("metadata that is too short")
    for index in range(number):
        yield section.unpack_from(data, offset + _METADATA_HEAD.size + index * section.size)


def _find_metadata(data: bytes, entry: bytes) -> int:
    offset = len(data) - struct.unpack_from("<I", entry)[0]
    if offset < 0:
        raise ValueError("metadata before its beginning")
    return int(offset)


def _read_sev(data: bytes, entry: bytes | None) -> Iterator[SevSection]:
    if entry is None:
        return
    for address, size, kind in _read_metadata(data, _find_metadata(data, entry), b"ASEV", _SEV_SECTION):
        if address % PAGE_BYTES or size % PAGE_BYTES:
            raise ValueError("a section that is not whole pages")
        yield SevSection(address, size, SevPages(kind))


def _read_tdx(data: bytes, entry: bytes | None) -> Iterator[TdxSection]:
    if entry is None:
        return
    for fields in _read_metadata(data, _find_metadata(data, entry), b"TDVF", _TDX_SECTION):
        offset, size, address, memory_size, kind, attributes = fields
        if address % PAGE_BYTES or memory_size % PAGE_BYTES or size > memory_size:
            raise ValueError("a section that is not whole pages")
        yield TdxSection(offset, size, address, memory_size, kind, TdxAttribute(attributes))


# Boot files that a hypervisor passes to a guest's firmware. Pure.


@dataclass(frozen=True, slots=True)
class DirectBoot:
    """Kernel, initrd and command line, as for QEMU's `-kernel`, `-initrd` and `-append`.

    Attributes:
        kernel: the kernel's file, a bzImage with an EFI stub.
        initrd: the initial file system's file; empty without one.
        command_line: of the kernel, ASCII.
    """

    kernel: bytes
    initrd: bytes
    command_line: str
