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
from cloister.models.quantized.base import Stored, StoredMatrix
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
class StackedMatrices:
    """The matrices of all experts of a layer.

    Attributes:
        shape: [experts, out, in].
    """

    name: str
    shape: tuple[int, int, int]
    blocks: TensorEntry
    scales: TensorEntry

    def take(self, expert: int, rows: slice) -> Stored:
        """Returns some outputs of one expert's matrix."""
        num_rows, num_in = len(range(*rows.indices(self.shape[1]))), self.shape[2]
        return StoredMatrix((num_rows, num_in), lambda: _form(num_in), lambda: self._read(expert, rows))

    def _read(self, expert: int, rows: slice) -> GroupedTensor:
        blocks = np.ascontiguousarray(self.blocks.read()[expert, rows])
        exponents = np.ascontiguousarray(self.scales.read()[expert, rows])
        if np.any(exponents == _NOT_A_NUMBER):
            raise ModelError(f"the checkpoint's tensor '{self.name}_scales' has a scale that is no number; download it again")
        halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
        return _grouped(E2M1_CODES[halves].reshape(len(blocks), -1), half_scales(exponents))


@dataclass(frozen=True, slots=True)
class MXFP4Scheme:
    """Protocol `quantized.base.Scheme`; only stacks of matrices are in MXFP4, other matrices are plain."""

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        return None

    def take_stack(self, name: str, shape: tuple[int, int, int], found: dict[str, TensorEntry]) -> StackedMatrices | None:
        """Takes the parts of a stack out of `found`; None, and nothing taken, where it is plain.

        Args:
            name: of the tensor in the checkpoint, such as "model.layers.0.mlp.experts.down_proj".
            shape: [experts, out, in] that config.json asks for.

        Raises:
            ModelError: a part is missing, or has another shape or type than it should.
        """
        if f"{name}_blocks" not in found:
            return None
        grouped = (*shape[:2], shape[2] // GROUP)
        entries = []
        for stored, expected in ((f"{name}_blocks", (*grouped, GROUP // 2)), (f"{name}_scales", grouped)):
            if stored not in found:
                raise ModelError(f"the checkpoint lacks the tensor {stored!r} of a quantised matrix; download it again")
            entry = found.pop(stored)
            if entry.dtype not in _BYTES or entry.shape != expected or shape[2] % GROUP:
                raise ModelError(f"tensor {stored!r} must be of type U8 and shape {expected}, and inputs a multiple of {GROUP}")
            entries.append(entry)
        return StackedMatrices(name, shape, *entries)


def read_mxfp4(fields: ConfigFields) -> MXFP4Scheme:
    """Reads a config of method "mxfp4" (ModelError says what is supported)."""
    fields.drop(("modules_to_not_convert", "dequantize"))  # the file shows which modules are plain
    return MXFP4Scheme()


def _form(num_in: int) -> GroupedTensor:
    return _grouped(np.full((1, num_in), _ZERO, np.uint8), np.ones((1, num_in // GROUP), np.float32))


def _grouped(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> GroupedTensor:
    return GroupedTensor(codes, scales, None, None, bits=8, group_size=GROUP, activations="bfloat16", is_mxfp4=True)
