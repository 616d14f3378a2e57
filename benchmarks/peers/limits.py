"""What the machine can do: how fast memory is read, and how fast torch multiplies matrices of each format."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.engines import Launch
from benchmarks.peers.work import Figure

_READ_MIB: Final = 2048
_NUM_ROUNDS: Final = 5
_TIMEOUT_S: Final = 120.0
_GEMM_SHAPES: Final = ((2048, 2048, 2048), (512, 4864, 896), (512, 8192, 2048), (2048, 8192, 2048))
"""Rows, outputs and inputs; the fastest shape counts, so that the limit is not made low by one that fits badly."""
_GEMM_S: Final = 0.5


class Limits:
    """Measures the machine as if it were an engine."""

    def __init__(self, launch: Launch) -> None:
        self._num_threads = launch.num_threads
        self.notes: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Every figure warms up by itself."""

    def measure(self, figure: Figure, num_samples: int) -> list[float]:
        """Returns GB/s, or GFLOP/s (an addition and a multiplication are two)."""
        if figure.kind == "read":
            return self._read(num_samples)
        return [self._multiply(figure.name.removeprefix("gemm_")) for _ in range(num_samples)]

    def close(self) -> None:
        """There is nothing to end."""

    def _read(self, num_samples: int) -> list[float]:
        """Samples of a compiled loop, or of torch where there is no compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            return [self._sum() for _ in range(num_samples)]
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/read"
            source = str(Path(__file__).with_name("read.c"))
            build = [compiler, "-O3", "-march=native", "-pthread", source, "-o", program]
            subprocess.run(build, check=True, timeout=_TIMEOUT_S)
            command = [program, str(self._num_threads), str(_READ_MIB), str(num_samples * _NUM_ROUNDS)]
            done = subprocess.run(command, check=True, timeout=_TIMEOUT_S, capture_output=True, text=True)
        return [float(line) for line in done.stdout.split()]

    def _sum(self) -> float:
        torch = import_module("torch")
        torch.set_num_threads(self._num_threads)
        data = torch.ones(_READ_MIB << 18)
        return _READ_MIB * 2**20 / 1e9 / _median_s(data.sum)

    def _multiply(self, number_format: str) -> float:
        """The fastest shape's rate."""
        torch = import_module("torch")
        torch.set_num_threads(self._num_threads)
        make = {"bf16": _make_bf16, "int8": _make_int8}[number_format]
        return max(2 * m * n * k / _median_s(make(torch, m, n, k)) / 1e9 for m, n, k in _GEMM_SHAPES)


def _make_bf16(torch: Any, m: int, n: int, k: int) -> Callable[[], Any]:
    rows, weights = (torch.randn(size, k).to(torch.bfloat16) for size in (m, n))
    return lambda: torch.nn.functional.linear(rows, weights)


def _make_int8(torch: Any, m: int, n: int, k: int) -> Callable[[], Any]:
    rows, weights = (torch.randint(-128, 127, (size, k), dtype=torch.int8) for size in (m, n))
    return lambda: torch._int_mm(rows, weights.t())


def _median_s(call: Callable[[], Any]) -> float:
    call()
    times: list[float] = []
    while sum(times) < _GEMM_S or len(times) < 3:
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)
