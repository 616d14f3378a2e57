"""Channels on demand: what a worker gets from the zygote's broker, and what a captured one does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cloister.engine.sealed_channels import CONNECT
from cloister.private.workers import channel_broker
from cloister.private.workers.channel_broker import ChannelBroker, ChannelSource
from cloister.types.errors import EngineError


class Engines:
    """Those that run, and the ends of channels that they got."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.ends: list[tuple[int, socket.socket]] = []

    def open(self, index: int) -> tuple[socket.socket, bytes]:
        if index not in self.running:
            raise KeyError(index)
        near, far = socket.socketpair()
        self.ends.append((index, far))
        return near, CONNECT


@contextmanager
def served(engines: Engines) -> Iterator[Callable[[], socket.socket]]:
    control, far = socket.socketpair()
    broker = ChannelBroker(engines.open, control)
    serving = threading.Thread(target=broker.serve)
    admitted: list[socket.socket] = []

    def admit() -> socket.socket:  # as the zygote does it, between two commands
        far.send(b"w")
        if serving.ident is not None:
            serving.join()
        control.recv(1)
        admitted.append(broker.admit())
        start()
        return admitted[-1]

    def start() -> None:
        nonlocal serving
        serving = threading.Thread(target=broker.serve)
        serving.start()

    try:
        yield admit
    finally:
        far.send(b"w")
        serving.join()
        broker.close()
        for sock in (control, far, *admitted, *(end for _, end in engines.ends)):
            sock.close()


def test_a_worker_reaches_an_engine_that_was_started_after_it() -> None:
    engines = Engines()

    async def run(sock: socket.socket) -> None:
        channels = ChannelSource(sock)
        with pytest.raises(EngineError, match="does not run"):
            await channels.open(3)
        engines.running.add(3)
        channel, again = await asyncio.gather(channels.open(3), channels.open(3))
        with channel, again:
            for (index, end), near in zip(engines.ends, (channel, again), strict=True):
                end.send(b"of this engine")
                assert (index, near.recv(100)) == (3, b"of this engine")

    with served(engines) as admit:
        asyncio.run(run(admit()))


@pytest.mark.parametrize("asked", [b"x", b"-1", b"\xc2\xb2", b" 1"])
def test_a_captured_worker_gets_nothing_but_channels_to_engines(asked: bytes) -> None:
    engines = Engines()
    engines.running.add(1)
    with served(engines) as admit:
        captured, other = admit(), admit()
        captured.settimeout(300)
        captured.send(asked)
        assert captured.recv(1) == b""  # it is closed
        assert not engines.ends
        other.settimeout(300)
        other.send(b"1")
        message, descriptors, _, _ = socket.recv_fds(other, 1, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        assert (message, len(descriptors)) == (b"+", 1)


@pytest.mark.parametrize(("limit", "last"), [("MAX_ASKS", b""), ("MAX_CHANNELS", b"-")])
def test_a_captured_worker_gets_a_bounded_number_of_channels_and_one_that_reads_nothing_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, limit: str, last: bytes
) -> None:
    monkeypatch.setattr(channel_broker, limit, 5)
    monkeypatch.setattr(channel_broker, "ASKS_PER_S", 0.0)
    monkeypatch.setattr(channel_broker, "CHANNELS_PER_S", 0.0)
    engines = Engines()
    engines.running.add(0)
    with served(engines) as admit:
        captured, other = admit(), admit()
        for _ in range(6):
            captured.send(b"0")
        other.settimeout(300)
        other.send(b"0")
        assert other.recv(1) == b"+"
        captured.settimeout(300)
        given = [socket.recv_fds(captured, 1, 1)[:2] for _ in range(6)]
        for _, descriptors in given:
            for descriptor in descriptors:
                os.close(descriptor)
        assert [message for message, _ in given] == [b"+"] * 5 + [last]
        assert [len(descriptors) for _, descriptors in given] == [1] * 5 + [0]
        assert len(engines.ends) == 6, "none is opened that nobody gets: five and one"


@pytest.mark.parametrize("limit", ["ASKS", "CHANNELS"])
def test_a_worker_in_a_long_outage_gets_channels_when_it_is_over(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """It asks again and again, and each channel that it gets ends at once."""
    monkeypatch.setattr(channel_broker, f"MAX_{limit}", 5)
    monkeypatch.setattr(channel_broker, f"{limit}_PER_S", 50.0)
    engines = Engines()
    engines.running.add(0)

    async def run(sock: socket.socket) -> None:
        channels, num_got = ChannelSource(sock), 0
        while num_got < 20:
            with contextlib.suppress(EngineError):
                (await channels.open(0)).close()
                num_got += 1
            await asyncio.sleep(0.03)

    with served(engines) as admit:
        asyncio.run(asyncio.wait_for(run(admit()), 300))


def test_a_worker_whose_zygote_has_ended_is_told_so() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def run() -> None:
        channels = ChannelSource(near)
        far.close()
        for _ in range(2):
            with pytest.raises(EngineError, match="no channels any more"):
                await channels.open(0)

    asyncio.run(run())


def test_a_late_answer_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_broker, "ANSWER_TIMEOUT_S", 0.01)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def run() -> None:
        channels = ChannelSource(near)
        with pytest.raises(EngineError):
            await channels.open(0)
        with pytest.raises(BrokenPipeError):
            far.send(b"-")
        with pytest.raises(EngineError):
            await channels.open(1)

    with far:
        asyncio.run(run())
