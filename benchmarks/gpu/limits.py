"""What a device can do at most, measured on it, and how its work is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

_FLUSHED_BYTES: Final = 256 << 20
"""Written before each replay: more than a second-level cache holds."""
_NUM_REPLAYS: Final = 25


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
    """Returns the median time of one launch in seconds, with a cold second-level cache; without a device, of one call.

    The launch is captured and replayed, as decode steps are: launched from Python, a small kernel would be measured by how long
    that takes, which is tens of microseconds.
    """
    if torch.cuda.is_available():
        return _time_captured(work)
    times = []
    for _ in range(2):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _time_captured(work: Callable[[], object]) -> float:
    work()  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    cache = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    make_event: Any = torch.cuda.Event  # its constructor carries no types
    spans = []
    for _ in range(_NUM_REPLAYS):
        cache.zero_()
        begin, end = make_event(enable_timing=True), make_event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in spans)) / 1e3
