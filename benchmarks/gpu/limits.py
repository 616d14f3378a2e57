"""What a device can do at most, measured on it, and how its work is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def measure_peaks(device: torch.device, *, size: int, num_bytes: int) -> Mapping[str, float]:
    """Returns bytes per second of a copy, and operations per second of square products, by number format.

    Args:
        size: rows and columns of the products.
        num_bytes: what is copied.
    """
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.randn(size, size, device=device)
    half, codes = square.bfloat16(), square.to(torch.int8)
    operations = 2.0 * size**3
    peaks = {
        "bytes": 2.0 * num_bytes / time_work(lambda: target.copy_(source)),
        "bfloat16": operations / time_work(lambda: half @ half.t()),
        "int8": operations / time_work(lambda: torch._int_mm(codes, codes.t())),
    }
    if has_fp8(device):
        eighth, one = half.to(torch.float8_e4m3fn), torch.ones((), device=device)
        peaks["float8"] = operations / time_work(
            lambda: torch._scaled_mm(eighth, eighth.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
    return peaks


def has_fp8(device: torch.device) -> bool:
    """Returns whether a device multiplies FP8 (compute capability 8.9)."""
    return device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def count_multiprocessors(device: torch.device) -> int:
    """Returns those of a device; 3 where Triton's interpreter stands for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def time_work(work: Callable[[], object]) -> float:
    """Returns the median time of one launch in seconds, with a cold second-level cache; without a device, of one call."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return float(do_bench(work, warmup=25, rep=200, return_mode="median")) / 1e3
    times = []
    for _ in range(2):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)
