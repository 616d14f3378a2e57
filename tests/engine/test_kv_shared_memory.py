"""Memory through which KV passes: what is read cannot be changed, what is not read is not overwritten, and nothing is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.engine.kv_frames import KVLinkError, read_exactly
from cloister.engine.kv_shared_memory import NUM_IDLE, SharedHalves, SharedInbox, SharedMemories, SharedOutbox
from cloister.kv import KVFormat, KVSealer
from cloister.kv.objects import KVHeader

HALF = 4096
WAIT_S = 60.0


class Pair:
    """The two ends of a pull."""

    def __init__(self, memories: SharedMemories, source: str = "a") -> None:
        self.asker, self.source = socket.socketpair()
        self.inbox = SharedInbox(memories, source, HALF)
        self.inbox.invite(self.asker, time.monotonic() + WAIT_S)
        self.outbox = SharedOutbox(self.source, time.monotonic() + WAIT_S)

    def send(self, *contents: bytes, wait_s: float = WAIT_S) -> None:
        self.outbox.send(self.source, b"frame", contents, time.monotonic() + wait_s)

    def receive(self, num_bytes: int) -> memoryview:
        assert read_exactly(self.asker, 5, time.monotonic() + WAIT_S) == b"frame"
        return self.inbox.receive(self.asker, num_bytes, time.monotonic() + WAIT_S)

    def close(self, *, is_whole: bool) -> None:
        self.outbox.close()
        self.inbox.close(is_whole=is_whole)
        self.asker.close()
        self.source.close()


@pytest.fixture
def memories() -> Iterator[SharedMemories]:
    made = SharedMemories()
    yield made
    made.close()
    assert not find_memories()


def find_memories() -> list[str]:
    """Memory that this process has open or mapped."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return [line for line in (*links, *Path("/proc/self/maps").read_text().splitlines()) if "cloister-kv-pull" in line]


def test_parts_arrive_one_behind_the_other(memories: SharedMemories) -> None:
    pair = Pair(memories)
    for number in range(7):
        pair.send(bytes([number]) * 3000, b"", bytes([number + 100]) * 1000)
        assert pair.receive(4000) == bytes([number]) * 3000 + bytes([number + 100]) * 1000
    pair.close(is_whole=True)


def test_what_a_source_writes_behind_its_frame_is_not_what_was_read(memories: SharedMemories) -> None:
    pair = Pair(memories)
    pair.send(b"checked")
    found = pair.receive(7)
    pair.outbox._map[:7] = b"changed"
    assert found == b"checked"
    pair.close(is_whole=False)


def test_a_half_that_was_not_read_is_not_overwritten(memories: SharedMemories) -> None:
    pair = Pair(memories)
    pair.send(b"1" * HALF)
    pair.send(b"2" * HALF)
    with pytest.raises(TimeoutError):
        pair.send(b"3" * HALF, wait_s=0.05)
    assert [pair.receive(HALF), pair.receive(HALF)] == [b"1" * HALF, b"2" * HALF]
    pair.send(b"3" * HALF)
    assert pair.receive(HALF) == b"3" * HALF
    pair.close(is_whole=True)


def test_the_last_part_is_read_though_its_source_has_left(memories: SharedMemories) -> None:
    pair = Pair(memories)
    for _ in range(2):  # nobody takes note that these were read
        pair.send(b"x")
        pair.receive(1)
    pair.send(b"last")
    pair.outbox.close()
    pair.source.close()
    assert pair.receive(4) == b"last"
    pair.inbox.close(is_whole=True)
    pair.asker.close()


def test_memory_is_used_again_for_the_same_source_only_and_is_zero_between(memories: SharedMemories) -> None:
    first = Pair(memories)
    first.send(b"KV of somebody")
    first.receive(14)
    halves = first.inbox._halves
    first.close(is_whole=True)
    other = Pair(memories, "b")
    assert other.inbox._halves is not halves
    again = Pair(memories)
    assert again.inbox._halves is halves
    assert again.outbox._map[:] == bytes(2 * HALF)
    for pair in (other, again):
        pair.close(is_whole=True)


def test_memory_of_a_pull_that_broke_off_is_not_used_again(memories: SharedMemories) -> None:
    pair = Pair(memories)
    pair.send(b"KV")
    pair.close(is_whole=False)
    assert not find_memories()


def test_few_memories_are_kept(memories: SharedMemories) -> None:
    for number in range(NUM_IDLE + 3):
        Pair(memories, str(number)).close(is_whole=True)
    assert len(memories._idle) == NUM_IDLE
    assert len({line.split()[-1] for line in find_memories()}) <= 2 * NUM_IDLE


def test_nothing_is_kept_for_an_engine_that_ends() -> None:
    memories = SharedMemories()
    idle, running = Pair(memories), Pair(memories)
    idle.close(is_whole=True)
    memories.close()
    running.close(is_whole=True)
    assert not find_memories()


def test_memory_cannot_become_shorter_under_those_who_map_it() -> None:
    halves = SharedHalves(HALF)
    with pytest.raises(PermissionError):
        os.ftruncate(halves.fd, HALF)
    with pytest.raises(PermissionError):
        os.ftruncate(halves.fd, 4 * HALF)
    halves.close()


def unsealed() -> int:
    fd = os.memfd_create("any", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * HALF)
    return fd


def read_only() -> int:
    fd = unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


def empty() -> int:
    fd = os.memfd_create("any", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def on_a_disk() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * HALF)
        return os.dup(file.fileno())


@pytest.mark.parametrize("make", [unsealed, read_only, empty, on_a_disk, lambda: os.pipe()[1], lambda: None])
def test_a_source_writes_only_to_memory_that_stays(make: object) -> None:
    asker, source = socket.socketpair()
    fd = make()  # type: ignore[operator]
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(asker, [b"x"], [] if fd is None else [fd])
    with pytest.raises(KVLinkError, match=r"shared memory|change its length"):
        SharedOutbox(source, time.monotonic() + WAIT_S)
    assert len(os.listdir("/proc/self/fd")) == before
    if fd is not None:
        os.close(fd)
    asker.close()
    source.close()


def test_a_part_is_no_larger_than_the_memory(memories: SharedMemories) -> None:
    pair = Pair(memories)
    with pytest.raises(KVLinkError, match="larger than the memory"):
        pair.send(b"x" * HALF, b"x")
    with pytest.raises(KVLinkError, match="more than there is room for"):
        pair.inbox.receive(pair.asker, HALF + 1, time.monotonic() + WAIT_S)
    pair.close(is_whole=False)


def test_whatever_a_source_does_to_the_memory_and_whenever_an_object_is_whole_or_none(memories: SharedMemories) -> None:
    """300 parts; in two of three a byte anywhere is changed, before the frame or behind it."""
    sealer, draw = KVSealer(KVFormat("f", 16, "", (1000, 500)), b"k" * 32), random.Random(7)
    pair, num_taken = Pair(memories), 0
    keys = [number.to_bytes(32, "big") for number in range(300)]
    for entry, key in enumerate(keys):
        sealed = sealer.seal(b"root", key, entry, (draw.randbytes(1000), draw.randbytes(500)))
        start, when = entry % 2 * HALF, draw.choice(("before", "behind", "never"))
        pair.send(*sealed.contents)
        at = start + draw.randrange(1600)
        changed = pair.outbox._map[at] ^ 1 << draw.randrange(8)
        if when == "before":
            pair.outbox._map[at] = changed
        found = pair.receive(1500)
        if when == "behind":
            pair.outbox._map[at] = changed
        header: KVHeader = sealed.header
        is_taken = sealer.is_wanted(header, b"root", keys) and sealer.is_authentic(
            header, (found[:1000], found[1000:]), sealed.mac
        )
        assert is_taken == (when != "before" or at >= start + 1500)
        assert not is_taken or bytes(found) == b"".join(sealed.contents)
        num_taken += is_taken
    assert 150 < num_taken < 250
    pair.close(is_whole=False)
