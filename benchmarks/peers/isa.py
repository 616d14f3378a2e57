"""Instruction sets that everybody can be held to, so that one machine judges for lesser ones too. Linux on x86-64.

Ours takes kernels by name; oneDNN, which multiplies matrices for OpenVINO and torch, a variable of the environment; llama.cpp a
build of its own. Other parts of OpenVINO (normalisation, attention, float32 products of MLAS) ask the processor themselves, and
may use more than they are allowed here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One instruction set.

    Attributes:
        name: of our kernels, and of llama.cpp's build folder (`lb-NAME`).
        flags: what /proc/cpuinfo must list.
        onednn: value of ONEDNN_MAX_CPU_ISA.
        aten: value of ATEN_CPU_CAPABILITY, torch's own kernels.
        mkl: value of MKL_ENABLE_INSTRUCTIONS.
        openvino: properties that OpenVINO chooses by itself on a processor with no more than this. It asks the processor, not
            oneDNN: held to AVX2 it would quantise inputs for VNNI and give empty answers, and emulate bf16 where there is none.
    """

    name: str
    flags: tuple[str, ...] = ()
    onednn: str = ""
    aten: str = ""
    mkl: str = ""
    openvino: Mapping[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that hold oneDNN, torch and MKL to it."""
        return {"ONEDNN_MAX_CPU_ISA": self.onednn, "ATEN_CPU_CAPABILITY": self.aten, "MKL_ENABLE_INSTRUCTIONS": self.mkl}


_FLOAT32: Final = {"INFERENCE_PRECISION_HINT": "f32"}
_NO_VNNI: Final = {**_FLOAT32, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
ISAS: Final = {
    isa.name: isa
    for isa in (
        InstructionSet("avx2", ("avx2", "fma", "f16c"), "AVX2", "avx2", "AVX2", _NO_VNNI),
        InstructionSet("avxvnni", ("avx_vnni",), "AVX2_VNNI", "avx2", "AVX2", _FLOAT32),
        InstructionSet("avx512", _AVX512, "AVX512_CORE", "avx512", "AVX512", _NO_VNNI),
        InstructionSet("vnni", (*_AVX512, "avx512_vnni"), "AVX512_CORE_VNNI", "avx512", "AVX512", _FLOAT32),
        InstructionSet("bf16", (*_AVX512, "avx512_vnni", "avx512_bf16"), "AVX512_CORE_BF16", "avx512", "AVX512"),
        InstructionSet("amx", (*_AVX512, "avx512_bf16", "amx_int8", "amx_bf16"), "AVX512_CORE_AMX", "avx512", "AVX512"),
    )
}
"""From the least to the most."""
UNKNOWN: Final = InstructionSet("any")
"""What another processor has; nothing is held to it."""


def list_usable(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[InstructionSet]:
    """Returns what this processor has, the best last; never empty."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
    return [isa for isa in ISAS.values() if flags.issuperset(isa.flags)] or [UNKNOWN]


def are_for_one_processor(compiled: Collection[str], usable: Collection[InstructionSet]) -> bool:
    """Returns whether our kernels were compiled for this processor alone: lesser sets that it has are missing or slow ones.

    Args:
        compiled: names of the kernels that were compiled.
    """
    return not {isa.name for isa in usable}.issubset(compiled)
