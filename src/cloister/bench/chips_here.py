"""This machine as a chip: memory bandwidth and peak matrix throughput, measured now.

numpy's BLAS multiplies float32. Peaks of narrow formats are those of the native kernels on matrices of suitable size; without
compiled kernels there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS, KVLayout
from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.backends.tensors import GroupedTensor, Tensor
from cloister.bench.chips import HERE, Chip
from cloister.bench.kernels import make_batch, wall_times
from cloister.bench.roofline_operators import Numbers, Work, list_operators
from cloister.engine.machine import Machine, read_machine
from cloister.models.decoder import tensor_shapes
from cloister.quant import HeldWeights
from cloister.types.errors import ConfigError

READ_BYTES = 512 << 20  # larger than the private caches of a few cores
PRODUCT_SIZE = 1536
REPEATS = 5

_ROWS = 512
_LAYER = LayerSpec(AttentionSpec(8, 8, 128, 128**-0.5, RopeSpec((1.0,) * 64)), MlpSpec(4096))
_DECODER = DecoderSpec("measured", 64, 1024, (_LAYER,), 1e-6, _ROWS)


def measure_here(num_threads: int | None = None, *, read_bytes: int = READ_BYTES, product_size: int = PRODUCT_SIZE) -> Chip:
    """Measures this machine: the best of some runs, about three seconds in all.

    Args:
        num_threads: threads for reading and narrow products; None uses every CPU that this process may use. Products in float32
            use the threads of numpy's BLAS.
        read_bytes: size of the buffer to read; at most a quarter of the free memory.
        product_size: rows and columns of the matrices.
    """
    machine = read_machine()
    num_threads = num_threads or machine.num_cpus
    size = min(read_bytes, machine.available_bytes // 4)
    return Chip(
        HERE,
        measure_narrow_products(num_threads) | {"float32": measure_product(product_size)},
        measure_reading(size, num_threads),
        machine.memory_bytes,
        None,
        _describe(machine, num_threads),
    )


def measure_reading(size_bytes: int, num_threads: int) -> float:
    """Returns bytes per second of reading memory on some threads at once: the maximum of an array, which numpy vectorises."""
    parts = np.array_split(np.ones(size_bytes // 4, np.float32), num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        return size_bytes / _best(lambda: list(pool.map(np.max, parts)))


def measure_product(size: int) -> float:
    """Returns operations per second of a product of two square float32 matrices."""
    left, right = np.ones((2, size, size), np.float32)
    out = np.empty((size, size), np.float32)
    return 2 * size**3 / _best(lambda: np.matmul(left, right, out=out))


def measure_narrow_products(num_threads: int) -> dict[str, float]:
    """Returns operations per second of the native kernels in int8 and bfloat16, by format; empty if there are none."""
    if "native" not in BACKENDS.names():
        return {}
    try:
        return {form: _measure_native(form, num_threads) for form in ("int8", "bfloat16")}
    except ConfigError:  # the kernels were not compiled
        return {}


def _measure_native(form: str, num_threads: int) -> float:
    """The fastest product of a layer with weights of one format, over several forward passes."""
    backend = BACKENDS.get("native")(num_threads=num_threads, device="cpu", dtype="bfloat16")
    weights = HeldWeights({name: _even_tensor(form, name, shape) for name, shape in tensor_shapes(_DECODER)})
    program = backend.build(_DECODER, weights, KVLayout(_ROWS // 16, 16))
    work = Work.prefill(_ROWS, 1)
    batch, rates = make_batch(work, _DECODER.vocab_size, 16), []
    products = [
        op for op in list_operators(_DECODER, work, Numbers()) if op.unit == "matrix" and op.part not in ("attention", "head")
    ]
    for _ in range(REPEATS):
        with program.record() as spans:
            program.step(batch, LOGITS)
        for part, seconds in wall_times(spans).items():
            rates.append(sum(op.num_flops for op in products if op.part == part) / seconds)
    return max(rates)


def _even_tensor(form: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of equal numbers: the speed of a product does not depend on them. `form` of matrices: "int8" or "bfloat16"."""
    if form == "bfloat16" or len(shape) == 1 or name.startswith(("embed", "head")):
        return np.full(shape, 0.03125, ml_dtypes.bfloat16)
    scales = np.full((shape[0], 1), 1e-3, np.float32)
    return GroupedTensor(np.full(shape, 160, np.uint8), scales, None, None, 8, shape[1], "int8")


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, after a warm-up."""
    run()
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return min(times)


def _describe(machine: Machine, num_threads: int) -> str:
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return f"measured now: {threads}, {machine.num_cpus} CPUs; other programs lower it"
