"""This machine as a chip: its read bandwidth and its peak in products, measured now."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cloister.bench.chips import HERE, Chip
from cloister.engine.machine import Machine, read_machine

READ_BYTES = 512 << 20  # larger than the caches that a few cores have to themselves
PRODUCT_SIZE = 1536
REPEATS = 5


def measure_here(num_threads: int | None = None, *, read_bytes: int = READ_BYTES, product_size: int = PRODUCT_SIZE) -> Chip:
    """Measures this machine with numpy: the best of some runs, about two seconds in all.

    Args:
        num_threads: that read; None takes every CPU that this process may use. Products use the threads of numpy's BLAS.
        read_bytes: size of what is read; never more than a quarter of the memory that is free.
        product_size: rows and columns of the matrices.
    """
    machine = read_machine()
    num_threads = num_threads or machine.num_cpus
    size = min(read_bytes, machine.available_bytes // 4)
    return Chip(
        HERE,
        {"float32": measure_product(product_size)},
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


def _best(run: Callable[[], object]) -> float:
    """Seconds of the quickest of some runs, after one that does not count."""
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
