"""What a KV tier keeps: hits of each `kv_tier_admission` on recorded requests, and how well it knows what is used most.

    python -m benchmarks.kv_tier_admission TRACE.jsonl.gz ... [--slots N ...] [--device N ...]

TRACE is a Mooncake trace: the ids of the prefix blocks of each request. The prefix cache, the pool and the tiers are those of
the engine; only the steps are left out, and storing is never paused. A hit is a block that need not be computed.

The second table asks what M5 asks of pages (ASPLOS 2025): of the accesses to the blocks that are accessed most in a window,
how many go to the blocks that a tracker would have picked.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Final

from cloister.kv import NO_BLOCK, BlockGroup, BlockPool, PrefixCache
from cloister.kv.access_sketch import AccessSketch
from cloister.kv.tier_admission import TIER_ADMISSIONS
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierLayout
from cloister.kv.tiers import KVTiers

SALT: Final = b"benchmark's salt"
ROOT: Final = b"root"
NUM_HOT: Final = 512
"""Blocks that a tracker picks in a window."""
WINDOW: Final = 8192
"""Accesses in a window."""


@dataclass(frozen=True)
class Row:
    """Shares of all blocks of prompts, blocks written to the tier, and the time of a request in it."""

    device: float
    tier: float
    num_stored: int
    request_s: float

    @property
    def hits(self) -> float:
        return self.device + self.tier


def read_trace(path: Path) -> list[list[bytes]]:
    """Returns the keys of each request."""
    with gzip.open(path, "rt") as lines:
        return [[sha256(str(number).encode()).digest() for number in json.loads(line)["hash_ids"]] for line in lines]


def replay(requests: Sequence[Sequence[bytes]], admission: str, num_device: int, num_slots: int) -> Row:
    """Has one request after the other find, load and keep its blocks."""
    make = TIER_ADMISSIONS.get(admission)
    groups = [BlockGroup(num_device)]
    pool = BlockPool(groups, 16)
    cache = PrefixCache(pool)
    index = KVTierIndex("host", TierLayout((4096,), (num_slots,)), make_admission=lambda num: make(num, SALT))
    tiers = cache.tiers = KVTiers([index])
    num_blocks = num_here = num_loaded = 0
    started_s = time.process_time()
    for keys in requests:
        num_blocks += len(keys)
        keys = keys[:num_device]
        num_known = cache.match_length(keys)
        num_found = cache.match_length(keys, tiers)
        found = [tiers.find(key, 0) for key in keys[num_known:num_found]]
        tiers.touch(block for block in reversed(found) if block is not None)
        num_here += num_known
        num_loaded += num_found - num_known
        table = cache.match(keys)
        pool.share(block for block in table if block != NO_BLOCK)
        table += pool.allocate(len(keys) - len(table))
        tiers.note_accesses(keys)
        cache.insert(keys, table, num_known, ROOT)
        pool.release(reversed(table))
        for _, block in index.copies:
            index.confirm(block, is_written=True)
        index.copies.clear()
        index.earn(1.0)
    request_s = (time.process_time() - started_s) / len(requests)
    index.check()
    return Row(num_here / num_blocks, num_loaded / num_blocks, index.num_stored_blocks, request_s)


Picker = Callable[[Sequence[bytes]], list[bytes]]


def pick_by_sketch(accesses: Sequence[bytes]) -> list[bytes]:
    """Every access is counted, in a sketch that has room for the picked ones."""
    sketch = AccessSketch(NUM_HOT, SALT)
    best: dict[bytes, int] = {}
    for key in accesses:
        sketch.add(key)
        best[key] = sketch.estimate(key)
        if len(best) > 2 * NUM_HOT:
            best = dict(sorted(best.items(), key=lambda found: -found[1])[:NUM_HOT])
    return sorted(best, key=lambda key: -sketch.estimate(key))[:NUM_HOT]


def pick_by_sample(one_of: int) -> Picker:
    """Returns a picker that sees one access of so many, as sampling of addresses does."""

    def pick(accesses: Sequence[bytes]) -> list[bytes]:
        draw = random.Random(1)
        counts = Counter(key for key in accesses if draw.randrange(one_of) == 0)
        return [key for key, _ in counts.most_common(NUM_HOT)]

    return pick


def pick_by_bits(num_scans: int) -> Picker:
    """Returns a picker that sees, at so many scans, which blocks were accessed since the one before."""

    def pick(accesses: Sequence[bytes]) -> list[bytes]:
        bounds = [len(accesses) * scan // num_scans for scan in range(num_scans + 1)]
        counts = Counter(key for start, end in pairwise(bounds) for key in set(accesses[start:end]))
        return [key for key, _ in counts.most_common(NUM_HOT)]

    return pick


def measure_share(accesses: Sequence[bytes], pick: Picker) -> float:
    """Returns the accesses to picked blocks as a share of those to the blocks that were accessed most, over all windows."""
    picked = best = 0
    for start in range(0, len(accesses) - WINDOW + 1, WINDOW):
        window = accesses[start : start + WINDOW]
        counts = Counter(window)
        picked += sum(counts[key] for key in set(pick(window)))
        best += sum(number for _, number in counts.most_common(NUM_HOT))
    return picked / best


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--device", type=int, nargs="+", default=[500, 1000, 1000, 1000, 1000, 3000])
    parser.add_argument("--slots", type=int, nargs="+", default=[1000, 2000, 5000, 10000, 20000, 10000])
    options = parser.parse_args()
    for path in options.traces:
        requests = read_trace(path)
        accesses = [key for keys in requests for key in keys]
        print(f"{path.name}: {len(requests)} requests, {len(accesses)} accesses, {len(set(accesses))} blocks")
        for num_device, num_slots in zip(options.device, options.slots, strict=True):
            parts = []
            for admission in TIER_ADMISSIONS.names():
                row = replay(requests, admission, num_device, num_slots)
                parts.append(f"{admission} {row.hits:.4f} ({row.num_stored} stored, {1e3 * row.request_s:.2f} ms)")
            print(f"  device {num_device}, tier {num_slots}: hits {'; '.join(parts)}", flush=True)
        pickers: dict[str, Picker] = {
            "sketch": pick_by_sketch,
            "1 access of 10": pick_by_sample(10),
            "1 access of 100": pick_by_sample(100),
            "4 scans": pick_by_bits(4),
            "20 scans": pick_by_bits(20),
        }
        shares = ", ".join(f"{name} {measure_share(accesses, pick):.3f}" for name, pick in pickers.items())
        print(f"  accesses to picked blocks / to the {NUM_HOT} most accessed ones: {shares}", flush=True)


if __name__ == "__main__":
    main()
