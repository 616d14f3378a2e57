"""What `tests.compiling` compiles: every kernel that a program launches, in the formats that it may meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu.float8 import float8_matmul, pack_float8
from cloister.backends.base import GREEDY, KVLayout
from cloister.backends.tensors import GroupedTensor, ProgressiveTensor
from cloister.backends.torch.cuda.program import CudaProgram
from cloister.backends.torch.cuda.tiles import CODE_TILES
from tests.driving import Driver, RandomWeights, make_spec

SPEC = make_spec(hidden=256, intermediate=256, heads=(8, 2), head_dim=128, num_layers=1, qk_norm=True, window=1000)


class CodedWeights(RandomWeights):
    """Random weights, of which gate and up are in 4 bits, down is in 8 and meets inputs in int8, and o is in two levels."""

    def read(self, name: str) -> Any:
        tensor = super().read(name)
        if name.endswith(("gate.weight", "up.weight")):
            return _grouped(tensor.shape, 4, 128)
        if name.endswith("down.weight"):
            return _grouped(tensor.shape, 8, tensor.shape[1])
        return _two_levels(tensor.shape) if name.endswith("o.weight") else tensor


def work() -> None:
    """Launches steps that prefill, decode and do both."""
    program = CudaProgram(SPEC, CodedWeights(SPEC), KVLayout(64, 16), dtype=torch.bfloat16, device=torch.device("cpu"))
    program._attention._binding = "multiprocessor"
    driver = Driver(program, 64, 16)
    driver.step({"a": [1] * 40})
    driver.step({"a": [1], "b": [1] * 300})
    program.step(driver.plan({"a": [1], "b": [1]}), GREEDY)


def work_in_fp8() -> None:
    """Launches the products that only devices with FP8 have."""
    matrix = pack_float8(torch.ones(256, 256))
    for tile in CODE_TILES:
        float8_matmul(torch.ones(3, 256, dtype=torch.bfloat16), matrix, None, torch.bfloat16, tile)


def _grouped(shape: tuple[int, ...], bits: int, group_size: int) -> GroupedTensor:
    scales = np.ones((shape[0], shape[1] // group_size), np.float32)
    zeros = np.zeros(scales.shape, np.uint8) if bits == 4 else None
    codes, meets = np.zeros(shape, np.uint8), "bfloat16" if bits == 4 else "int8"
    return GroupedTensor(codes, scales, zeros, None, bits, group_size, meets)  # type: ignore[arg-type]


def _two_levels(shape: tuple[int, ...]) -> ProgressiveTensor:
    groups = np.ones((shape[0], shape[1] // 128), np.uint8)
    return ProgressiveTensor(np.zeros(shape, np.uint8), np.ones(shape[0], np.float32), groups, groups, 128)
