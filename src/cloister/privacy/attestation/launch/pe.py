"""The Authenticode digest of a PE file, which firmware measures before it starts one. Pure.

"Windows Authenticode Portable Executable Signature Format" (2008), "Calculating the PE Image Hash": everything but the checksum
and the place and content of signatures. As edk2 reads it (OvmfPkg/Tcg/TdTcg2Dxe/MeasureBootPeCoff.c), which adds no padding.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

from cloister.types.errors import ConfigError

_PE_AT: Final = 0x3C
_COFF_BYTES: Final = 20
_SECTION_BYTES: Final = 40
_CHECKSUM_AT, _HEADERS_AT = 64, 60  # of the optional header
_DIRECTORIES_AT: Final = {0x10B: 96, 0x20B: 112}  # by magic: PE32, PE32+
_SECURITY: Final = 4  # number of the directory of signatures, 8 bytes each


def hash_pe(data: bytes) -> bytes:
    """Returns SHA-384 of what Authenticode covers, 48 bytes.

    Raises:
        ConfigError: it is no PE file, or cut short.
    """
    try:
        return _hash(data)
    except struct.error:
        raise ConfigError("the kernel is no whole PE file; UEFI starts only kernels with an EFI stub") from None


def _hash(data: bytes) -> bytes:
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
