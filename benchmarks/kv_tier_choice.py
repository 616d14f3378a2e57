"""Restore or recompute: the choice of a KV tier beside always loading, always computing, and one of both
at a time, on disks of several speeds.

    python -m benchmarks.kv_tier_choice [--model MODEL] [--speeds MB ...] [--conversations N] [--turns N] [--tokens N]
    python -m benchmarks.kv_tier_choice --trace mooncake --kv-mb 9.8 [--requests N]

Conversations several times as large as the KV memory of the device; each request is sent to all engines in turn, and all must
give the same tokens. A slow disk is a real one whose reads a wrapper delays, one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any, Final

from benchmarks.harness import Bench, make_parser
from benchmarks.kv_tiers import (
    ANSWER_TOKENS,
    STORED,
    TRACE_LEN,
    TURN_TOKENS,
    TimedEngine,
    converse,
    count_stored,
    read_turns,
    replay,
    running,
)
from benchmarks.models import MODELS, find_model
from cloister.engine import EngineCore, kv_tier_files, kv_tier_reads
from cloister.engine.transports import ProcessTransport
from cloister.kv.tiers import KVTiers
from cloister.launch import build_engine
from cloister.scheduler import kv_restores
from cloister.scheduler.two_sided_restores import TwoSidedRestores
from cloister.types.config import EngineConfig

SPEED: Final = "BENCHMARK_KV_TIER_SPEED"
"""Bytes a second that reads of the engine process may take; unset, no limit."""
PATIENCE_S: Final = 60.0
LATE_S: Final = 0.0005
"""By so much a sleep of the slow disk may have been too long."""


def build_choosing(config: EngineConfig) -> EngineCore:
    """Makes an engine on a disk of the given speed."""
    bytes_s = float(os.environ[SPEED])
    if bytes_s:
        _slow_down(bytes_s)
    return build_engine(config)


def build_loading(config: EngineConfig) -> EngineCore:
    """Makes one that always loads, however long that takes."""
    KVTiers.predict_s = lambda *_: 0.0  # type: ignore[method-assign]
    TwoSidedRestores.fits = lambda *_: False  # type: ignore[method-assign]
    kv_restores.KVRestores.is_overtaken = lambda *_: False  # type: ignore[method-assign]
    kv_restores.MIN_READ_S = PATIENCE_S  # type: ignore[misc]
    return build_choosing(config)


def build_one_sided(config: EngineConfig) -> EngineCore:
    """Makes one that computes or loads, and never both at once."""
    TwoSidedRestores.fits = lambda *_: False  # type: ignore[method-assign]
    return build_choosing(config)


def _slow_down(bytes_s: float) -> None:
    kv_tier_files.DISK_ENGINES = ("pread", "direct")  # type: ignore[attr-defined]  # those that call what is slowed down
    preadv, lock, free_s = os.preadv, threading.Lock(), 0.0

    def read_slowly(fd: int, buffers: Any, place: int) -> int:
        nonlocal free_s
        with lock:
            num_bytes = preadv(fd, buffers, place)
            # a sleep ends late: the next one, if it follows at once, is shorter by that
            free_s = max(free_s, time.perf_counter() - LATE_S) + num_bytes / bytes_s
            time.sleep(max(0.0, free_s - time.perf_counter()))
        return num_bytes

    kv_tier_reads.os.preadv = read_slowly  # type: ignore[attr-defined]


async def measure(options: argparse.Namespace, bench: Bench, model: str, speed_mb: float) -> None:
    """Measures one disk."""
    os.environ[SPEED] = str(speed_mb * 1e6)
    longest = TRACE_LEN if options.trace else options.tokens + options.turns * (TURN_TOKENS + ANSWER_TOKENS)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        base = EngineConfig(
            model=model,
            num_threads=1,
            prefix_cache=True,
            max_model_len=longest,
            max_num_seqs=2,
            weights_cache="",
            kv_memory_mb=options.kv_mb,
        )
        tiered = replace(base, kv_tier=f"disk:{directory},4G")
        engines = {"compute": TimedEngine(base)} | {
            kind: TimedEngine(tiered, ProcessTransport(f"benchmarks.kv_tier_choice:{build.__name__}"))
            for kind, build in (("load", build_loading), ("one side", build_one_sided), ("choose", build_choosing))
        }
        async with running([*engines.values()]):
            ready = engines["compute"].transport.ready
            assert ready is not None
            if options.trace is None:
                times, _ = await converse(engines, options, ready.model.vocab_size)
            else:
                times = await replay(engines, read_turns(options, ready.model.vocab_size))
    means = {kind: statistics.mean(taken) for kind, taken in times.items()}
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    ratios = {}
    for kind in ("one side", "choose"):
        ratios[kind] = means[kind] / min(means["compute"], means["load"])
    speed = f"{speed_mb:g} MB/s" if speed_mb else "its own speed"
    headers = ("tier", "TTFT mean, ms", "TTFT P50, ms", "mean over the better of compute and load", *STORED)
    rows = [
        (kind, 1e3 * means[kind], 1e3 * medians[kind], ratios.get(kind, "-"), *count_stored(engines[kind])) for kind in engines
    ]
    bench.print_rows(f"{speed}, {len(times['choose'])} later turns, all the same answers", headers, rows)
    bench.check(f"{speed}: choose over the better of compute and load, mean", ratios["choose"], high=1.1)


def main() -> int:
    """Reads the arguments."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0, 200, 80, 40, 10], help="MB/s of the disk; 0: its own")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=500, help="of a conversation's first prompt")
    parser.add_argument("--trace", choices=("mooncake",), default=None, help="conversations of a trace; unset, drawn ones")
    parser.add_argument("--requests", type=int, default=80, help="of the trace, about: whole conversations")
    parser.add_argument("--kv-mb", type=float, default=2.5, help="KV memory of the device")
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    model = str(find_model(options.model)) if options.model in MODELS else options.model
    bench = Bench(
        "_".join(["kv_tier_choice", *([options.trace] if options.trace else []), options.model.replace("-", "_")]),
        "Restore or recompute, and both at once, on disks of several speeds",
        "the choice takes at most 1.1 times the better of always computing (C) and always loading (L); both at once about"
        " L C / (L + C)",
    )
    load = os.getloadavg()
    for speed_mb in options.speeds:
        asyncio.run(measure(options, bench, model, speed_mb))
    bench.figures["model"] = options.model
    bench.figures["load average before, after"] = [load[0], os.getloadavg()[0]]
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
