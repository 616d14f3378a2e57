"""The log on disk: tiles, proofs from tiles alone, and what is left when it is stopped anywhere."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.trust.transparency.files import write_whole
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.merkle import (
    EMPTY_ROOT,
    hash_leaf,
    make_root,
    nodes_of,
    verify_consistency,
    verify_inclusion,
)
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.tiles import ENTRIES, LogReader, Tile, bundles_between, grow, tile_nodes, unpack_entries
from cloister.types.errors import ConfigError
from tests.thinning import examples

KEY = PrivateKey.generate("log.example", Kind.NOTE)


def entry(number: int) -> bytes:
    return f"entry {number}".encode() * (number % 5)


def make_log(directory: Path, size: int = 0) -> Log:
    log = Log.create(directory, KEY)
    if size:
        log.append([entry(number) for number in range(size)])
    return log


@pytest.mark.parametrize(
    ("tile", "path"),
    [
        (Tile(0, 1234067), "tile/0/x001/x234/067"),
        (Tile(2, 0, 1), "tile/2/000.p/1"),
        (Tile(ENTRIES, 999, 255), "tile/entries/999.p/255"),
        (Tile(1, 1000), "tile/1/x001/000"),
    ],
)
def test_tiles_are_named_as_the_standard_names_them(tile: Tile, path: str) -> None:
    assert tile.path == path
    assert Tile.parse(path) == tile


@pytest.mark.parametrize(
    "path", ["tile/0/00", "tile/00/000", "tile/64/000", "tile/0/x000/000", "tile/0/000.p/256", "tile/0/000.p/0"]
)
def test_a_tile_has_no_second_name(path: str) -> None:
    assert Tile.parse(path) is None


def test_a_tree_of_70000_leaves_has_the_tiles_of_the_standards_example() -> None:
    leaves = [hash_leaf(str(number).encode()) for number in range(70_000)]
    tiles = grow(lambda tile: b"", 0, leaves)
    assert sum(tile.level == 0 and tile.width == 256 for tile in tiles) == 273
    partial = {tile.path for tile in tiles if tile.width < 256}
    assert partial == {"tile/0/273.p/112", "tile/1/001.p/17", "tile/2/000.p/1"}
    assert make_root(tile_nodes(tiles.__getitem__, 70_000), 70_000) == make_root(nodes_of(leaves), 70_000)


def test_proofs_from_tiles_alone_hold_under_every_checkpoint(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log")
    leaves: list[bytes] = []
    roots = {0: EMPTY_ROOT}
    for count in (1, 2, 252, 1, 1, 300, 256, 5):
        new = [entry(len(leaves) + number) for number in range(count)]
        appended = log.append(new)
        assert appended.first == len(leaves)
        leaves += map(hash_leaf, new)
        roots[len(leaves)] = make_root(nodes_of(leaves), len(leaves))
        assert appended.checkpoint.root == roots[len(leaves)]
    reader = LogReader(tmp_path / "log", KEY.public)
    newest, _ = reader.checkpoint()
    assert newest.size == len(leaves) == 818
    assert reader.entries(250, 700, 818) == [entry(number) for number in range(250, 700)]
    for index in (0, 2, 254, 255, 256, 557, 817):
        verify_inclusion(leaves[index], index, 818, reader.prove_inclusion(index, 818), newest.root)
    for old in list(roots)[1:]:
        assert reader.root(old) == roots[old]
        verify_consistency(old, 818, roots[old], newest.root, reader.prove_consistency(old, 818))
    assert not list((tmp_path / "log" / "tile" / "0").glob("000.p"))
    assert reader.resource("tile/0/000.p/3") == (b"".join(leaves[:3]), "application/octet-stream")


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.data())
def test_a_log_grown_in_any_steps_is_the_same_log(tmp_path_factory: Any, steps: list[int], data: st.DataObject) -> None:
    log = make_log(tmp_path_factory.mktemp("log") / "log")
    for step in steps:
        size = log.checkpoint()[0].size
        log.append([entry(size + number) for number in range(step)])
    size = sum(steps)
    assert log.checkpoint()[0].root == make_root(nodes_of([hash_leaf(entry(number)) for number in range(size)]), size)
    index = data.draw(st.integers(0, size - 1))
    assert log.entries(index, index + 1, size) == [entry(index)]
    read: list[bytes] = []
    for tile in bundles_between(index, size, size):
        served = log.resource(tile.path)
        assert served is not None
        read += unpack_entries(served[0], tile.width)
    assert read[index - size :] == [entry(number) for number in range(index, size)]


@pytest.mark.parametrize(
    "path", ["../key", "checkpoint/../key", "tile/../../key", "/etc/passwd", "tile/0/000/../../../key", "key", ""]
)
def test_only_the_logs_own_resources_are_served(tmp_path: Path, path: str) -> None:
    log = make_log(tmp_path / "log", 3)
    (tmp_path / "key").write_text("secret")
    (tmp_path / "log" / "key").write_text("secret")
    assert log.resource(path) is None
    assert log.resource("checkpoint") == (str(log.checkpoint()[1]).encode(), "text/plain; charset=utf-8")
    digest = log.keep_manifest(b"{}")
    assert log.resource(f"manifest/{digest}") == (b"{}", "application/json")


def test_an_entry_that_is_too_long_changes_nothing(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", 3)
    with pytest.raises(TransparencyError, match="most"):
        log.append([b"short", b"x" * 65_536])
    assert log.checkpoint()[0].size == 3
    assert log.append([b"x" * 65_535]).checkpoint.size == 4


def test_a_log_is_never_made_anew(tmp_path: Path) -> None:
    make_log(tmp_path / "log", 3)
    with pytest.raises(ConfigError, match="already"):
        Log.create(tmp_path / "log", KEY)


def test_a_log_does_not_grow_on_tiles_or_entries_that_were_changed(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", 3)
    entries = tmp_path / "log" / Tile(ENTRIES, 0, 3).path
    hashes = tmp_path / "log" / Tile(0, 0, 3).path
    good = entries.read_bytes()
    entries.write_bytes(good[:-1] + b"!")
    with pytest.raises(TransparencyError, match="changed") as caught:
        log.append([b"more"])
    assert caught.value.reason == Reason.NOT_INCLUDED
    entries.write_bytes(good)
    hashes.write_bytes(hashes.read_bytes()[::-1])
    with pytest.raises(TransparencyError) as caught:
        log.append([b"more"])
    assert caught.value.reason == Reason.NOT_CONSISTENT


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_disk_that_is_full_at_any_step_leaves_the_published_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Every write of an append fails once, at each of its steps; the log stays whole, and then grows as if nothing had been."""
    log = make_log(tmp_path / "log", 254)
    real = getattr(os, call)
    failed = 0
    for step in range(40):
        before = log.checkpoint()[0]
        calls = iter(range(1000))

        def fail(*arguments: Any, **options: Any) -> Any:
            is_write = call != "open" or arguments[1] & os.O_CREAT
            if is_write and next(calls) == step:  # noqa: B023
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **options)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, call, fail)
                log.append([b"lost", b"or not", str(step).encode()])
        except ConfigError as error:
            failed += "No space left" in error.message
        else:
            break
        after = log.checkpoint()[0]
        assert after.root == log.root(after.size)
        if call == "fsync" and after != before:  # the last fsync is after the rename: published, though not known to be on disk
            verify_consistency(before.size, after.size, before.root, after.root, log.prove_consistency(before.size, after.size))
        else:
            assert after == before
    assert failed >= 5
    done = log.checkpoint()[0]
    log.append([b"next"])
    entries = log.entries(0, done.size + 1, done.size + 1)
    assert entries[-4:] == [b"lost", b"or not", str(step).encode(), b"next"]


WRITER = """
import sys
from pathlib import Path
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.note import PrivateKey

log = Log(Path(sys.argv[1]), PrivateKey.parse(sys.argv[2]))
number = log.checkpoint()[0].size
while True:
    appended = log.append([f"{number + n}".encode() for n in range(1 + number % 7)])
    number = appended.checkpoint.size
    print(number, appended.checkpoint.root.hex(), flush=True)
"""


def test_a_writer_killed_at_any_moment_never_contradicts_what_it_published(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log")
    published: dict[int, str] = {}
    for turn in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(log.directory), KEY.encode()], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(1 + turn % 3)]
        time.sleep(0.004 * turn + 0.0007)
        writer.kill()
        lines += writer.stdout.read().splitlines(keepends=True)
        writer.stdout.close()
        writer.wait(300)
        published |= {int(size): root for size, root in (line.split() for line in lines if line.endswith("\n"))}
        newest = log.checkpoint()[0]
        assert newest.size >= max(published)
        assert log.root(newest.size) == newest.root
        assert log.entries(0, newest.size, newest.size) == [str(number).encode() for number in range(newest.size)]
    assert len(published) > 8
    for size, root in published.items():
        verify_consistency(size, newest.size, bytes.fromhex(root), newest.root, log.prove_consistency(size, newest.size))


def test_two_writers_take_turns(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log")
    code = WRITER.replace("while True:", "for _ in range(20):")
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(log.directory), KEY.encode()], stdout=subprocess.DEVNULL)
        for _ in "ab"
    ]
    assert [writer.wait(300) for writer in writers] == [0, 0]
    newest = log.checkpoint()[0]
    assert log.root(newest.size) == newest.root
    assert newest.size >= 40


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space there"), (errno.EACCES, "check the path and who may write there")]
)
def test_what_cannot_be_written_is_told_what_to_do(tmp_path, monkeypatch, number, remedy):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=f"cannot write .*: {os.strerror(number)}; {remedy}"):
        write_whole(tmp_path / "log.key", b"key")
    assert list(tmp_path.iterdir()) == []
