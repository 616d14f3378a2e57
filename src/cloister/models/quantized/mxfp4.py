"""MXFP4 checkpoints (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1): E2M1 numbers, 32 of which share an E8M0 scale.

gpt-oss stores the matrices of all experts of a layer as one tensor: `NAME_blocks [experts, out, in / 32, 16]`, the even input
of each pair in the low half of a byte, and `NAME_scales [experts, out, in / 32]`. Twice an E2M1 number is an integer from
-12 to 12, so a matrix becomes int8 codes with half the scale (`GroupedTensor`), which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import E2M1_CODES, GroupedTensor
from cloister.models.config import ConfigFields
from cloister.models.quantized.base import StackedMatrices, StackPlace, Stored, cut_stack, take_part
from cloister.models.safetensors import TensorEntry
from cloister.types.errors import ModelError

GROUP = 32
_ZERO = 128
_BYTES = ("U8",)
_NOT_A_NUMBER = 255


def half_scales(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Returns half of what E8M0 exponents stand for, 2 ** (e - 127); none may be 255, which is no number."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


@dataclass(frozen=True, slots=True)
class MXFP4Scheme:
    """Protocol `quantized.base.StackScheme`; only stacks of matrices are in MXFP4, other matrices are plain."""

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        return None

    def take_stack(self, place: StackPlace, found: dict[str, TensorEntry]) -> StackedMatrices | None:
        if f"{place.name}_blocks" not in found:
            return None
        num_experts, num_out, num_in = place.shape
        if num_in % GROUP:
            raise ModelError(f"{place.name} has {num_in} inputs, which are no whole groups of {GROUP}, as MXFP4 has them")
        grouped = num_experts, num_out, num_in // GROUP
        blocks = take_part(found, f"{place.name}_blocks", _BYTES, (*grouped, GROUP // 2))
        scales = take_part(found, f"{place.name}_scales", _BYTES, grouped)

        def read(expert: int, rows: slice) -> GroupedTensor:
            packed, exponents = cut_stack(blocks, expert, rows, False), cut_stack(scales, expert, rows, False)
            if np.any(exponents == _NOT_A_NUMBER):
                raise ModelError(
                    f"the checkpoint's tensor '{place.name}_scales' has a scale that is no number; download or copy it again"
                )
            halves = np.stack([packed & 15, packed >> 4], axis=-1)
            return _grouped(E2M1_CODES[halves].reshape(len(packed), -1), half_scales(exponents))

        return StackedMatrices(place.shape, lambda: _form(num_in), read)


def read_mxfp4(fields: ConfigFields) -> MXFP4Scheme:
    """Reads a config of method "mxfp4" (ModelError says what is supported)."""
    fields.drop(("modules_to_not_convert", "dequantize"))  # the file shows which modules are plain
    return MXFP4Scheme()


def _form(num_in: int) -> GroupedTensor:
    return _grouped(np.full((1, num_in), _ZERO, np.uint8), np.ones((1, num_in // GROUP), np.float32))


def _grouped(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> GroupedTensor:
    return GroupedTensor(codes, scales, None, None, bits=8, group_size=GROUP, activations="bfloat16", is_mxfp4=True)
