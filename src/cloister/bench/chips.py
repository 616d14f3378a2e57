"""Chips as data: how fast each computes in each number format, and how fast it reads its memory. Pure.

Peaks are dense (no 2:4 sparsity) and of products that sum in at least the precision that inference needs (float32 for 16 bits,
int32 for int8). Figures are the vendor's if published, else computed from cores, width and clock; `source` says which. A
processor's clock is its base clock, the one that all cores hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cloister.types.errors import ConfigError

FORMATS: Mapping[str, int] = {"int8": 8, "float8": 8, "bfloat16": 16, "float16": 16, "float32": 32}
"""Number formats of products, and their bits; the first supported one that is wide enough is used."""

_WORD = re.compile(r"[a-z0-9]+")

HERE = "here"
"""Name of this machine, whose figures are measured (`kernels`)."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Peak performance of a chip.

    Attributes:
        peaks: number format -> multiplications and additions per second, in products of matrices.
        read_bytes_per_s: read bandwidth of its main memory.
        memory_bytes: size of that memory; None if unknown.
        link_bytes_per_s: bandwidth to its neighbours, in one direction, all links together; None if it has no link.
        source: source of the figures.
    """

    name: str
    peaks: Mapping[str, float]
    read_bytes_per_s: float
    memory_bytes: float | None
    link_bytes_per_s: float | None
    source: str

    def product_format(self, bits: float) -> str:
        """Returns the number format in which the chip multiplies operands of at most `bits` bits.

        Raises:
            ConfigError: it has no format that is wide enough.
        """
        for name, width in FORMATS.items():
            if name in self.peaks and width >= bits:
                return name
        known = ", ".join(self.peaks)
        raise ConfigError(f"{self.name} has no peak for products of {bits:g} bits; it has: {known}", param="activation_bits")

    def product_peak(self, bits: float) -> float:
        """Returns operations per second in that format."""
        return self.peaks[self.product_format(bits)]

    @property
    def vector_peak(self) -> float:
        """Operations per second outside of products: float32, or the slowest format that is known."""
        return self.peaks.get("float32", min(self.peaks.values()))

    def ridge(self, bits: float) -> float:
        """Returns the intensity, in FLOP per byte, above which a product is bound by arithmetic."""
        return self.product_peak(bits) / self.read_bytes_per_s


def _chip(
    name: str, teraflops: Mapping[str, float], read_gb_s: float, memory_gb: float, link_gb_s: float | None, source: str
) -> Chip:
    peaks = {form: teraflops[form] * 1e12 for form in FORMATS if form in teraflops}
    return Chip(name, peaks, read_gb_s * 1e9, memory_gb * 1e9, None if link_gb_s is None else link_gb_s * 1e9, source)


def _processor(
    name: str, cores: int, gigahertz: float, flops_per_cycle: Mapping[str, int], read_gb_s: float, memory_gb: float, source: str
) -> Chip:
    teraflops = {form: cores * gigahertz * flops / 1e3 for form, flops in flops_per_cycle.items()}
    return _chip(name, teraflops, read_gb_s, memory_gb, None, f"counted: {cores} cores at {gigahertz:g} GHz; {source}")


def _sixteen(teraflops: float) -> dict[str, float]:
    return {"bfloat16": teraflops, "float16": teraflops}


_AMX = {"float32": 64, "bfloat16": 1024, "int8": 2048}
_ZEN4 = {"float32": 32, "bfloat16": 64, "int8": 128}
_ZEN5 = {"float32": 64, "bfloat16": 128, "int8": 256}

_TABLE = (
    _chip(
        "a100-sxm-80gb", {"float32": 19.5, **_sixteen(312), "int8": 624}, 2039, 80, 300,
        "NVIDIA A100 Tensor Core GPU data sheet; NVLink 600 GB/s both ways",
    ),
    _chip(
        "a100-sxm-40gb", {"float32": 19.5, **_sixteen(312), "int8": 624}, 1555, 40, 300,
        "NVIDIA A100 Tensor Core GPU data sheet; NVLink 600 GB/s both ways",
    ),
    _chip(
        "a100-pcie-80gb", {"float32": 19.5, **_sixteen(312), "int8": 624}, 1935, 80, 32,
        "NVIDIA A100 Tensor Core GPU data sheet; PCIe 4.0 x16, no bridge",
    ),
    _chip(
        "h100-sxm", {"float32": 67, **_sixteen(989.4), "float8": 1978.9, "int8": 1978.9}, 3350, 80, 450,
        "NVIDIA H100 Tensor Core GPU data sheet (its figures with sparsity halved); NVLink 900 GB/s both ways",
    ),
    _chip(
        "h100-pcie", {"float32": 51, **_sixteen(756), "float8": 1513, "int8": 1513}, 2000, 80, 64,
        "NVIDIA H100 Tensor Core GPU data sheet (its figures with sparsity halved); PCIe 5.0 x16, no bridge",
    ),
    _chip(
        "h200", {"float32": 67, **_sixteen(989.4), "float8": 1978.9, "int8": 1978.9}, 4800, 141, 450,
        "NVIDIA H200 Tensor Core GPU data sheet (its figures with sparsity halved); NVLink 900 GB/s both ways",
    ),
    _chip(
        "l40s", {"float32": 91.6, **_sixteen(362), "float8": 733, "int8": 733}, 864, 48, 32,
        "NVIDIA L40S data sheet; PCIe 4.0 x16",
    ),
    _chip(
        "l4", {"float32": 30.3, **_sixteen(121), "float8": 242.5, "int8": 242.5}, 300, 24, 32,
        "NVIDIA L4 Tensor Core GPU data sheet (its figures with sparsity halved); PCIe 4.0 x16",
    ),
    _chip(
        "t4", {"float32": 8.1, "float16": 65, "int8": 130}, 320, 16, 16,
        "NVIDIA T4 data sheet and product brief; PCIe 3.0 x16",
    ),
    _chip(
        "rtx-4090", {"float32": 82.6, **_sixteen(165.2), "float8": 330.3, "int8": 660.6}, 1008, 24, 32,
        "NVIDIA Ada GPU architecture white paper, appendix A (float32 accumulate); PCIe 4.0 x16",
    ),
    _chip(
        "mi300x", {"float32": 163.4, **_sixteen(1307.4), "float8": 2614.9, "int8": 2614.9}, 5300, 192, 448,
        "AMD Instinct MI300X data sheet; Infinity Fabric 7 links of 128 GB/s both ways",
    ),
    _chip(
        "ascend-910b", {**_sixteen(353.9), "int8": 707.8}, 1600, 64, None,
        "counted for 910B2, which has no public data sheet: 24 cube cores at 1.8 GHz, 16 x 16 x 16 products a cycle (CANN "
        "platform file Ascend910B2.ini), twice that in int8; HBM2e as its servers are listed",
    ),
    _chip(
        "tpu-v5e", {"bfloat16": 197, "int8": 393}, 819, 16, 200,
        "Google Cloud TPU v5e documentation; ICI 400 GB/s both ways",
    ),
    _chip(
        "m2-ultra", {"float32": 27.2, "float16": 27.2}, 800, 192, None,
        "Apple Mac Pro (2023) page: GPU with 76 cores; a core computes float16 no faster than float32",
    ),
    _processor("epyc-9654", 96, 2.4, _ZEN4, 460.8, 768, "Zen 4 with 256-bit units; 12 channels of DDR5-4800"),
    _processor("epyc-9755", 128, 2.7, _ZEN5, 576, 768, "Zen 5 with 512-bit units; 12 channels of DDR5-6000"),
    _processor("xeon-8480", 56, 2.0, _AMX, 307.2, 512, "Sapphire Rapids, one AMX unit a core; 8 channels of DDR5-4800"),
    _processor("xeon-8592", 64, 1.9, _AMX, 358.4, 512, "Emerald Rapids, one AMX unit a core; 8 channels of DDR5-5600"),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _TABLE}


def find_chip(name: str) -> Chip:
    """Returns the first chip of the table whose name has every word of `name`: "A100" is a100-sxm-80gb.

    Raises:
        ConfigError: there is none; the message lists the known ones.
    """
    words = set(_WORD.findall(name.lower()))
    chip = next((chip for chip in _TABLE if words and words <= set(_WORD.findall(chip.name))), None)
    if chip is None:
        known = ", ".join((*CHIPS, HERE))
        raise ConfigError(f"there is no chip {name!r} in the table; it has: {known}", param="chip")
    return chip
