"""What the machine can do: how fast memory is read, and how fast anybody multiplies matrices of each format.

No library is fast on every instruction set: torch's `_int_mm` falls back to plain loops where oneDNN has no kernel for signed
inputs, and bf16 is emulated where there is none. So each format is multiplied in several ways, and the fastest counts. Those in
wider numbers are among them: codes of 8 bits may be multiplied as float32.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.engines import Launch
from benchmarks.peers.work import Figure

_READ_MIB: Final = 2048
_NUM_ROUNDS: Final = 5
_TIMEOUT_S: Final = 120.0
_GEMM_SHAPES: Final = ((2048, 2048, 2048), (512, 4864, 896), (512, 8192, 2048), (2048, 8192, 2048))
"""Rows, outputs and inputs; the fastest shape counts, so that the limit is not made low by one that fits badly."""
_GEMM_S: Final = 0.3
_PROBE: Final = (64, 896, 896)
_PROBE_S: Final = 0.03
_HOPELESS: Final = 8
"""A way that is so many times slower than the fastest at a small product is not tried at large ones."""
Product = Callable[[], object]


class Limits:
    """Measures the machine as if it were an engine; notes say which way of multiplying was the fastest for each format."""

    def __init__(self, launch: Launch) -> None:
        self._num_threads = launch.num_threads
        self._ways = list_ways(launch)
        self.notes: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Every figure warms up by itself."""

    def measure(self, figure: Figure, num_samples: int) -> list[float]:
        """Returns GB/s, or GFLOP/s (an addition and a multiplication are two)."""
        if figure.kind == "read":
            return self._read(num_samples)
        return [self._multiply(figure.name) for _ in range(num_samples)]

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
        return _READ_MIB * 2**20 / 1e9 / _median_s(data.sum, 0.5)

    def _multiply(self, name: str) -> float:
        """The fastest way's rate at the fastest shape."""
        torch = import_module("torch")
        torch.set_num_threads(self._num_threads)
        ways = self._ways if name == "gemm_int8" else {way: make for way, make in self._ways.items() if way in _FLOAT_WAYS}
        probes = {way: _rate(make, _PROBE, _PROBE_S) for way, make in ways.items()}
        hopeful = [way for way, rate in probes.items() if rate * _HOPELESS >= max(probes.values())]
        rates = {way: max(_rate(ways[way], shape, _GEMM_S) for shape in _GEMM_SHAPES) for way in hopeful}
        best = max(rates, key=rates.__getitem__)
        self.notes[name] = {"way": best, "GFLOP/s": {way: round(rate) for way, rate in (probes | rates).items()}}
        return rates[best]


def list_ways(launch: Launch) -> dict[str, Callable[[int, int, int], Product]]:
    """Returns what makes a product of [m, k] by [n, k], for each way that there is here."""
    ways: dict[str, Callable[[int, int, int], Product]] = {
        "torch, bf16": _make_bf16,
        "torch, float32": _make_float32,
        "oneDNN in torch, float32": _make_onednn_float32,
        "torch._int_mm": _make_int_mm,
        "oneDNN in torch, u8 by s8": _make_onednn_int8,
    }
    if find_spec("openvino") is not None:
        ways["OpenVINO, u8 by s8"] = partial(_make_openvino_int8, launch.num_threads)
    return ways


_FLOAT_WAYS: Final = ("torch, bf16", "torch, float32", "oneDNN in torch, float32")


def _make_bf16(m: int, n: int, k: int) -> Product:
    torch = import_module("torch")
    rows, weights = (torch.randn(size, k).to(torch.bfloat16) for size in (m, n))
    return lambda: torch.nn.functional.linear(rows, weights)


def _make_float32(m: int, n: int, k: int) -> Product:
    torch = import_module("torch")
    rows, weights = torch.randn(m, k), torch.randn(n, k)
    return lambda: torch.nn.functional.linear(rows, weights)


def _make_onednn_float32(m: int, n: int, k: int) -> Product:
    """As `_make_float32`, which is MKL's: that is slow on processors of other makers."""
    torch = import_module("torch")
    rows, weights = torch.randn(m, k).to_mkldnn(), torch.randn(n, k).to_mkldnn()
    return lambda: torch.nn.functional.linear(rows, weights)


def _make_int_mm(m: int, n: int, k: int) -> Product:
    torch = import_module("torch")
    rows, weights = (torch.randint(-128, 127, (size, k), dtype=torch.int8) for size in (m, n))
    return lambda: torch._int_mm(rows, weights.t())


def _make_onednn_int8(m: int, n: int, k: int) -> Product:
    """A quantised linear layer as torch's compiler calls it: weights packed beforehand, a scale for each output."""
    torch = import_module("torch")
    rows = torch.randint(0, 255, (m, k), dtype=torch.uint8)
    weights = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 127, (n, k), dtype=torch.int8), [m, k])
    scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int64)
    tail: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias, float32 out, nothing after it
    return lambda: torch.ops.onednn.qlinear_pointwise(rows, 0.02, 0, weights, scales, zeros, *tail)


def _make_openvino_int8(num_threads: int, m: int, n: int, k: int) -> Product:
    """A product of quantised inputs and weights; quantising the inputs is part of it."""
    numpy, openvino = import_module("numpy"), import_module("openvino")
    ops = import_module("openvino.opset13")
    codes = numpy.random.default_rng(0).integers(-127, 127, (n, k)).astype(numpy.int8)
    low, high = numpy.float32(0), numpy.float32(2.55)
    inputs = ops.parameter([m, k], numpy.float32)
    rows = ops.fake_quantize(inputs, low, high, low, high, 256)
    scales = ops.constant(numpy.full((n, 1), 0.01, numpy.float32))
    weights = ops.multiply(ops.convert(ops.constant(codes), numpy.float32), scales)
    model = openvino.Model([ops.matmul(rows, weights, False, True)], [inputs])
    request = openvino.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": num_threads}).create_infer_request()
    request.set_input_tensor(openvino.Tensor(numpy.ones((m, k), numpy.float32)))
    return lambda: request.infer()


def _rate(make: Callable[[int, int, int], Product], shape: tuple[int, int, int], seconds: float) -> float:
    """GFLOP/s of a product, 0 where there is no kernel for it."""
    m, n, k = shape
    try:
        return 2 * m * n * k / _median_s(make(m, n, k), seconds) / 1e9
    except (AttributeError, RuntimeError):
        return 0.0


def _median_s(call: Product, seconds: float) -> float:
    """Median time of as many calls as fill the seconds."""
    call()
    times: list[float] = []
    while sum(times) < seconds:
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)
