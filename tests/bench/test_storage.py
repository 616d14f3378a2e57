"""`cloister bench io`: a directory or memory is measured, and nothing is left of it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister.bench import storage
from cloister.bench.storage import BLOCKS, DEPTHS, count_cells, measure_storage
from cloister.cli import main
from cloister.engine import kv_tier_reads
from cloister.engine.kv_tier_reads import DISK_ENGINES, MEMORY_ENGINES, ReadPattern, ReadRate, measure_reads, recommend
from cloister.types.errors import ConfigError

SIZE = 8 * 2**20


@pytest.fixture(autouse=True)
def short_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CELL_S", 0.01)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than 4 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Returns (exit status, standard output, standard error) of one command."""
    with pytest.raises(SystemExit) as caught:
        main(["bench", "io", *arguments])
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(("where", "engines"), [("disk", {"pread", "direct", "io_uring", "mmap"}), ("host", {"pread", "mmap"})])
def test_every_call_block_and_depth_is_measured_and_one_is_recommended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str, engines: set[str]
) -> None:
    place = str(tmp_path) if where == "disk" else "host"
    status, out, err = run(capsys, place, "--size-mb", "8", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    found = {(rate["pattern"]["engine"], rate["pattern"]["block_bytes"], rate["pattern"]["depth"]) for rate in report["rates"]}
    measured = engines - set(report["left_out"])
    assert found == {(engine, block, depth) for engine in measured for block in BLOCKS for depth in DEPTHS}
    assert all(rate["bytes_s"] > 0 and 0 < rate["p50_s"] <= rate["p99_s"] for rate in report["rates"])
    assert (report["is_complete"], report["num_bytes"]) == (True, SIZE)
    assert report["recommended"]["engine"] in (DISK_ENGINES if where == "disk" else engines)
    assert len(report["cached_rates"]) == (len(BLOCKS) * len(DEPTHS) if where == "disk" else 0)
    assert not list(tmp_path.iterdir())


def test_no_reader_finds_in_the_page_cache_what_the_one_before_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    own = kv_tier_reads.READ_ENGINES["mmap"]

    def open_map(fd: int) -> kv_tier_reads.FileReader:
        found.append(share_in_page_cache(fd, SIZE))
        return own(fd)

    monkeypatch.setitem(kv_tier_reads.READ_ENGINES, "mmap", open_map)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(os.urandom(SIZE))
        os.fsync(file.fileno())
        patterns = [ReadPattern("mmap", SIZE // 4, 1)] * 3
        rates = list(measure_reads(file.fileno(), SIZE, patterns, cell_s=5.0, deadline_s=time.monotonic() + 300))
    assert [rate.num_reads for rate in rates if rate is not None] == [4] * 3
    assert max(found) < 0.1


def share_in_page_cache(fd: int, num_bytes: int) -> float:
    """Returns the share of a file's pages that are in the page cache (mincore(2))."""
    with mmap.mmap(fd, num_bytes, mmap.MAP_PRIVATE) as view:  # a private map, so that ctypes may have its address
        pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        status = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(num_bytes), pages)
        del start
    assert status == 0
    return sum(page & 1 for page in pages) / len(pages)


def test_the_table_names_calls_blocks_and_what_to_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, str(tmp_path), "--size-mb", "8")
    assert status == 0
    for text in (
        "pread, cached",
        "256 KiB",
        "GB/s, 8 at once",
        "Writes of 1 MiB:",
        "GB/s until they are on the disk",
        "Recommended: ",
    ):
        assert text in out
    status, out, _ = run(capsys, "host", "--size-mb", "8")
    assert status == 0
    assert "GB/s\n" in out.split("Writes of 1 MiB:")[1], "memory is no disk"


def test_progress_is_told_once_for_each_step(tmp_path: Path) -> None:
    steps: list[int] = []
    measure_storage(tmp_path, SIZE, timeout_s=60.0, on_progress=lambda: steps.append(1))
    assert len(steps) == count_cells(is_memory=False)


def test_what_there_is_no_time_for_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = measure_storage(tmp_path, 16 * SIZE, timeout_s=0.0)
    assert (report.rates, report.recommended, report.is_complete) == ([], None, False)
    assert report.num_bytes == SIZE, "writing is not bounded either"


def test_a_directory_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, str(tmp_path / "none"))
    assert status == 1
    assert "No such file or directory; name a directory that this user may write to" in err


def test_a_file_is_no_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    status, _, err = run(capsys, str(tmp_path / "file"))
    assert status == 1
    assert "Not a directory; name a directory" in err


def test_a_disk_without_room_says_so_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, small_files: None
) -> None:
    status, _, err = run(capsys, str(tmp_path), "--size-mb", "8")
    assert status == 1
    assert "has no room for a file of 8 MiB; give a smaller --size-mb" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["disk", "host"])
def test_a_file_that_would_take_all_that_is_free_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(storage, "_fill", lambda *arguments: pytest.fail("something was written"))
    status, _, err = run(capsys, str(tmp_path) if where == "disk" else "host", "--size-mb", "99999999")
    assert status == 1
    assert "no room for a file of 99999999 MiB" in " ".join(err.split())


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        measure_storage(tmp_path, SIZE, timeout_s=60.0, on_progress=interrupt)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_read_that_hangs_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def hang(*arguments: Any) -> int:
        may_end.wait(300)
        return 0

    monkeypatch.setattr(kv_tier_reads.os, "preadv", hang)
    monkeypatch.setattr(storage.os, "fdatasync", lambda fd: None)  # a busy disk would leave no time for a read
    with pytest.raises(ConfigError, match=r"has not answered a read within 1 s; choose another directory"):
        measure_storage(tmp_path, SIZE, timeout_s=1.0)
    may_end.set()


def test_a_machine_without_time_still_measures_each_pattern_once() -> None:
    patterns = [ReadPattern(engine, 2**16, 2) for engine in MEMORY_ENGINES]
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 2**20)
        rates = list(measure_reads(fd, 2**20, patterns, cell_s=0.0, deadline_s=time.monotonic() + 300, is_cached=True))
    finally:
        os.close(fd)
    assert [rate is not None and rate.pattern for rate in rates] == patterns


def rate(bytes_s: float, depth: int, block_bytes: int, engine: str = "pread") -> ReadRate:
    return ReadRate(ReadPattern(engine, block_bytes, depth), bytes_s, 0.0, 0.0, 1)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ([rate(100, 8, 64), rate(95, 1, 1024), rate(50, 1, 16)], (1, 1024)),
        ([rate(100, 8, 64), rate(80, 1, 1024)], (8, 64)),
        ([rate(100, 2, 1024), rate(91, 2, 64)], (2, 64)),
    ],
)
def test_the_least_depth_and_then_the_least_block_that_is_about_as_fast_is_recommended(
    rates: list[ReadRate], best: tuple[int, int]
) -> None:
    pattern = recommend(rates)
    assert (pattern.depth, pattern.block_bytes) == best
