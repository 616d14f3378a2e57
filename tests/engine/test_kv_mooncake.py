"""KV through Mooncake: nothing readable is registered, and a write that is late spoils nothing.

Its library is not installed in CI (46 MB, and one of the system); the protocol around it is tested with a stand-in.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest

from cloister.engine.kv_frames import KVLinkError, pack, read_exactly
from cloister.engine.kv_mooncake import NUM_MEMORIES, QUARANTINE_S, Mooncake, MooncakeInbox, MooncakeOutbox, _Invitation
from cloister.engine.kv_transports import KV_TRANSPORTS
from cloister.types.errors import ConfigError

HALF = 4096
WAIT_S = 60.0


class WritesHere:
    """As Mooncake's `TransferEngine`, within this process.

    Attributes:
        status: of all writes; 0: they are late.
        carried: what was written.
        late: writes that were late: source, target, bytes.
    """

    def __init__(self) -> None:
        self.status = 1
        self.carried: list[bytes] = []
        self.late: list[tuple[int, int, int]] = []

    def register_memory(self, address: int, num_bytes: int) -> int:
        return 0

    def transfer_submit_write(self, session: str, source: int, target: int, num_bytes: int) -> int:
        self.carried.append(ctypes.string_at(source, num_bytes))
        if self.status == 1:
            ctypes.memmove(target, source, num_bytes)
        else:
            self.late.append((target, source, num_bytes))
        return 7

    def transfer_check_status(self, batch: int) -> int:
        return self.status


class Pair:
    """The two ends of a pull."""

    def __init__(self, asking: Mooncake, asked: Mooncake) -> None:
        self.asker, self.source = socket.socketpair()
        self.inbox = MooncakeInbox(asking, HALF)
        self.inbox.invite(self.asker, time.monotonic() + WAIT_S)
        self.outbox = MooncakeOutbox(asked, self.source, time.monotonic() + WAIT_S)

    def send(self, *contents: bytes, wait_s: float = WAIT_S) -> None:
        self.outbox.send(self.source, b"frame", contents, time.monotonic() + wait_s)

    def receive(self, num_bytes: int) -> bytes:
        assert read_exactly(self.asker, 5, time.monotonic() + WAIT_S) == b"frame"
        return bytes(self.inbox.receive(self.asker, num_bytes, time.monotonic() + WAIT_S))

    def close(self, *, is_whole: bool) -> None:
        self.outbox.close()
        self.inbox.close(is_whole=is_whole)
        self.asker.close()
        self.source.close()


@pytest.fixture
def writes() -> WritesHere:
    return WritesHere()


@pytest.fixture
def pair(writes: WritesHere) -> Iterator[Pair]:
    made = Pair(Mooncake(writes, "here"), Mooncake(writes, "there"))
    yield made
    made.asker.close()
    made.source.close()


def test_what_mooncake_carries_cannot_be_read_nor_taken_for_another_part(pair: Pair, writes: WritesHere) -> None:
    for _ in range(5):
        pair.send(b"KV of somebody", b"", b"and more")
        assert pair.receive(22) == b"KV of somebodyand more"
    assert len(set(writes.carried)) == 5
    assert not any(b"KV of" in carried for carried in writes.carried)
    pair.close(is_whole=True)


@pytest.mark.parametrize("at", [0, 7, 22])
def test_what_a_stranger_changes_is_refused(pair: Pair, at: int) -> None:
    pair.send(b"KV of somebody")
    pair.inbox._halves._map[at] ^= 1
    with pytest.raises(KVLinkError, match="not what another engine has sent"):
        pair.receive(14)


def test_a_write_that_is_late_ends_the_pull_and_its_memory_is_not_used_again(writes: WritesHere) -> None:
    asking, asked = Mooncake(writes, "here"), Mooncake(writes, "there")
    writes.status = 0
    for _ in range(NUM_MEMORIES):
        pair = Pair(asking, asked)
        with pytest.raises(TimeoutError):
            pair.send(b"KV", wait_s=0.01)
        pair.close(is_whole=False)
    with pytest.raises(OSError, match="hold all memory"):
        asking.take(HALF)
    with pytest.raises(OSError, match="hold all memory"):
        asked.take(HALF)
    for target, source, num_bytes in writes.late:
        ctypes.memmove(target, source, num_bytes)  # it is still there


def test_memory_of_pulls_that_broke_off_is_used_again_after_a_while_and_a_later_write_is_noticed(writes: WritesHere) -> None:
    now_s = [0.0]
    asking, asked = (Mooncake(writes, name, lambda: now_s[0]) for name in ("here", "there"))
    writes.status = 0
    for _ in range(NUM_MEMORIES):
        pair = Pair(asking, asked)
        with pytest.raises(TimeoutError):
            pair.send(b"KV", wait_s=0.01)
        pair.close(is_whole=False)
    now_s[0] = QUARANTINE_S - 1.0
    with pytest.raises(OSError, match="hold all memory"):
        asking.take(HALF)
    now_s[0] = QUARANTINE_S
    writes.status = 1
    pair = Pair(asking, asked)
    pair.send(b"KV")
    assert pair.receive(2) == b"KV"
    pair.send(b"more")
    for target, source, num_bytes in writes.late:
        ctypes.memmove(target, source, num_bytes)
        ctypes.memmove(target + HALF + 16, source, num_bytes)
    with pytest.raises(KVLinkError, match="is not what another engine has sent"):
        pair.receive(4)
    pair.close(is_whole=False)


def test_memory_of_pulls_that_ended_is_used_again(writes: WritesHere) -> None:
    asking, asked = Mooncake(writes, "here"), Mooncake(writes, "there")
    for _ in range(NUM_MEMORIES + 1):
        pair = Pair(asking, asked)
        pair.send(b"KV")
        assert pair.receive(2) == b"KV"
        pair.close(is_whole=True)
    assert len(asking._made) == len(asked._made) == 1


def test_a_write_that_fails_is_an_error(pair: Pair, writes: WritesHere) -> None:
    writes.status = -1
    with pytest.raises(KVLinkError, match="could not write"):
        pair.send(b"KV")


def test_a_part_is_no_larger_than_the_memory(pair: Pair) -> None:
    with pytest.raises(KVLinkError, match="larger than the memory"):
        pair.send(b"x" * HALF, b"x")


@pytest.mark.parametrize("changes", [{"half_bytes": 0}, {"half_bytes": 2**40}, {"key": b"short"}])
def test_an_invitation_that_no_engine_makes_is_refused(writes: WritesHere, changes: dict[str, Any]) -> None:
    asker, source = socket.socketpair()
    with asker, source:
        asker.sendall(pack(msgspec.structs.replace(_Invitation("here", 1, HALF, b"k" * 32), **changes)))
        with pytest.raises(KVLinkError, match="odd size"):
            MooncakeOutbox(Mooncake(writes, "there"), source, time.monotonic() + WAIT_S)


def test_an_invitation_shows_no_key() -> None:
    assert "k" * 8 not in repr(_Invitation("here", 1, HALF, b"k" * 32))


# With Mooncake


def test_without_mooncake_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'cloister\[mooncake\]'.*libibverbs1"):
        KV_TRANSPORTS.get("mooncake")(b"s" * 32)


def ask(connection: Connection) -> None:
    """Another process: asks for parts, and says what it got."""
    mooncake, asker = Mooncake.start(), socket.socket(fileno=connection.recv())
    inbox = MooncakeInbox(mooncake, HALF)
    inbox.invite(asker, time.monotonic() + WAIT_S)
    while True:
        num_bytes = connection.recv()
        read_exactly(asker, 5, time.monotonic() + WAIT_S)
        connection.send(bytes(inbox.receive(asker, num_bytes, time.monotonic() + WAIT_S)))


def test_mooncake_moves_bytes_to_another_process_and_waits_no_longer_than_told() -> None:
    try:
        mooncake = Mooncake.start()
    except ConfigError as error:
        pytest.skip(error.message)
    near, far = get_context("fork").Pipe()
    asker, source = socket.socketpair()
    process = get_context("fork").Process(target=ask, args=(far,), daemon=True)
    process.start()
    near.send(asker.fileno())
    outbox = MooncakeOutbox(mooncake, source, time.monotonic() + WAIT_S)
    for number in range(20):
        content = bytes([number]) * (HALF - number)
        near.send(len(content))
        outbox.send(source, b"frame", [content], time.monotonic() + WAIT_S)
        assert near.recv() == content
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        outbox.send(source, b"frame", [b"x" * HALF], began_s + 1.0)
    assert time.monotonic() - began_s < WAIT_S
    process.kill()
    process.join(WAIT_S)
    outbox.close()
    asker.close()
    source.close()
