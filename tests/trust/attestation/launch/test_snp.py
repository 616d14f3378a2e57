"""Launch digests of SEV-SNP are those that AMD's processors compute: equal to what sev-snp-measure says of the same guests."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from cloister.trust.attestation.launch import CPU_SIGNATURES, DirectBoot, measure_snp, read_firmware
from cloister.types.errors import ConfigError
from tests.attestation_vectors import LAUNCH

VECTORS: list[dict[str, Any]] = json.loads((LAUNCH / "snp.json").read_bytes())
AMD_SEV = (LAUNCH / "ovmf_AmdSev_suffix.bin").read_bytes()
ORDINARY = (LAUNCH / "ovmf_OvmfX64_suffix.bin").read_bytes()
BOOT = DirectBoot(b"kernel", b"initrd", "ro root=/dev/dm-0")


def measure(boot: DirectBoot | None = BOOT, firmware: bytes = AMD_SEV, **changes: int) -> str:
    settings = {"vcpus": 2, "cpu_signature": CPU_SIGNATURES["EPYC-Milan"], **changes}
    return measure_snp(read_firmware(firmware), boot, **settings).hex()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['name']}-{vector['vcpus']}-{vector['cpu']}")
def test_a_guest_measures_as_sev_snp_measure_says(vector):
    boot = None
    if vector["kernel"] is not None:
        boot = DirectBoot(vector["kernel"].encode(), vector["initrd"].encode(), vector["command_line"])
    firmware = (LAUNCH / vector["firmware"]).read_bytes()
    settings = {name: vector[name] for name in ("vcpus", "features")}
    found = measure(boot, firmware, cpu_signature=CPU_SIGNATURES[vector["cpu"]], **settings)
    assert found == vector["measurement"]


@pytest.mark.parametrize(
    "changed",
    [
        {"boot": replace(BOOT, kernel=b"kernem")},
        {"boot": replace(BOOT, initrd=b"")},
        {"boot": replace(BOOT, command_line="rw root=/dev/dm-0")},
        {"boot": None},
        {"firmware": bytes(4096) + AMD_SEV},
        {"firmware": b"\1" + AMD_SEV[1:]},
        {"vcpus": 3},
        {"cpu_signature": CPU_SIGNATURES["EPYC-Genoa"]},
        {"features": 0x21},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_a_host_changes_changes_the_digest(changed):
    assert measure(**changed) != measure()


def test_firmware_that_starts_any_kernel_is_not_measured_with_one():
    with pytest.raises(ConfigError, match="AmdSev"):
        measure(firmware=ORDINARY)


@pytest.mark.parametrize("vcpus", [0, 513])
def test_a_guest_without_processors_or_with_too_many_is_refused(vcpus):
    with pytest.raises(ConfigError, match="1 to 512"):
        measure(vcpus=vcpus)


def test_a_command_line_beyond_ascii_is_refused():
    with pytest.raises(ConfigError, match="ASCII"):
        measure(replace(BOOT, command_line="quiét"))


@pytest.mark.parametrize(
    "firmware",
    [b"", b"x", bytes(4096), AMD_SEV[:4000], AMD_SEV + bytes(4096), AMD_SEV[:-50] + bytes(50)],
    ids=["nothing", "a byte", "zeros", "half a page", "a page too many", "no footer"],
)
def test_what_is_no_ovmf_is_refused_in_words(firmware):
    with pytest.raises(ConfigError, match="firmware"):
        measure(firmware=firmware)


def test_no_byte_of_the_tables_makes_the_reader_stumble():
    for at in range(3000, len(AMD_SEV)):
        changed = bytearray(AMD_SEV)
        changed[at] ^= 0xFF
        with contextlib.suppress(ConfigError):  # anything else is a stumble
            read_firmware(bytes(changed))
