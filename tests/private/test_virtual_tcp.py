"""The simulated network between machines does what TCP does, and its attackers what attackers can."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cloister.private.unit.carriers import DEAD_S, watch_peer
from cloister.private.virtual.event_loop import SocketEventLoop
from cloister.private.virtual.tcp import HOST, TcpNetwork

NEAR, FAR = "10.0.0.1", "10.0.0.2"
ADDRESS = (FAR, 9100)


class Ends:
    """Both ends of a connection, and the network between them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SocketEventLoop)
        self.loop = loop
        self.network = loop.network = TcpNetwork(0.01, lambda what, number: None)
        self.listener = self.network.listen(ADDRESS)
        self.opened: list[socket.socket] = []
        HOST.set(NEAR)

    async def open(self, *, watches: bool = False) -> tuple[socket.socket, socket.socket]:
        """Returns the client's end, made as the carriers make it, and the server's."""
        near = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        near.setblocking(False)
        if watches:
            watch_peer(near)
        await self.loop.sock_connect(near, ADDRESS)
        far, _ = self.listener.accept()
        far.setblocking(False)
        if watches:
            watch_peer(far)
        self.opened += near, far
        return near, far


def run(test: Callable[[Ends], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        ends = Ends()
        await test(ends)
        for sock in ends.opened:
            sock.close()
        for host in (NEAR, FAR):
            ends.network.turn_on(host)
            ends.network.end_programs(host)
        await asyncio.sleep(3.0)
        assert ends.network.connections == []

    with asyncio.Runner(loop_factory=SocketEventLoop) as runner:
        runner.run(main())


async def read_all(ends: Ends, sock: socket.socket) -> bytes:
    received = b""
    while data := await ends.loop.sock_recv(sock, 65536):
        received += data
    return received


def test_bytes_come_late_in_order_and_all_of_them_through_a_cut() -> None:
    async def test(ends: Ends) -> None:
        near, far = await ends.open()
        began_s, text = ends.loop.time(), bytes(range(256)) * 2000
        sending = asyncio.create_task(ends.loop.sock_sendall(near, text))
        await asyncio.sleep(0.005)
        ends.network.cut(NEAR, FAR)
        ends.loop.call_later(20.0, ends.network.mend, NEAR, FAR)
        received = b""
        while len(received) < len(text):
            received += await ends.loop.sock_recv(far, 65536)
        assert received == text
        assert 20.0 < ends.loop.time() - began_s < 25.0
        await sending
        near.close()
        assert await read_all(ends, far) == b""
        far.close()
        await asyncio.sleep(0.1)
        assert ends.network.connections == []

    run(test)


def test_a_sender_waits_for_a_receiver_that_reads_nothing() -> None:
    async def test(ends: Ends) -> None:
        near, far = await ends.open()
        sending = asyncio.create_task(ends.loop.sock_sendall(near, bytes(2_000_000)))
        await asyncio.sleep(60.0)
        assert not sending.done()
        num_bytes = 0
        while num_bytes < 2_000_000:
            num_bytes += len(await ends.loop.sock_recv(far, 65536))
        await sending

    run(test)


@pytest.mark.parametrize("watches", [True, False])
def test_a_machine_without_power_is_noticed_by_those_who_ask(watches: bool) -> None:
    async def test(ends: Ends) -> None:
        near, _ = await ends.open(watches=watches)
        ends.network.turn_off(FAR)
        reading = asyncio.create_task(ends.loop.sock_recv(near, 1))
        await asyncio.sleep(DEAD_S - 1.5)
        assert not reading.done()
        await asyncio.sleep(3.0)
        assert reading.done() == watches
        if watches:
            assert isinstance(reading.exception(), ConnectionResetError)
            return
        ends.network.turn_on(FAR)  # it knows of no such connection, and says so when it is sent something
        await asyncio.sleep(60.0)
        assert not reading.done()
        near.send(b"x")
        await asyncio.wait({reading}, timeout=3.0)
        assert isinstance(reading.exception(), ConnectionResetError)

    run(test)


def test_a_program_that_is_killed_has_sent_what_it_had_written() -> None:
    async def test(ends: Ends) -> None:
        near, far = await ends.open()
        far.send(b"its last words")
        ends.network.end_programs(FAR)
        assert await read_all(ends, near) == b"its last words"
        near.close()
        await asyncio.sleep(2.0)
        assert ends.network.connections == []
        with pytest.raises(ConnectionRefusedError):
            await ends.network.connect(ADDRESS)

    run(test)


def test_an_attacker_ends_holds_and_changes_connections() -> None:
    async def test(ends: Ends) -> None:
        near, far = await ends.open(watches=True)
        (connection,) = ends.network.connections
        connection.is_held = True
        near.send(b"held")
        reading = asyncio.create_task(ends.loop.sock_recv(far, 10))
        await asyncio.sleep(10 * DEAD_S)
        assert not reading.done(), "each side believes that the other one is there"
        connection.is_held = False
        assert await reading == b"held"
        connection.changes = True
        near.send(b"changed")
        near.send(b" once")
        await asyncio.sleep(1.0)
        assert await ends.loop.sock_recv(far, 20) == b"bhanged once"
        connection.reset()
        for sock in (near, far):
            with pytest.raises(ConnectionResetError):
                await ends.loop.sock_recv(sock, 1)
        assert ends.network.connections == []
        assert ends.network.ended == {FAR: [b"heldchanged once"]}

    run(test)
