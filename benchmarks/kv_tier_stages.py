"""The way of KV down to a tier and back, stage by stage, beside what `cloister bench io` says the place can do.

    python -m benchmarks.kv_tier_stages [--directory DIR] [--mb N] [--repeats N]

Blocks of about 20 KiB (cloister-5m), 80 KiB (cloister-5m with `--block-size 64`) and 240 KiB (SmolLM2-135M in bfloat16). Each
figure is the best of the repeats, in GB a second: on the clock, and in brackets of this process's processor time, which other
programs change less. `open` is AES-GCM alone, in one thread and into memory that is used again, as in loads; what a load
takes besides is Python and reading. A disk's page cache is dropped before each read.

At the end the calls that an engine makes on a tier's file: prompts of 600 tokens (`cloister-5m`), drawn from more than the tier
holds, so that slots are written again in whatever order they become free.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.bench.profile import program_of
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tier_reads import FileReader, list_patterns, measure_reads
from cloister.engine.kv_tier_storage import TierSetting
from cloister.engine.kv_tier_worker import TierWorker
from cloister.kv import BlockGroup, KVFormat
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.launch import build_engine
from cloister.scheduler.kv_restores import TierEntry, TierRead
from cloister.types.config import EngineConfig
from cloister.types.events import Ended, KVLoaded, Submit
from cloister.types.request import Request, SamplingParams

TIMEOUT_S = 120.0
STORED_AT_ONCE = 32
BLOCKS_KIB = 20, 80, 240
DESCRIBED = bytes(130)  # about as much is authenticated with a block


@dataclass
class CallRecorder:
    """What a tier's file is asked for.

    Attributes:
        reader: what it is read with.
        reads: (place, bytes, start, end) of each read.
        writes: (bytes, end) of each write.
    """

    reader: FileReader
    reads: list[tuple[int, int, float, float]] = field(default_factory=list)
    writes: list[tuple[int, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, place: int, num_bytes: int) -> memoryview:
        started_s = time.perf_counter()
        found = self.reader.read(place, num_bytes)
        with self._lock:
            self.reads.append((place, num_bytes, started_s, time.perf_counter()))
        return found

    def attach(self, file: TierFile) -> None:
        """Has a file use it."""
        write = file.write

        def record(block: TierBlock, sealed: bytes | memoryview) -> bool:
            is_written = write(block, sealed)
            self.writes.append((len(sealed), time.perf_counter()))
            return is_written

        file._reader, file.write = self, record  # type: ignore[method-assign]


@dataclass(frozen=True)
class Speed:
    """Bytes a second on the clock, and of processor time."""

    clock: float
    processor: float

    def __str__(self) -> str:
        return f"{self.clock / 1e9:.2f} ({self.processor / 1e9:.2f})"


def repeat(num_repeats: int, num_bytes: int, run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Speed:
    """Returns the best speeds."""
    clock, processor = [], []
    for _ in range(num_repeats):
        prepare()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        run()
        clock.append(num_bytes / (time.perf_counter() - started_s))
        processor.append(num_bytes / (time.process_time() - started_cpu_s))
    return Speed(max(clock), max(processor))


def best(speeds: list[Speed]) -> Speed:
    """Returns the best of each."""
    return Speed(max(speed.clock for speed in speeds), max(speed.processor for speed in speeds))


def store(worker: TierWorker, index: KVTierIndex, contents: list[bytes]) -> list[TierBlock]:
    """Writes blocks as an engine does that evicts the end of a prefix first; returns them in the order of the prefix."""
    for number in reversed(range(len(contents))):
        index.offer(b"root", number.to_bytes(32, "big"), number, 0, number)
        if number % STORED_AT_ONCE and number:
            continue
        copies, index.copies = index.copies, []
        for source, stored in copies:
            assert isinstance(source, int)
            worker.write(stored, contents[source])
        while index._unwritten:
            time.sleep(0.0002)
            for block, is_written in worker.take_written(0)[0]:
                assert is_written
                index.confirm(block, is_written=True)
    os.fdatasync(worker.files[0].fd)
    found = [index.find(number.to_bytes(32, "big"), 0) for number in range(len(contents))]
    return [stored for stored in found if stored is not None]


def load(worker: TierWorker, blocks: list[TierBlock], num_bytes: int) -> None:
    """Reads all blocks as one request would."""
    entries = [TierEntry(block.entry, block.key, (block,)) for block in blocks]
    worker.read(TierRead("request", [], b"root", entries, [num_bytes], TIMEOUT_S))
    end_s, num_arrived = time.monotonic() + TIMEOUT_S, 0
    while True:
        for arrival in worker.take_read():
            num_arrived = arrival.num_bytes
            if arrival.is_complete is not None:
                assert arrival.is_complete
                assert num_arrived == num_bytes
                return
        assert time.monotonic() < end_s
        time.sleep(0.0002)


def measure(setting: TierSetting, block_bytes: int, num_mb: int, num_repeats: int) -> None:
    """Prints one row."""
    num_blocks = num_mb * 2**20 // block_bytes
    layout = TierLayout.plan(2 * num_mb * 2**20, (block_bytes,), [BlockGroup(8)])
    is_memory = setting.storage.is_memory
    file = TierFile(setting.name, setting.storage.open(setting), layout, is_memory=is_memory)
    worker = TierWorker([file], KVFormat("model", 16, "one", (block_bytes,)))
    index = KVTierIndex(setting.name, layout)
    worker.probe()
    contents = [os.urandom(block_bytes) for _ in range(num_blocks)]
    num_bytes, cipher = num_blocks * block_bytes, AESGCM(AESGCM.generate_key(256))
    index.earn(1e6)
    started_s = time.perf_counter()
    blocks = store(worker, index, contents)
    write_s = time.perf_counter() - started_s
    assert len(blocks) == num_blocks
    pattern = file.pattern

    def drop() -> None:
        if not is_memory:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    sealed = [cipher.encrypt(number.to_bytes(12, "big"), content, DESCRIBED) for number, content in enumerate(contents)]
    seal = repeat(num_repeats, num_bytes, lambda: [cipher.encrypt(bytes(12), content, b"") for content in contents])
    room = bytearray(block_bytes)

    def open_all() -> None:
        for number, content in enumerate(sealed):
            cipher.decrypt_into(number.to_bytes(12, "big"), content, DESCRIBED, room)

    opened = repeat(num_repeats, num_bytes, open_all)
    raws, loads = [], []
    one = list_patterns([pattern.engine], [pattern.block_bytes], [pattern.depth])

    def read() -> None:
        end_s = time.monotonic() + TIMEOUT_S
        for rate in measure_reads(file.fd, num_bytes, one, cell_s=TIMEOUT_S, deadline_s=end_s, is_cached=is_memory):
            assert rate is not None
            assert rate.num_reads * pattern.block_bytes <= num_bytes

    for _ in range(num_repeats):  # in turn: the speed of a shared machine changes
        raws.append(repeat(1, num_bytes, read))
        loads.append(repeat(1, num_bytes, lambda: load(worker, blocks, num_bytes), drop))
    cached = repeat(num_repeats, num_bytes, lambda: load(worker, blocks, num_bytes))
    block_us, open_us = (1e6 * block_bytes / speed.processor for speed in (best(loads), opened))
    share = max(speed.clock for speed in loads) / max(speed.clock for speed in raws)
    reads = f"{pattern.engine}, {pattern.block_bytes // 1024} KiB x {pattern.depth}"
    print(f"{setting.name}, blocks of {block_bytes // 1024} KiB; {reads}")
    print(f"  down: seal {seal}, seal and write {num_bytes / write_s / 1e9:.2f}")
    print(f"  up:   read {best(raws)}, open {opened}, load {best(loads)}, that is {100 * share:.0f}% of reading;", end=" ")
    print(f"from the page cache {cached}")
    print(f"  a block takes {block_us:.1f} µs of processor time, of it AES-GCM {open_us:.1f}")
    worker.close()


def count_depths(reads: list[tuple[int, int, float, float]]) -> tuple[float, int]:
    """Returns how many reads were under way at a time, while any was: mean and most."""
    changes = sorted([(start, 1) for _, _, start, _ in reads] + [(end, -1) for *_, end in reads])
    depth = most = 0
    busy_s = area_s = last_s = 0.0
    for at_s, change in changes:
        if depth:
            busy_s, area_s = busy_s + at_s - last_s, area_s + depth * (at_s - last_s)
        depth, last_s = depth + change, at_s
        most = max(most, depth)
    return (area_s / busy_s if busy_s else 1.0), most


def measure_calls(setting: str, num_conversations: int = 12, num_tokens: int = 600, num_rounds: int = 6) -> None:
    """Prints the calls of an engine's loads."""
    config = EngineConfig(
        model="cloister-5m", num_threads=1, prefix_cache=True, max_model_len=num_tokens + 16, max_num_seqs=2, weights_cache="",
        kv_memory_mb=4.0,
    )  # fmt: skip
    engine, draw = build_engine(config), random.Random(1)
    prompts = [[draw.randrange(10, 2000) for _ in range(num_tokens)] for _ in range(num_conversations)]
    engine.open_kv_tiers(setting)
    assert engine._tiers is not None
    engine._tiers.on_news(engine.input_queue.wake)
    file, index = engine._tiers.worker.files[0], engine._tiers.tiers.indexes[0]
    calls = CallRecorder(file._reader)
    calls.attach(file)
    loads: list[list[tuple[int, int, float, float]]] = []
    for number in range(num_rounds * num_conversations):
        prompt = prompts[draw.randrange(num_conversations)]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.input_queue.put(Submit(Request(request_id=str(number), token_ids=prompt, sampling=sampling)))
        num_before, is_loaded, has_ended, end_s = len(calls.reads), False, False, time.monotonic() + TIMEOUT_S
        while not has_ended or index._unwritten:
            assert time.monotonic() < end_s
            if (outputs := engine.step()) is None:
                engine.input_queue.wait(0.001)
                continue
            is_loaded |= any(isinstance(event, KVLoaded) for event in outputs.events)
            has_ended |= any(isinstance(event, Ended) for event in outputs.events)
        if is_loaded and number >= num_conversations and len(calls.reads) > num_before:
            loads.append(calls.reads[num_before:])
    engine._tiers.close()
    show_calls(f"{setting.split(':')[0]}, {file.pattern}", loads, calls.writes)


def show_calls(what: str, loads: list[list[tuple[int, int, float, float]]], writes: list[tuple[int, float]]) -> None:
    """Prints the calls of loads, and of what was written in all."""
    reads = [read for load in loads for read in load]
    sizes = sorted(num_bytes for _, num_bytes, *_ in reads)
    tenths = ", ".join(f"{sizes[len(sizes) * tenth // 10] / 1024:.0f}" for tenth in (1, 5, 9))
    gaps = []
    for load in loads:
        ordered = sorted(load, key=lambda read: read[2])
        gaps += [after[0] - before[0] - before[1] for before, after in pairwise(ordered)] or [0]
    depths = [count_depths(load) for load in loads]
    spans = [(min(start for _, _, start, _ in load), max(end for *_, end in load)) for load in loads]
    num_within = sum(first < at_s < last for first, last in spans for _, at_s in writes)
    read_mb, written_mb = sum(sizes) / 2**20, sum(num_bytes for num_bytes, _ in writes) / 2**20
    block_kb = statistics.median(num_bytes for num_bytes, _ in writes) / 1024
    share = 100 / len(gaps)
    print(f"{what}: {len(loads)} loads of an engine")
    print(f"  {len(reads) / len(loads):.1f} reads a load, P10, P50, P90 {tenths} KiB, largest {sizes[-1] / 1024:.0f} KiB")
    print(f"  {statistics.fmean(mean for mean, _ in depths):.2f} reads at a time, at most {max(most for _, most in depths)}")
    print(f"  offset from a read's end to the next one: none {share * sum(gap == 0 for gap in gaps):.0f}%,", end=" ")
    print(f"backwards {share * sum(gap < 0 for gap in gaps):.0f}%, median {statistics.median(map(abs, gaps)) / 1024:.0f} KiB")
    print(f"  {len(writes)} writes of {block_kb:.1f} KiB, {num_within} of them during loads", end="; ")
    print(f"{read_mb:.1f} MiB read, {written_mb:.1f} MiB written, {read_mb / written_mb:.2f}:1")


def measure_program(num_repeats: int) -> None:
    """Prints how fast an engine's own blocks are copied out and in."""
    engine = build_engine(EngineConfig(model="cloister-5m", num_threads=1, kv_memory_mb=64, weights_cache=""))
    program, numbers = program_of(engine), list(range(256))
    contents = program.export_blocks(numbers)
    num_bytes = sum(map(len, contents))
    out = repeat(num_repeats, num_bytes, lambda: program.export_blocks(numbers))
    into = repeat(num_repeats, num_bytes, lambda: program.import_blocks(numbers, contents))
    print(f"cloister-5m, blocks of {len(contents[0]) / 1024:.1f} KiB: export {out}, import {into}")


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only-calls", action="store_true", help="the calls of an engine's loads, nothing else")
    options = parser.parse_args()
    if not options.only_calls:
        measure_stages(options)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for setting in (f"disk:{directory},7M", "host:7M"):
            measure_calls(setting)


def measure_stages(options: argparse.Namespace) -> None:
    """Prints the stages."""
    measure_program(options.repeats)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for setting in (f"disk:{directory},1G", "host:1G"):
            for block_kib in BLOCKS_KIB:
                measure(TierSetting.parse(setting), block_kib * 2**10, options.mb, options.repeats)


if __name__ == "__main__":
    main()
