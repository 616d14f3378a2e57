"""Restore or recompute: the choice of a KV tier beside always loading and always computing, on disks of several speeds.

    python -m benchmarks.kv_tier_choice [--model MODEL] [--speeds MB ...] [--conversations N] [--turns N] [--tokens N]

Conversations several times as large as the KV memory of the device; each request is sent to all engines in turn, and all must
give the same tokens. A slow disk is a real one whose reads a wrapper delays, one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any, Final

from benchmarks.kv_tiers import ANSWER_TOKENS, TURN_TOKENS, TimedEngine, converse, describe
from benchmarks.models import MODELS, find_model
from cloister.engine import EngineCore, kv_tier_files, kv_tier_reads
from cloister.engine.transports import ProcessTransport
from cloister.kv.tiers import KVTiers
from cloister.launch import build_engine
from cloister.scheduler import kv_restores
from cloister.types.config import EngineConfig

SPEED: Final = "BENCHMARK_KV_TIER_SPEED"
"""Bytes a second that reads of the engine process may take; unset, no limit."""
PATIENCE_S: Final = 60.0


def build_choosing(config: EngineConfig) -> EngineCore:
    """Makes an engine on a disk of the given speed."""
    bytes_s = float(os.environ[SPEED])
    if bytes_s:
        _slow_down(bytes_s)
    return build_engine(config)


def build_loading(config: EngineConfig) -> EngineCore:
    """Makes one that always loads, however long that takes."""
    KVTiers.predict_s = lambda *_: 0.0  # type: ignore[method-assign]
    kv_restores.KVRestores.is_overtaken = lambda *_: False  # type: ignore[method-assign]
    kv_restores.MIN_READ_S = PATIENCE_S  # type: ignore[misc]
    return build_choosing(config)


def _slow_down(bytes_s: float) -> None:
    kv_tier_files.DISK_ENGINES = ("pread", "direct")  # type: ignore[attr-defined]  # those that call what is slowed down
    preadv, lock = os.preadv, threading.Lock()

    def read_slowly(fd: int, buffers: Any, place: int) -> int:
        with lock:
            num_bytes = preadv(fd, buffers, place)
            time.sleep(num_bytes / bytes_s)
        return num_bytes

    kv_tier_reads.os.preadv = read_slowly  # type: ignore[attr-defined]


async def measure(options: argparse.Namespace, model: str, speed_mb: float) -> None:
    """Prints one row."""
    os.environ[SPEED] = str(speed_mb * 1e6)
    longest = options.tokens + options.turns * (TURN_TOKENS + ANSWER_TOKENS)
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
        engines = {
            "compute": TimedEngine(base, ProcessTransport("cloister.launch:build_engine")),
            "load": TimedEngine(tiered, ProcessTransport("benchmarks.kv_tier_choice:build_loading")),
            "choose": TimedEngine(tiered, ProcessTransport("benchmarks.kv_tier_choice:build_choosing")),
        }
        for engine in engines.values():
            await engine.transport.open(engine.config)
        tasks = [asyncio.create_task(engine.transport.run(engine.deliver)) for engine in engines.values()]
        ready = engines["compute"].transport.ready
        assert ready is not None
        times, _ = await converse(engines, options, ready.model.vocab_size)
        for task in tasks:
            task.cancel()
        for engine in engines.values():
            await engine.transport.close()
    means = {kind: statistics.mean(taken) for kind, taken in times.items()}
    better = min(means["compute"], means["load"])
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    better_p50 = min(medians["compute"], medians["load"])
    parts = ", ".join(f"{kind} {1e3 * means[kind]:.1f} (P50 {1e3 * medians[kind]:.1f})" for kind in times)
    print(
        f"{speed_mb or 'no limit':>8} MB/s: mean ms {parts}; choose / better {means['choose'] / better:.2f},"
        f" of P50 {medians['choose'] / better_p50:.2f}"
    )
    print(f"          load: {describe(engines['load'])}")
    print(f"          choose: {describe(engines['choose'])}", flush=True)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0, 40, 10, 2], help="MB/s of the disk; 0: its own speed")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=500, help="of a conversation's first prompt")
    parser.add_argument("--kv-mb", type=float, default=2.5, help="KV memory of the device")
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    model = str(find_model(options.model)) if options.model in MODELS else options.model
    for speed_mb in options.speeds:
        asyncio.run(measure(options, model, speed_mb))


if __name__ == "__main__":
    main()
