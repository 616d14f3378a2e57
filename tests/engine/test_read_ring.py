"""Reads by io_uring are those of the file, and where it is forbidden the other calls are used."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest

from cloister.engine import kv_tier_reads, read_ring
from cloister.engine.kv_tier_reads import DISK_ENGINES, PAGE_BYTES, READ_ENGINES, FileReader, list_patterns, measure_reads
from cloister.engine.read_ring import ReadRing

CONTENT = random.Random(0).randbytes(64 * PAGE_BYTES + 100)


@pytest.fixture
def fd(tmp_path: Path) -> int:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return os.open(path, os.O_RDONLY)


@pytest.fixture
def reader(fd: int) -> FileReader:
    try:
        return READ_ENGINES["io_uring"](fd)
    except OSError as error:
        pytest.skip(f"io_uring cannot be used here: {error}")


@pytest.mark.parametrize("start", [0, 3, 63, 64])
@pytest.mark.parametrize("size", [1, PAGE_BYTES, 5 * PAGE_BYTES + 17, 40 * PAGE_BYTES])
def test_it_reads_what_is_there_and_no_further_than_the_end(reader: FileReader, start: int, size: int) -> None:
    place = start * PAGE_BYTES
    assert bytes(reader.read(place, size)) == CONTENT[place : place + size]


def test_many_reads_in_several_threads_are_all_right(reader: FileReader) -> None:
    wrong: list[int] = []

    def read_some(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            place, size = draw.randrange(64) * PAGE_BYTES, draw.randint(1, 30 * PAGE_BYTES)
            if bytes(reader.read(place, size)) != CONTENT[place : place + size]:
                wrong.append(place)

    threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_part_that_cannot_be_read_is_an_error_and_the_ring_goes_on(reader: FileReader, fd: int) -> None:
    ring, buffer = ReadRing(2), memoryview(bytearray(2 * PAGE_BYTES))
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        ring.read(10**6, buffer, 0, PAGE_BYTES)
    assert ring.read(fd, buffer, PAGE_BYTES, PAGE_BYTES) == len(buffer)
    assert bytes(buffer) == CONTENT[PAGE_BYTES : 3 * PAGE_BYTES]


def test_a_signal_during_a_read_changes_nothing(reader: FileReader, monkeypatch: pytest.MonkeyPatch) -> None:
    call, num_calls = read_ring._call, 0

    def interrupt(number: int, *arguments: object) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return call(number, *arguments)

    reader.read(0, 1)  # this thread has its ring
    monkeypatch.setattr(read_ring, "_call", interrupt)
    assert bytes(reader.read(0, 9 * PAGE_BYTES)) == CONTENT[: 9 * PAGE_BYTES]
    assert num_calls > 1


def test_a_kernel_without_memory_is_asked_again_and_no_read_is_given_up(
    reader: FileReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, refused = read_ring._call, [errno.EAGAIN, errno.EBUSY, errno.ENOMEM]

    def refuse(number: int, *arguments: object) -> int:
        if refused:
            raise OSError(refused.pop(), "not now")
        return call(number, *arguments)

    reader.read(0, 1)
    monkeypatch.setattr(read_ring, "_call", refuse)
    assert bytes(reader.read(0, 9 * PAGE_BYTES)) == CONTENT[: 9 * PAGE_BYTES]
    assert bytes(reader.read(PAGE_BYTES, PAGE_BYTES)) == CONTENT[PAGE_BYTES : 2 * PAGE_BYTES]
    assert not refused


def test_a_ring_that_failed_is_not_used_again(reader: FileReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read(0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(read_ring, "_call", lambda number, *arguments: _raise(OSError(errno.EFAULT, "broken")))
        with pytest.raises(OSError, match="broken"):
            reader.read(0, 5 * PAGE_BYTES)
    assert bytes(reader.read(PAGE_BYTES, PAGE_BYTES)) == CONTENT[PAGE_BYTES : 2 * PAGE_BYTES]


def _raise(error: OSError) -> int:
    raise error


def test_where_it_is_forbidden_it_is_left_out(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, *arguments: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(read_ring, "_call", refuse)
    patterns = list_patterns(DISK_ENGINES, [PAGE_BYTES], [1])
    rates = list(measure_reads(fd, 4 * PAGE_BYTES, patterns, cell_s=0.01, deadline_s=time.monotonic() + 300))
    by_engine = {pattern.engine: rate for pattern, rate in zip(patterns, rates, strict=True)}
    assert by_engine["io_uring"] is None
    assert by_engine["pread"] is not None
    assert "io_uring" in kv_tier_reads.DISK_ENGINES
