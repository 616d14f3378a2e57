"""KV in DRAM and in CXL memory, simulated: how many of a decode's reads fall into DRAM, by who decides which pages move there.

    python -m benchmarks.cxl_promotion TRACE.jsonl.gz ... [--workloads dense shuffled sparse] [--shares 0.1 0.25 0.5]

TRACE is a Mooncake trace. Its requests are served in their order, `SLOTS` at a time, and each decode step reads all KV of the
running ones from host memory, so what several of them share is read several times. No machine with CXL memory was at hand:
everything but the requests is the model below. Prompts are not computed, and answers have no KV.

**Memory.** DRAM answers after 100 ns, CXL memory after 2 to 3 times as long (M5, ASPLOS 2025; Melody, ASPLOS 2025, has 140 to
410 ns). Both take longer under load (`Tier.latency_ns`, whose shape is assumed). Bandwidth is 80% of eight channels of
DDR5-4800 (38.4 GB/s each) and of four devices on eight lanes of PCIe 5.0 (32 GB/s each). Each core that reads has 16 lines of
64 bytes under way, so reads take lines x mean latency / (16 x cores) (Little's law): 8 cores wait for latency, 32 for
bandwidth.

**Pages** are huge ones of 2 MiB; a *word* is the KV of one token, 32 KiB. So a page has 64 words, as M5's pages of 4 KiB have
words of 64 bytes. New KV lies in CXL memory, as in M5's runs. A promoted page takes the place of one that was not read for
`IDLE_S`, the least recently used first (Linux demotes about so); if there is none, it stays. A page that moves costs traffic
on both sides, and a core, which copies at 10 GB/s and needs 20 us for the mappings (assumed). Nobody moves more than
`--move-mb` in a second.

**Who decides.**

- `none`: nothing moves.
- `damon`: regions of Linux's mm/damon (10 to 1,000; a page of each is looked at every 5 ms, which takes 1 us of a core,
  assumed; merged, split and aged every 0.1 s). Once a second the hottest move. Regions are split in two, never in three.
- `damon tuned`: looks every 50 ms, and of a region only pages move that were read lately, as in the kernel's sample for
  tiers.
- `m5`: a Count-Min-Sketch in the CXL controller counts all reads of CXL pages; every 0.25 s the pages of the highest
  estimates move. The paper's own sizes and intervals were not at hand: see `--counters`.
- `m5 dense`: of these, first those in which a second sketch found most hot words.
- `tables`: an engine knows what its requests read, and moves what most of them do.
- `oracle`: the best pages are in DRAM at once, at no cost.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

PAGE_BYTES: Final = 2 << 20
WORDS: Final = 64
LINES_PER_WORD: Final = PAGE_BYTES // WORDS // 64
TOKENS_PER_BLOCK: Final = 512
PAGES_PER_BLOCK: Final = TOKENS_PER_BLOCK // WORDS
SLOTS: Final = 16
"""Requests that run at once."""
COMPUTE_S: Final = 0.01
"""A step takes that without its reads."""
IDLE_S: Final = 0.5
NUM_COUNTERS: Final = 32768
LINES_UNDER_WAY: Final = 16
COPY_BYTES_PER_S: Final = 10e9
MAPPING_S: Final = 20e-6
LOOK_S: Final = 1e-6
SAMPLES: Final = 20
"""Looks at a region before regions are merged and split."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Tier:
    """Memory of one kind: what a read takes without load, and the bytes that it can read in a second."""

    idle_ns: float
    bytes_per_s: float

    def latency_ns(self, load: float) -> float:
        """Returns what a read takes under a load from 0 to 1: hardly more up to 0.7, twice as much at 0.8."""
        load = min(load, 0.97)
        return self.idle_ns * (1 + load**4 / (1 - load) / 2)


@dataclass(frozen=True)
class Machine:
    """Cores that read, and the two kinds of memory."""

    num_cores: int
    tiers: tuple[Tier, Tier]

    @classmethod
    def make(cls, num_cores: int, ratio: float) -> Machine:
        """Returns the machine of this module's head, with CXL memory that answers after `ratio` times as long as DRAM."""
        return cls(num_cores, (Tier(100.0, 0.8 * 8 * 38.4e9), Tier(100.0 * ratio, 0.8 * 4 * 32e9)))


def time_reads(machine: Machine, read: Sequence[float], moved: Sequence[float]) -> tuple[float, float]:
    """Returns the seconds in which each tier yields so many bytes beside so many that are moved, and the mean latency in ns."""
    tiers, lines_under_way = machine.tiers, machine.num_cores * LINES_UNDER_WAY
    num_lines = [number / 64 for number in read]

    def find_latency_ns(seconds: float) -> float:
        loads = [(a + b) / tier.bytes_per_s / seconds for tier, a, b in zip(tiers, read, moved, strict=True)]
        latencies = [tier.latency_ns(load) for tier, load in zip(tiers, loads, strict=True)]
        return sum(number * latency for number, latency in zip(num_lines, latencies, strict=True)) / sum(num_lines)

    low = max((a + b) / tier.bytes_per_s for tier, a, b in zip(tiers, read, moved, strict=True)) / 0.97
    if low > (most := sum(num_lines) * find_latency_ns(low) / (lines_under_way * 1e9)):
        return low, find_latency_ns(low)
    high = most
    for _ in range(20):  # the longer it takes, the lower the load, and the lower the latency
        middle = (low + high) / 2
        needed = sum(num_lines) * find_latency_ns(middle) / (lines_under_way * 1e9)
        low, high = (middle, high) if needed > middle else (low, middle)
    return high, find_latency_ns(high)


@dataclass
class Reads:
    """What one step reads: pages, how many requests read each, and the words that each of them reads there."""

    pages: Ints
    readers: Ints
    words: Ints

    @property
    def counts(self) -> Ints:
        return self.readers * self.words


class Workload:
    """Requests of a trace as pages.

    Args:
        kind: `dense`: a step reads every word; blocks lie in the order of their first use, which is best for regions.
            `shuffled`: blocks lie anywhere, as in a pool whose blocks were used and freed for a while. `sparse`: as `dense`,
            but attention reads in each page a part of the words, the same ones at every step: at most a quarter in 4 of 5
            pages (M5 found that in 86% of Redis' pages).
    """

    def __init__(self, rows: Sequence[tuple[Sequence[int], int]], kind: str, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        places = np.arange(len({number for hash_ids, _ in rows for number in hash_ids}))
        if kind == "shuffled":
            draw.shuffle(places)
        blocks: dict[int, int] = {}
        self.requests: list[tuple[Ints, int]] = []
        within = np.arange(PAGES_PER_BLOCK)
        for hash_ids, num_steps in rows:
            numbers = places[[blocks.setdefault(number, len(blocks)) for number in hash_ids]]
            self.requests.append(((numbers[:, None] * PAGES_PER_BLOCK + within).ravel(), num_steps))
        self.num_pages = len(blocks) * PAGES_PER_BLOCK
        self.words = np.full(self.num_pages, WORDS, np.int64)
        if kind == "sparse":
            few = draw.random(self.num_pages) < 0.8
            self.words = np.where(
                few, draw.integers(1, WORDS // 4 + 1, self.num_pages), draw.integers(WORDS // 4, WORDS + 1, self.num_pages)
            )
        self.first_words = draw.integers(0, WORDS, self.num_pages)

    def list_words(self, pages: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Returns the number of each word that is read in pages, and how often it is."""
        words = self.words[pages]
        ends = np.cumsum(words)
        within = np.arange(ends[-1]) - np.repeat(ends - words, words)
        numbers = np.repeat(pages * WORDS, words) + (np.repeat(self.first_words[pages], words) + within) % WORDS
        return numbers, np.repeat(counts // words, words)


def read_trace(path: Path, num_requests: int, first: int = 0) -> list[tuple[list[int], int]]:
    """Returns the blocks and the length of the answer of each request."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines][first : first + num_requests]
    return [(row["hash_ids"], max(1, row["output_length"])) for row in rows]


class Sketch:
    """A Count-Min-Sketch as hardware has one: every row counts every access, with counters that do not fill up, and is cleared
    when it was asked. (`kv.access_sketch` counts to 15, and fades.) The estimate of a key is never too low.

    Args:
        num_counters: of all rows together, a power of two times `num_rows`.
    """

    def __init__(self, num_counters: int, num_rows: int = 4) -> None:
        self._bits = (num_counters // num_rows).bit_length() - 1
        draw = np.random.default_rng(1)
        self._factors = draw.integers(1 << 62, 1 << 63, num_rows).astype(np.uint64) | np.uint64(1)
        self._rows = np.zeros((num_rows, 1 << self._bits), np.int64)

    def add(self, keys: Ints, counts: Ints) -> None:
        """Counts accesses, as if they came one by one."""
        for row, places in zip(self._rows, self._places(keys), strict=True):
            row += np.bincount(places, counts, len(row)).astype(np.int64)

    def estimate(self, keys: Ints) -> Ints:
        """Returns how often keys were accessed, at most."""
        found: Ints = np.min([row[places] for row, places in zip(self._rows, self._places(keys), strict=True)], axis=0)
        return found

    def clear(self) -> None:
        self._rows[:] = 0

    def _places(self, keys: Ints) -> list[Ints]:
        shift = np.uint64(64 - self._bits)
        return [((keys.astype(np.uint64) * factor) >> shift).astype(np.int64) for factor in self._factors]


def find_top(keys: Ints, values: npt.NDArray[np.int64], number: int) -> Ints:
    """Returns the keys of the highest values, the highest first."""
    return keys[np.argsort(-values, kind="stable")[:number]]


class Promoter(Protocol):
    """Decides which pages move to DRAM."""

    interval_s: float

    def observe(self, reads: Reads, is_near: Bools, num_steps: int, step_s: float) -> float:
        """Takes what each of some steps reads, and which of it is in DRAM; returns what that takes of a core, in seconds."""
        ...

    def pick(self, in_dram: Bools, number: int) -> Ints:
        """Returns pages of CXL memory, the best first, at most so many."""
        ...


class Nobody:
    """Nothing moves."""

    interval_s = 1e9

    def observe(self, reads: Reads, is_near: Bools, num_steps: int, step_s: float) -> float:
        return 0.0

    def pick(self, in_dram: Bools, number: int) -> Ints:
        return np.empty(0, np.int64)


class M5:
    """Trackers in the CXL controller.

    Args:
        num_counters: of a sketch.
        num_top: pages that the tracker keeps, and half as many words for each of them.
        is_dense_first: whether the pages with most hot words move first; else the pages with the highest estimates.
    """

    interval_s = 0.25

    def __init__(self, work: Workload, num_counters: int, num_top: int = 1024, *, is_dense_first: bool = False) -> None:
        self._work = work
        self._pages = Sketch(num_counters)
        self._words = Sketch(num_counters) if is_dense_first else None
        self._num_top = num_top
        self._seen: Ints = np.zeros(work.num_pages, np.int64)

    def observe(self, reads: Reads, is_near: Bools, num_steps: int, step_s: float) -> float:
        far = ~is_near
        self._seen[reads.pages[far]] += num_steps * reads.counts[far]
        return 0.0

    def pick(self, in_dram: Bools, number: int) -> Ints:
        seen = np.flatnonzero(self._seen)
        counts, self._seen[seen] = self._seen[seen], 0
        if not len(seen):
            return seen
        self._pages.add(seen, counts)  # a sketch's sum does not depend on the order
        estimates = self._pages.estimate(seen)
        self._pages.clear()
        top = find_top(seen, estimates, self._num_top)
        if self._words is not None:
            words, word_counts = self._work.list_words(seen, counts)
            self._words.add(words, word_counts)
            hottest = find_top(words, self._words.estimate(words), self._num_top * WORDS // 2)
            self._words.clear()
            num_hot = np.bincount(hottest // WORDS, minlength=len(in_dram))[top]
            top = find_top(top, num_hot, self._num_top)
        return top[:number]


class Damon:
    """Regions of pages that are assumed to be read alike (Linux, mm/damon).

    Args:
        sample_s: how often a page of each region is looked at; regions change after `SAMPLES` of these.
        is_young_only: whether only pages move that were read since the last time.
    """

    interval_s = 1.0

    def __init__(
        self, num_pages: int, *, sample_s: float = 0.005, is_young_only: bool = False, num_regions: tuple[int, int] = (10, 1000)
    ) -> None:
        self._least, self._most = num_regions
        self._sample_s = sample_s
        self._young_only = is_young_only
        self._starts = np.unique(np.linspace(0, num_pages, self._least + 1).astype(np.int64)[:-1])
        self._num_pages = num_pages
        self._draw = np.random.default_rng(0)
        self._hits = np.zeros(len(self._starts), np.int64)
        self._ages = np.zeros(len(self._starts), np.int64)
        self._last_hits = self._hits.copy()
        self.num_hits, self._num_samples, self._time_s = self._hits, 0, 0.0
        self._young: Bools = np.zeros(num_pages, np.bool_)
        self._readers = np.zeros(num_pages)

    @property
    def num_regions(self) -> int:
        return len(self._starts)

    def observe(self, reads: Reads, is_near: Bools, num_steps: int, step_s: float) -> float:
        self._young[reads.pages] = True
        self._readers[reads.pages] = reads.readers
        missed = max(0.0, 1 - self._sample_s / step_s)  # chance that one reader does not come by between two looks
        self._time_s += num_steps * step_s
        num_samples, num_looks = int(self._time_s / self._sample_s), 0
        self._time_s -= num_samples * self._sample_s
        while num_samples:
            now = min(num_samples, SAMPLES - self._num_samples)
            draws = self._draw.random((2, now, len(self._starts)))
            looked = self._starts + (draws[0] * self.sizes()).astype(np.int64)
            self._hits += (draws[1] >= missed ** self._readers[looked]).sum(0)
            num_looks += draws[1].size
            num_samples -= now
            self._num_samples += now
            if self._num_samples == SAMPLES:
                self._aggregate()
        self._readers[reads.pages] = 0
        return num_looks * LOOK_S

    def sizes(self) -> Ints:
        return np.diff(self._starts, append=self._num_pages)

    def _aggregate(self) -> None:
        """Merges neighbours that were read about as often, ages regions, and splits them at random."""
        threshold = max(1, int(self._hits.max()) // 10)
        self._ages = np.where(np.abs(self._hits - self._last_hits) > threshold, 0, self._ages + 1)
        most_pages = max(1, self._num_pages // self._least)
        merged: list[list[int]] = []
        columns = (self._starts, self.sizes(), self._hits, self._ages)
        for start, size, hits, age in zip(*(column.tolist() for column in columns), strict=True):
            if merged and abs(merged[-1][2] - hits) <= threshold and merged[-1][1] + size <= most_pages:
                last, total = merged[-1], merged[-1][1] + size
                last[2] = (last[2] * last[1] + hits * size) // total
                last[3] = (last[3] * last[1] + age * size) // total
                last[1] = total
            else:
                merged.append([start, size, hits, age])
        starts, sizes, hits_, ages = np.array(merged, np.int64).T
        self.num_hits = hits_
        self._starts, self._ages, self._num_samples = starts, ages, 0
        if len(starts) <= self._most // 2:
            cuts = starts + np.maximum(1, (sizes * self._draw.integers(1, 10, len(sizes))) // 10)
            cuts, of = cuts[sizes > 1], np.flatnonzero(sizes > 1)
            self._starts = np.sort(np.concatenate((starts, cuts)))
            source = np.concatenate((np.arange(len(starts)), of))[np.argsort(np.concatenate((starts, cuts)), kind="stable")]
            self._ages, self.num_hits = ages[source], hits_[source]
        self._last_hits = self.num_hits
        self._hits = np.zeros(len(self._starts), np.int64)

    def pick(self, in_dram: Bools, number: int) -> Ints:
        heat = self.num_hits / SAMPLES + np.minimum(self._ages, 100) / 100
        bounds = np.append(self._starts, self._num_pages)
        picked: list[Ints] = []
        for region in np.argsort(-heat, kind="stable"):
            if number <= 0 or not self.num_hits[region]:
                continue
            pages = np.arange(bounds[region], bounds[region + 1])
            pages = pages[~in_dram[pages] & (self._young[pages] | (not self._young_only))][:number]
            number -= len(pages)
            picked.append(pages)
        self._young[:] = False
        return np.concatenate(picked) if picked else np.empty(0, np.int64)


class Tables:
    """An engine that knows what its running requests read."""

    interval_s = 0.25

    def observe(self, reads: Reads, is_near: Bools, num_steps: int, step_s: float) -> float:
        self._reads = reads
        return 0.0

    def pick(self, in_dram: Bools, number: int) -> Ints:
        far = ~in_dram[self._reads.pages]
        return find_top(self._reads.pages[far], self._reads.counts[far], number)


POLICIES: Final = ("none", "damon", "damon tuned", "m5", "m5 dense", "tables", "oracle")


def make_promoter(name: str, work: Workload, num_counters: int = NUM_COUNTERS) -> Promoter:
    """Returns one of `POLICIES`."""
    if name.startswith("damon"):
        return Damon(work.num_pages) if name == "damon" else Damon(work.num_pages, sample_s=0.05, is_young_only=True)
    if name.startswith("m5"):
        return M5(work, num_counters, is_dense_first=name == "m5 dense")
    return Tables() if name == "tables" else Nobody()


@dataclass
class Outcome:
    """Sums over all steps, in seconds, words and pages.

    Attributes:
        picked, best: reads, between two decisions, of the pages that were then picked, and of as many pages of CXL memory as
            were read most.
    """

    total_s: float = 0.0
    read_s: float = 0.0
    latency_ns: float = 0.0
    num_read: int = 0
    num_near: int = 0
    num_moved: int = 0
    picked: int = 0
    best: int = 0
    busy_s: float = 0.0

    @property
    def share(self) -> float:
        """Reads that fell into DRAM."""
        return self.num_near / self.num_read

    @property
    def mean_ns(self) -> float:
        return self.latency_ns / self.num_read


def simulate(
    work: Workload, promoter: Promoter, machine: Machine, num_near: int, move_mb: float = 1000.0, *, is_oracle: bool = False
) -> Outcome:
    """Serves requests with `num_near` pages of DRAM, until there are too few to fill all slots.

    Args:
        move_mb: what may move in a second, in MB.
        is_oracle: whether the best pages are in DRAM at any time, whatever `promoter` says.
    """
    outcome = Outcome()
    in_dram: Bools = np.zeros(work.num_pages, np.bool_)
    last_read = np.full(work.num_pages, -1e9)
    window: Ints = np.zeros(work.num_pages, np.int64)
    waiting = list(reversed(work.requests))
    running: list[tuple[Ints, int]] = []  # pages, and the step after which it ends
    step, decided_s, due_s, moved, busy_s = 0, 0.0, promoter.interval_s, 0, 0.0
    reads = Reads(*(np.empty(0, np.int64),) * 3)
    while waiting or running:
        if len(running) < SLOTS and waiting:
            while len(running) < SLOTS and waiting:
                pages, num_steps = waiting.pop()
                running.append((pages, step + num_steps))
            pages, readers = np.unique(np.concatenate([pages for pages, _ in running]), return_counts=True)
            reads = Reads(pages, readers.astype(np.int64), work.words[pages])
        elif not waiting:
            break  # what is left over would run on a machine that empties
        counts = reads.counts
        is_near = in_dram[reads.pages]
        if is_oracle:
            is_near = np.zeros(len(counts), np.bool_)
            is_near[np.argsort(-counts, kind="stable")[:num_near]] = True
        near, far = int(counts[is_near].sum()), int(counts[~is_near].sum())
        read = (near * LINES_PER_WORD * 64.0, far * LINES_PER_WORD * 64.0)
        step_s = COMPUTE_S + time_reads(machine, read, (0, 0))[0]
        num_steps = max(1, min(min(end for _, end in running) - step, int((due_s - outcome.total_s) / step_s)))
        traffic = 2.0 * moved * PAGE_BYTES / num_steps  # a page comes and one goes
        read_s, mean_ns = time_reads(machine, read, (traffic, traffic))
        read_s += busy_s / machine.num_cores / num_steps  # what others did on the cores
        moved, busy_s = 0, promoter.observe(reads, is_near, num_steps, COMPUTE_S + read_s)
        outcome.total_s += num_steps * (COMPUTE_S + read_s)
        outcome.read_s += num_steps * read_s
        outcome.latency_ns += num_steps * mean_ns * (near + far)
        outcome.num_read += num_steps * (near + far)
        outcome.num_near += num_steps * near
        last_read[reads.pages] = outcome.total_s
        window[reads.pages] += num_steps * counts
        step += num_steps
        running = [request for request in running if request[1] > step]
        if outcome.total_s >= due_s - step_s / 2:
            most = int(move_mb * 1e6 * (outcome.total_s - decided_s) / PAGE_BYTES)
            picked = promoter.pick(in_dram, most)
            far_window = np.where(in_dram, 0, window)
            if len(picked):
                outcome.picked += int(window[picked].sum())
                outcome.best += int(np.partition(far_window, -len(picked))[-len(picked) :].sum())
            window[:] = 0
            moved = promote(picked, in_dram, last_read, outcome.total_s, num_near)
            outcome.num_moved += moved
            busy_s += moved * 2 * (PAGE_BYTES / COPY_BYTES_PER_S + MAPPING_S)
            outcome.busy_s += busy_s
            decided_s = outcome.total_s
            due_s = decided_s + promoter.interval_s
    return outcome


def promote(picked: Ints, in_dram: Bools, last_read: npt.NDArray[np.float64], now: float, num_near: int) -> int:
    """Moves pages to DRAM while it has room, or pages that were not read lately; returns how many."""
    room = num_near - int(in_dram.sum())
    if len(picked) > room:
        near = np.flatnonzero(in_dram)
        idle = near[last_read[near] < now - IDLE_S]
        idle = idle[np.argsort(last_read[idle], kind="stable")[: len(picked) - room]]
        in_dram[idle] = False
        picked = picked[: room + len(idle)]
    in_dram[picked] = True
    return len(picked)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=300, help="of each trace")
    kinds = ["dense", "shuffled", "sparse"]
    parser.add_argument("--workloads", nargs="+", default=kinds, choices=kinds)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="of all pages, for which DRAM has room"
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.5], help="CXL memory's latency, DRAM's being 1")
    parser.add_argument("--cores", type=int, nargs="+", default=[8], help="that read")
    parser.add_argument("--move-mb", type=float, nargs="+", default=[1000.0], help="MB that may move in a second")
    parser.add_argument("--counters", type=int, nargs="+", default=[NUM_COUNTERS], help="of M5's sketches")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    options = parser.parse_args()
    for path, kind in product(options.traces, options.workloads):
        work = Workload(read_trace(path, options.requests), kind)
        for settings in product(options.shares, options.ratios, options.cores, options.move_mb, options.counters):
            share, ratio, num_cores, move_mb, num_counters = settings
            print(
                f"{path.name}, {kind}: {work.num_pages} pages, {share:.0%} in DRAM, CXL {ratio} times, {num_cores} cores, "
                f"{move_mb:.0f} MB/s, {num_counters} counters"
            )
            outcomes: dict[str, Outcome] = {}
            for name in options.policies:
                machine, num_near = Machine.make(num_cores, ratio), int(share * work.num_pages)
                promoter = make_promoter(name, work, num_counters)
                found = outcomes[name] = simulate(work, promoter, machine, num_near, move_mb, is_oracle=name == "oracle")
                bases = [base for base in ("none", "damon") if base in outcomes]
                speed = ", ".join(f"{outcomes[base].total_s / found.total_s:.2f} x {base}" for base in bases)
                hit = found.picked / max(1, found.best)
                what = f"{found.share:.3f} of the reads in DRAM, {found.mean_ns:.0f} ns, speed {speed}"
                cost = f"picked {hit:.2f} of the best reads, {found.num_moved} moved, cores {found.busy_s:.0f} s"
                print(f"  {name:12} {what}; {cost}", flush=True)


if __name__ == "__main__":
    main()
