"""The parts of the search: needles at every alignment and across blocks, lists wherever they lie, gaps that are named."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cloister.client.residue_audit.load import LoadResult
from cloister.client.residue_audit.trial import Looked, TraceVerdict
from cloister.models import locate
from cloister.text import Tokenizer
from cloister.trust.residue.finder import Finder
from cloister.trust.residue.needles import NUM_WORDS, SHORTEST, Mark, MarkMaker, of_bytes, of_text, of_token_ids
from cloister.trust.residue.processes import Process, ProcessTree
from cloister.trust.residue.scan import BLOCK_BYTES, Find, Searched, search_process

TEXT = "nobody else would ever write this ü"


@pytest.fixture(scope="module")
def mark() -> Mark:
    return MarkMaker(Tokenizer(locate("cloister-5m")), seed=5).make(7)


@pytest.mark.parametrize("offset", range(9))
def test_a_needle_is_found_at_every_alignment(offset: int) -> None:
    needle = of_bytes("bytes", 3, bytes(range(100, 100 + SHORTEST)))
    block = np.zeros(200, np.uint8)
    block[offset : offset + SHORTEST] = range(100, 100 + SHORTEST)
    assert [match.at for match in Finder([needle]).find(block)] == [offset]
    block[offset + SHORTEST - 1] = 0
    assert not list(Finder([needle]).find(block))


@pytest.mark.parametrize("before", [b"", b"a", b"ab", b"abc"])
def test_text_is_found_in_base64_whatever_stands_before_it(before: bytes) -> None:
    block = np.frombuffer(b"x" * 40 + base64.b64encode(before + TEXT.encode() + b"and more") + b"y" * 40, np.uint8)
    kinds = {match.needle.kind for match in Finder(list(of_text(TEXT, 0))).find(block)}
    assert kinds == {f"base64+{len(before) % 3}"}


def test_a_few_bytes_make_no_needle() -> None:
    with pytest.raises(ValueError, match="chance"):
        of_bytes("bytes", 0, b"too short")


def test_a_mark_is_what_the_tokenizer_reads(mark: Mark) -> None:
    tokenizer = Tokenizer(locate("cloister-5m"))
    ids = tokenizer.encode(f"Explain{mark.text}.")
    runs = [token_id for run in mark.runs for token_id in run]
    assert len(runs) == NUM_WORDS
    for run in mark.runs:
        assert any(tuple(ids[at : at + len(run)]) == run for at in range(len(ids)))


def test_numbers_in_every_form_are_found(mark: Mark) -> None:
    ids = mark.runs[0]
    finder = Finder(list(of_token_ids(ids, 7)))
    forms = {
        "int32": np.array(ids, np.int32).tobytes(),
        "int64": np.array(ids, np.int64).tobytes(),
        "decimals": str(list(ids)).encode(),
    }
    for kind, data in forms.items():
        block = np.frombuffer(bytes(48) + data + bytes(48), np.uint8)
        assert {match.needle.kind for match in finder.find(block)} == {kind}


HOLD_ACROSS = """
import mmap, os, sys, time
block, size = int(sys.argv[1]), int(sys.argv[2])
area = mmap.mmap(-1, 2 * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area[:] = b"\\xaa" * len(area)
os.readv(0, [memoryview(area)[block - 30 : block - 30 + size]])
os.write(1, b"held")
time.sleep(600)
"""

HOLD_LIST = """
import os, sys, time
kept, others = [], []
for number in sys.stdin.readline().split():
    others.append([int(f"{number}{digit}") for digit in range(5)])  # so that they do not lie side by side
    kept.append(int(number))
os.write(1, b"held")
time.sleep(600)
"""


@contextmanager
def holding(code: str, given: bytes, *arguments: str) -> Iterator[Process]:
    """A small process that holds what it is given."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(given)
        child.stdin.flush()
        assert child.stdout.read(4) == b"held"
        yield Process(child.pid, os.getpid(), 0, "child", "")
    finally:
        child.kill()
        child.communicate()


def test_a_needle_across_two_blocks_of_memory_is_found_once() -> None:
    needle = of_bytes("bytes", 0, os.urandom(64))
    with holding(HOLD_ACROSS, needle.pieces[0][1], str(BLOCK_BYTES), "64") as child:
        searched = search_process(child, Finder([needle]))
    assert len(searched.finds) == 1
    assert not searched.gaps


def test_a_list_whose_integers_lie_anywhere_is_found(mark: Mark) -> None:
    finder = Finder([of_bytes("bytes", 0, os.urandom(64))])
    numbers = " ".join(str(token_id) for run in mark.runs for token_id in run)
    with holding(HOLD_LIST, f"{numbers}\n".encode()) as child:
        without = search_process(child, finder)
        searched = search_process(child, finder, runs=[(7, run) for run in mark.runs])
    assert not without.finds
    assert {find.kind for find in searched.finds} == {"list of python ints"}
    assert {find.owner for find in searched.finds} == {7}


def test_a_process_that_cannot_be_read_is_a_gap() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    gone = Process(child.pid, os.getpid(), 0, "true", "true")
    searched = search_process(gone, Finder([of_bytes("bytes", 0, bytes(range(16)))]))
    assert searched.gaps
    assert searched.num_bytes == 0


FORK_THREE = """
import os
for _ in range(3):
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    os.wait()
print("done", flush=True)
while True:
    pass
"""


def test_children_that_come_and_go_are_listed_and_what_is_frozen_stands_still() -> None:
    root = subprocess.Popen([sys.executable, "-c", FORK_THREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stat = Path(f"/proc/{root.pid}/stat")
    try:
        with ProcessTree([root.pid]) as family:
            assert root.stdin is not None
            assert root.stdout is not None
            for number in range(3):
                give_up_s = time.monotonic() + 300
                while len(family.seen) < 2 + number:
                    assert time.monotonic() < give_up_s
                    time.sleep(0.01)
                root.stdin.write(b"e")
                root.stdin.flush()
            root.stdout.readline()
            assert len(family.ended()) == 3
            with family.frozen() as processes:
                assert [process.pid for process in processes] == [root.pid]
                before = stat.read_text().split()[13]
                time.sleep(0.1)
                assert stat.read_text().split()[13] == before
    finally:
        root.kill()
        root.communicate()


def looked(*, finds: int = 0) -> Looked:
    return Looked([Searched("front", [Find("front", "[heap]", "utf-8", 0)] * finds)])


@pytest.mark.parametrize(
    ("finds", "obstacles", "status"),
    [(0, [], 0), (1, [], 1), (1, ["a gap"], 1), (0, ["a gap"], 2)],
    ids=["nothing", "something", "something beside gaps", "a gap"],
)
def test_exit_statuses_are_true(finds: int, obstacles: list[str], status: int) -> None:
    assert TraceVerdict(LoadResult(), looked(), looked(finds=finds), {}, 1, obstacles).exit_code == status
