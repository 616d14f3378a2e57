"""Measurements of TDX: MRTD from the calls that KVM makes, RTMRs from the events that firmware and kernel extend them with."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from uuid import UUID

import pytest

from cloister.trust.attestation.launch import DirectBoot, TdMeasurements, measure_td, read_firmware
from cloister.trust.attestation.launch.tdx import hash_pe
from cloister.types.errors import ConfigError
from tests.attestation_vectors import LAUNCH

CODE, VARIABLES, MEMORY = 0xFFFFE000, 0xFFFFD000, 0x809000
EXTEND, AUGMENT = 1, 2


def make_firmware(sections: list[tuple[int, int, int, int, int, int]], code: bytes = b"\xc3" * 4096) -> bytes:
    """Three pages: code, metadata, and the table at the end."""
    metadata = struct.pack("<4sIII", b"TDVF", 16 + 32 * len(sections), 1, len(sections))
    metadata += b"".join(struct.pack("<IIQQII", *section) for section in sections)
    entry = struct.pack("<IH", 4096 * 2, 22) + UUID("e47a6535-984a-4798-865e-4685a7bf8ec2").bytes_le
    footer = struct.pack("<H", len(entry) + 18) + UUID("96b582de-1fb2-45f7-baea-a366c55a082d").bytes_le
    return code + metadata.ljust(4096, b"\0") + (entry + footer + bytes(32)).rjust(4096, b"\0")


def make_kernel(content: bytes = b"k" * 512, signature: bytes = b"", checksum: int = 0) -> bytes:
    """A PE32+ file with one section and a signature behind it."""
    directories = bytearray(16 * 8)
    struct.pack_into("<II", directories, 4 * 8, 1024 if signature else 0, len(signature))
    optional = struct.pack("<H58xII44x", 0x20B, 512, checksum) + bytes(directories)
    head = b"MZ".ljust(60, b"\0") + struct.pack("<I", 64)
    head += struct.pack("<4sHH12xHH", b"PE\0\0", 0x8664, 1, len(optional), 0) + optional
    head += struct.pack("<8sIIII16x", b".text", len(content), 4096, len(content), 512)
    return head.ljust(512, b"\0") + content + signature


SECTIONS = [(0, 4096, CODE, 4096, 0, EXTEND), (4096, 4096, VARIABLES, 4096, 1, 0), (0, 0, MEMORY, 8192, 3, 0)]
BOOT = DirectBoot(make_kernel(), b"initrd", "quiet")


def measure(boot: DirectBoot = BOOT, sections=SECTIONS, code: bytes = b"\xc3" * 4096) -> TdMeasurements:
    return measure_td(read_firmware(make_firmware(sections, code)), boot)


def test_mrtd_is_the_digest_of_the_calls_that_add_and_measure_pages():
    expected = hashlib.sha384()
    for address, extended in [(CODE, True), (VARIABLES, False), (MEMORY, False), (MEMORY + 4096, False)]:
        expected.update(b"MEM.PAGE.ADD".ljust(16, b"\0") + address.to_bytes(8, "little") + bytes(104))
        for offset in range(0, 4096, 256) if extended else ():
            expected.update(b"MR.EXTEND".ljust(16, b"\0") + (address + offset).to_bytes(8, "little") + bytes(104))
            expected.update(b"\xc3" * 256)
    assert measure().mrtd == expected.digest()


def test_code_changes_mrtd_and_nothing_else():
    other = measure(code=b"\x90" * 4096)
    assert other.mrtd != measure().mrtd
    assert other.rtmrs == measure().rtmrs


def test_pages_that_are_added_later_are_not_in_mrtd():
    assert measure(sections=[*SECTIONS, (0, 0, 0x100000, 4096, 3, AUGMENT)]).mrtd == measure().mrtd


@pytest.mark.parametrize(
    ("changed", "register"),
    [
        ({"kernel": make_kernel(b"K" * 512)}, 1),
        ({"kernel": make_kernel() + b"behind it"}, 1),
        ({"command_line": "quiet init=/bin/sh"}, 2),
        ({"initrd": b"another"}, 2),
    ],
)
def test_each_part_of_a_boot_has_its_register(changed, register):
    before, after = measure().rtmrs, measure(replace(BOOT, **changed)).rtmrs
    assert [number for number in before if before[number] != after[number]] == [register]


def test_registers_are_chains_of_the_events_in_order():
    def extend(*events: bytes) -> bytes:
        value = bytes(48)
        for event in events:
            value = hashlib.sha384(value + hashlib.sha384(event).digest()).digest()
        return value

    assert measure().rtmrs[2] == extend("quiet initrd=initrd\0".encode("utf-16-le"), b"initrd")
    assert measure().rtmrs[3] == bytes(48)


def test_a_signature_or_a_checksum_changes_no_digest_of_a_kernel():
    assert hash_pe(make_kernel(signature=b"s" * 64)) == hash_pe(make_kernel(checksum=7)) == hash_pe(make_kernel())


@pytest.mark.parametrize("kernel", [b"", b"MZ", make_kernel()[:700], b"\x7fELF" + make_kernel()[4:]])
def test_a_kernel_that_is_no_pe_file_is_refused(kernel):
    with pytest.raises(ConfigError, match="PE file"):
        measure(replace(BOOT, kernel=kernel))


def test_firmware_without_tdx_metadata_is_refused():
    with pytest.raises(ConfigError, match="ovmf-inteltdx"):
        measure(sections=[])


def test_firmware_that_is_cut_short_is_refused():
    with pytest.raises(ConfigError, match="cut short"):
        measure_td(read_firmware((LAUNCH / "ovmf_AmdSev_suffix.bin").read_bytes()), BOOT)
