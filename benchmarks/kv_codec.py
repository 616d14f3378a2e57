"""M12: what each level of the codec of KV tiers takes, costs and loses, and how long a prompt takes to come back.

The text is that of `benchmarks.kv_formats`. Every block of KV goes through the codec as soon as it is full, so all that a token
reads of the blocks before its chunk has the loss of its level: no less than if all of it came from a tier. Restores read the
KV of one prompt from a tier in memory whose reads are slowed down to a speed, beside computing it. The codec is timed by the
processor time of one thread, restores by the clock.

python -m benchmarks.kv_codec                      both public models and the embedded one
python -m benchmarks.kv_codec --model cloister-5m  one of them
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.harness import Bench, console, make_parser
from benchmarks.kv_formats import NAMES, cut_windows, score
from benchmarks.models import open_checkpoint
from benchmarks.perplexity import FloatArray, IntArray, log_softmax, read_text
from cloister.backends.base import GREEDY
from cloister.backends.native.kv_codec import BlockCodec
from cloister.engine import kv_tier_reads
from cloister.engine.kv_tier_codec import TierCodec
from cloister.engine.kv_tier_files import TierFile
from cloister.engine.kv_tier_storage import TierSetting
from cloister.engine.kv_tier_worker import TierWorker
from cloister.kv import BlockGroup, KVFormat
from cloister.kv.codec_levels import LEVELS, CodecLevel
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.models import LoadedModel, load
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.scheduler.kv_restores import TierEntry, TierRead
from cloister.text import Tokenizer
from tests.driving import Driver, build

BLOCK_SIZE, CHUNK, WINDOW = 16, 96, 1000
SPEEDS_MB: Final = (40, 80, 400, None)
HEADERS: Final = (
    "level", "bytes per token", "times smaller", "perplexity", "loss, %", "± %", "KL, nats", "same greedy token, %",
    "encode, MB/s", "decode, MB/s",
)  # fmt: skip
RESTORES: Final = ("MB/s of the tier", "computed, ms", *(f"{level.name}, ms" for level in LEVELS))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=NAMES, help="one model only")
    parser.add_argument("--num-windows", type=int, default=3, help="windows of 1,000 tokens")
    parser.add_argument("--restores", action="store_true", help="the second table only")
    parser.add_argument("--num-repeats", type=int, default=3, help="of restores; the quickest counts")
    parser.set_defaults(num_threads=1)
    options = parser.parse_args()
    bench = Bench(
        "kv_codec",
        f"Codec of KV tiers, {options.num_threads} thread(s)",
        "fine takes 3.5 times less than KV in bfloat16 and loses less than 1% of perplexity",
    )
    for name in NAMES if options.model is None else (options.model,):
        measure(bench, options, name)
    return bench.finish(options)


def measure(bench: Bench, options: argparse.Namespace, name: str) -> None:
    """Measures every level on one model."""
    path = open_checkpoint(name)
    text = read_passages(HELD_OUT) if name == NAMES[0] else read_text()
    model, windows = load(path), cut_windows(Tokenizer(path), text)[: options.num_windows]
    truth: list[FloatArray] = []
    rows: list[list[Any]] = []
    contents = list[bytes]()
    for level in LEVELS[:1] if options.restores else LEVELS:
        found, stored = list[FloatArray](), list[int]()
        driver = open_driver(options, model)
        codec = make_codec(driver)
        for number, window in enumerate(windows):
            found.append(run(driver, number, window, codec, level, stored))
        truth = truth or found
        contents = contents or driver.program.export_blocks(driver.blocks(0)[: WINDOW // BLOCK_SIZE])
        size, raw = float(np.mean(stored)) / BLOCK_SIZE, codec.num_bytes / BLOCK_SIZE
        rows.append([level.name, size, raw / size, *score(windows, found, truth), *time_codec(codec, contents, level)])
        console.print(f"{name}: {level.name}", style="dim", highlight=False)
    if not options.restores:
        bench.figures[name] = [dict(zip(HEADERS, row, strict=True)) for row in rows]
        bench.print_rows(name, HEADERS, rows)
        fine = rows[[level.name for level in LEVELS].index("fine")]
        bench.check(f"{name}: times smaller at fine", fine[2], low=3.5)
        bench.check(f"{name}: loss at fine, %", fine[4], high=1)
    restores = time_restores(options, model, windows[0], contents)
    bench.figures[f"{name}, restores"] = [dict(zip(RESTORES, row, strict=True)) for row in restores]
    bench.print_rows(f"{name}: {len(contents) * BLOCK_SIZE} tokens, from a tier", RESTORES, restores)


def open_driver(options: argparse.Namespace, model: LoadedModel) -> Driver:
    return build(
        model.spec, model.weights, backend="native", dtype="bfloat16", block_size=BLOCK_SIZE,
        num_blocks=options.num_windows * (WINDOW // BLOCK_SIZE + 4), num_threads=options.num_threads,
    )  # fmt: skip


def make_codec(driver: Driver) -> BlockCodec:
    return BlockCodec(driver.program.list_planes(0), len(driver.program.export_blocks([0])[0]))


def run(driver: Driver, number: int, window: IntArray, codec: BlockCodec, level: CodecLevel, stored: list[int]) -> FloatArray:
    """Returns log-probabilities [WINDOW - 1, vocab] in half precision, and notes the bytes of each block that was stored."""
    room = np.empty(2 * codec.num_bytes, np.uint8)
    block, logits, num_done = np.empty(codec.num_bytes, np.uint8), list[Any](), 0
    for start in range(0, len(window), CHUNK):
        logits.append(log_softmax(driver.step({number: window[start : start + CHUNK].tolist()})[number]).astype(np.float16))
        full = driver.blocks(number)[num_done : driver.length(number) // BLOCK_SIZE]
        num_done += len(full)
        for one, content in zip(full, driver.program.export_blocks(full), strict=True):
            if level.is_raw:
                stored.append(len(content))
                continue
            length = codec.encode(content, level.step, room)
            assert codec.decode(room[:length].data, block.data)
            assert not level.is_exact or block.tobytes() == content
            stored.append(length)
            driver.program.import_blocks([one], [block.data])
    found: FloatArray = np.concatenate(logits)[:-1]
    return found


def time_codec(codec: BlockCodec, contents: Sequence[bytes], level: CodecLevel) -> tuple[float, float]:
    """Returns MB of KV a second of processor time, coding and decoding; the quickest of all blocks counts."""
    if level.is_raw:
        return 0.0, 0.0
    room = np.empty(2 * codec.num_bytes, np.uint8)
    block = np.empty(codec.num_bytes, np.uint8)
    encode_s = decode_s = float("inf")
    for content in [*contents] * 3:
        started_s = time.thread_time()
        length = codec.encode(content, level.step, room)
        encode_s = min(encode_s, time.thread_time() - started_s)
        started_s = time.thread_time()
        codec.decode(room[:length].data, block.data)
        decode_s = min(decode_s, time.thread_time() - started_s)
    return codec.num_bytes / encode_s / 1e6, codec.num_bytes / decode_s / 1e6


def time_restores(
    options: argparse.Namespace, model: LoadedModel, window: IntArray, contents: Sequence[bytes]
) -> list[list[object]]:
    """Returns the rows of the second table."""
    driver = open_driver(options, model)
    codec, size = make_codec(driver), len(contents[0])
    tokens = window[: len(contents) * BLOCK_SIZE].tolist()
    computed = []
    for number in range(options.num_repeats):
        started_s = time.perf_counter()
        for start in range(0, len(tokens), 512):
            driver.program.step(driver.plan({number: tokens[start : start + 512]}, [0]), GREEDY)
        computed.append(time.perf_counter() - started_s)
        driver.free(number)
    workers = [open_worker(level, codec, size, contents) for level in LEVELS]
    rows: list[list[object]] = []
    for speed_mb in SPEEDS_MB:
        taken_s: list[list[float]] = [[] for _ in LEVELS]
        for _ in range(options.num_repeats):  # in turn: the speed of a shared machine changes
            for worker, times in zip(workers, taken_s, strict=True):
                times.append(at_speed(speed_mb, partial(restore, worker, contents)))
        name = "as it is" if speed_mb is None else str(speed_mb)
        rows.append([name, 1e3 * min(computed), *(1e3 * min(times) for times in taken_s)])
    for worker in workers:
        worker.close()
    return rows


def open_worker(level: CodecLevel, block_codec: BlockCodec, size: int, contents: Sequence[bytes]) -> TierWorker:
    """Returns a worker whose tier has these blocks at one level."""
    codec = None if level.is_raw else TierCodec([block_codec.planes], [size], level.name)
    if codec is not None:
        for content in contents[:8]:
            codec.add_sample(0, content)
    stored = [size] if codec is None else codec.choose(0.0).stored_bytes
    setting = TierSetting.parse("host:1G")
    layout = TierLayout.plan(2 * size * len(contents), stored, [BlockGroup(8)], 1, content_bytes=[size])
    file = TierFile(setting.name, setting.storage.open(setting), layout)  # read by calls, which can be slowed down
    worker = TierWorker([file], KVFormat("model", BLOCK_SIZE, "one", (size,)), codec=codec)
    for number, content in enumerate(contents):
        worker.write(TierBlock(b"", b"", bytes([number]), number, 0, number, number), content)
    num_written, end_s = 0, time.monotonic() + 60
    while num_written < len(contents):
        written, _ = worker.take_written(0)
        assert all(is_written for _, is_written in written)
        assert time.monotonic() < end_s
        num_written += len(written)
        time.sleep(0.001)
    return worker


def restore(worker: TierWorker, contents: Sequence[bytes]) -> float:
    """Reads all blocks back; returns the time that this took."""
    sizes, started_s = worker.files[0].layout.block_bytes, time.perf_counter()
    blocks = [TierBlock(b"", b"", bytes([number]), number, 0, number, number) for number in range(len(contents))]
    entries = [TierEntry(block.entry, block.key, (block,)) for block in blocks]
    worker.read(TierRead("restore", [], b"", entries, [sizes[0] * len(blocks)], 60.0))
    num_arrived = 0
    while True:
        for arrival in worker.take_read():
            num_arrived += len(arrival.objects)
            if arrival.is_complete is not None:
                assert arrival.is_complete
                assert num_arrived == len(contents)
                return time.perf_counter() - started_s
        time.sleep(0.0002)


def at_speed(speed_mb: float | None, call: Callable[[], float]) -> float:
    """Calls with reads that bring so many MB a second."""
    if speed_mb is None:
        return call()
    preadv, free_at_s = os.preadv, [0.0]  # reads wait for each other

    def read_slowly(fd: int, buffers: Any, place: int) -> int:
        num_bytes = preadv(fd, buffers, place)
        free_at_s[0] = max(free_at_s[0], time.perf_counter()) + num_bytes / (speed_mb * 1e6)
        time.sleep(max(0.0, free_at_s[0] - time.perf_counter()))
        return num_bytes

    kv_tier_reads.os.preadv = read_slowly  # type: ignore[attr-defined]
    try:
        return call()
    finally:
        kv_tier_reads.os.preadv = preadv  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
