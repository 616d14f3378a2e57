"""Engines of another machine, reached over TCP: who taps, changes, repeats or cuts what is carried gets nothing of it, and the
request goes on. Both machines are this one, the engine is a real process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from cloister.engine import (
    EngineClient,
    SealedWorkerTransport,
    Supervision,
    carried_channel,
    channel,
    heartbeats,
    sealed_channels,
)
from cloister.engine.channel import wait_readable
from cloister.engine.core import EngineCore
from cloister.engine.kv_unit import CarriedSocket
from cloister.engine.locked_keys import LockedKeys
from cloister.engine.sealed_channels import CONNECT
from cloister.launch import build_engine
from cloister.private.unit import carriers
from cloister.private.unit.carriers import LeaderCarriers, MemberCarriers, pump, watch_peer
from cloister.private.unit.pairing import CARRY, Pair, UnitRefusedError
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import Ready, Submit
from cloister.types.request import Request, SamplingParams
from tests.engine.test_worker_channels import EngineProcess, wait_until

PAIR_ID, SECRET = b"i" * 16, b"s" * 32
TOKENS = [414, 500, 600, 700, 800]
NUM_TOKENS = 200


def make_request(name: str = "the name of a request") -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return Request(request_id=name, token_ids=TOKENS, sampling=sampling, timeout_s=600)


class Tap:
    """An operator of the network between two machines.

    Attributes:
        heard: what passed, by connection and direction (0: to the member).
        change: what becomes of bytes; None cuts the connection.
        holds_ends: it does not pass on that a side has ended the first connection.
    """

    def __init__(self, port: int) -> None:
        self.heard: list[tuple[bytearray, bytearray]] = []
        self.change: Callable[[int, int, bytes], bytes | None] = lambda connection, direction, data: data
        self.holds_ends = False
        self._port = port
        self._tasks: set[asyncio.Task[Any]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)  # the loop forgets it once its first connection has ended, though it waits for the other one
        task.add_done_callback(self._tasks.discard)
        number = len(self.heard)
        self.heard.append((bytearray(), bytearray()))
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = ((0, reader, far_writer), (1, far_reader, writer))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(self._pass_on(number, *way, (writer, far_writer)) for way in ways))
        for each in (writer, far_writer):
            each.close()

    async def _pass_on(
        self,
        number: int,
        direction: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.heard[number][direction].extend(data)
                changed = self.change(number, direction, data)
                if changed is None:
                    for each in both:
                        each.transport.abort()
                    return
                writer.write(changed)
                await writer.drain()
            while self.holds_ends and not number:
                await asyncio.sleep(0.01)
            writer.write_eof()

    def everything(self) -> bytes:
        return b"".join(bytes(way) for ways in self.heard for way in ways)


class Machines:
    """A leader's and a member's carriers, a tap between them, and an engine of the member."""

    def __init__(self, engine: EngineProcess, tap: Tap, member: MemberCarriers) -> None:
        self.engine, self.tap, self.member = engine, tap, member
        self.listeners: dict[int, socket.socket] = {}
        self.leader = LeaderCarriers(LockedKeys(), self.listeners.__setitem__)
        self.refused: list[str] = []
        self.workers: list[EngineClient] = []

    async def open_channel(self, index: int) -> socket.socket:
        """As a worker gets it from the zygote."""
        near, far = socket.socketpair()
        with far:
            try:
                socket.send_fds(self.listeners[index], [CONNECT], [far.fileno()])
            except OSError:
                near.close()
                raise EngineError("it does not run") from None
        return CarriedSocket.adopt(near)

    async def make_worker(self, index: int = 1) -> EngineClient:
        transport = SealedWorkerTransport(Ready(self.engine.engine.model, []))
        transport.attach(partial(self.open_channel, index))
        worker = EngineClient(transport, self.engine.config)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def answer(self) -> list[int]:
        worker = await self.make_worker()
        return [token async for output in worker.generate(make_request()) for token in output.token_ids]

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            await wait_readable(listener)
            sock, _ = listener.accept()
            sock.setblocking(False)
            try:
                assert await loop.sock_recv(sock, 1) == CARRY
                await self.member.carry(sock, CARRY)
            except BaseException as error:
                sock.close()
                if not isinstance(error, UnitRefusedError | OSError):
                    raise
                self.refused.append(str(error))


@asynccontextmanager
async def opened(entry: str = "cloister.launch:build_engine") -> AsyncIterator[Machines]:
    engine = EngineProcess(entry, supervision=Supervision())
    member = MemberCarriers(LockedKeys())
    keep = engine.listeners.append

    def keep_both(listener: socket.socket) -> None:
        keep(listener)
        member.keep_listener(0, listener.dup())

    engine.transport._keep_listener = keep_both
    await engine.engine.start()
    port = socket.create_server(("127.0.0.1", 0))
    tap = Tap(port.getsockname()[1])
    machines = Machines(engine, tap, member)
    serving = asyncio.create_task(machines.accept(port))
    tapping = await asyncio.start_server(tap.accept, "127.0.0.1", 0)
    pair = Pair(PAIR_ID, SECRET, tapping.sockets[0].getsockname()[:2], 1, 1)
    member.set_leader(pair)
    machines.leader.add(pair)
    try:
        yield machines
    finally:
        tap.holds_ends = False
        for worker in machines.workers:
            await worker.drain(0.0)
        machines.leader.close()
        member.close()
        tapping.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await engine.close()
        port.close()
        for listener in machines.listeners.values():
            listener.close()


async def end_of(reader: asyncio.StreamReader) -> None:
    """Waits until the other side has ended the connection, and said nothing."""
    async with asyncio.timeout(300):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


async def expected_of(machines: Machines) -> list[int]:
    """What the engine says to a worker of its own machine."""
    worker = await machines.engine.link()
    return [token async for output in worker.generate(make_request()) for token in output.token_ids]


def test_a_worker_gets_the_same_answer_from_an_engine_elsewhere_and_a_tap_reads_none_of_it() -> None:
    async def run() -> None:
        async with opened() as machines:
            expected = await expected_of(machines)
            assert await machines.answer() == expected
            heard = machines.tap.everything()
            submitted = channel.frame(Submit(make_request()))
            words = [b"the name of a request", b"".join(channel.encode(token) for token in TOKENS), SECRET]  # type: ignore[arg-type]
            assert all(word in submitted for word in words[:2])  # an open channel has them
            assert [word for word in words if word in heard] == []
            assert len(heard) > 5 * NUM_TOKENS

    asyncio.run(run())


CHANGED = [(0, 40), (0, 70), (0, 95), (0, 150), (1, 0), (1, 33), (1, 60), (1, 400), (1, 3000)]
"""Direction and place of bytes: of headers, public keys, lengths and contents of records."""


def test_what_is_changed_on_the_way_ends_the_connection_and_the_request_goes_on() -> None:
    async def run() -> None:
        async with opened() as machines:
            expected = await expected_of(machines)
            for direction, at in CHANGED:
                first, passed = len(machines.tap.heard), [0, 0]

                def flip(
                    connection: int, way: int, data: bytes, *, direction: int = direction, at: int = at, first: int = first,
                    passed: list[int] = passed,
                ) -> bytes:  # fmt: skip
                    if connection > first:
                        return data
                    start, passed[way] = passed[way], passed[way] + len(data)
                    if way == direction and start <= at < passed[way]:
                        changed = bytearray(data)
                        changed[at - start] ^= 1
                        return bytes(changed)
                    return data

                machines.tap.change = flip
                assert await machines.answer() == expected
                assert len(machines.tap.heard) > first + 1  # over another connection

    asyncio.run(run())


def test_a_connection_that_is_cut_again_and_again_loses_nothing() -> None:
    async def run() -> None:
        async with opened() as machines:
            expected = await expected_of(machines)
            limits = [4000, 8000, 16000]
            machines.tap.change = lambda connection, way, data: (
                None if connection < 3 and len(machines.tap.heard[connection][1]) > limits[connection] else data
            )
            assert await machines.answer() == expected
            assert len(machines.tap.heard) == 4

    asyncio.run(run())


def test_connections_that_are_cut_before_they_bring_much_accuse_no_request() -> None:
    async def run() -> None:
        async with opened() as machines:
            expected = await expected_of(machines)
            machines.tap.change = lambda connection, way, data: (
                None if connection < 5 and len(machines.tap.heard[connection][1]) > 300 else data
            )
            assert await machines.answer() == expected
            assert len(machines.tap.heard) == 6

    asyncio.run(run())


IMPATIENT = {"LOOK_S": 0.1, "PAUSE_S": 0.2, "LATE_S": 1.0, "SILENT_S": 2.0}
"""Either end takes the other one for lost sooner."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "LINGER_S", 0.1)
    monkeypatch.setattr(carried_channel, "LOOK_S", IMPATIENT["LOOK_S"])
    for name, value in IMPATIENT.items():
        monkeypatch.setattr(heartbeats, name, value)


def build_impatient(config: EngineConfig) -> EngineCore:
    """The engine's process is impatient too."""
    sealed_channels.LOOK_S = IMPATIENT["LOOK_S"]  # type: ignore[misc]
    for name, value in IMPATIENT.items():
        setattr(heartbeats, name, value)
    return build_engine(config)


IMPATIENT_ENTRY = f"{__name__}:{build_impatient.__name__}"
HEAD_BYTES = len(CARRY) + carriers._HEAD.size + 32 + 32
"""Header, MAC and public key: what comes before the request."""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("held", "after"),
    [({0}, (0, HEAD_BYTES)), ({1}, (1, 4000)), ({0, 1}, (1, 4000))],
    ids=["to the member", "to the leader", "both ways"],
)
def test_a_connection_that_somebody_holds_open_and_passes_nothing_on_ends_at_both_ends(
    held: set[int], after: tuple[int, int]
) -> None:
    async def run() -> None:
        async with opened(IMPATIENT_ENTRY) as machines:
            expected, machines.tap.holds_ends = await expected_of(machines), True
            machines.tap.change = lambda connection, way, data: (
                b"" if not connection and way in held and len(machines.tap.heard[0][after[0]]) > after[1] else data
            )
            async with asyncio.timeout(300):
                assert await machines.answer() == expected
            assert len(machines.tap.heard) > 1
            for carried in (machines.leader._pairs[PAIR_ID], machines.member._carried):
                await wait_until(lambda carried=carried: carried._num_channels == 1)  # the second one
            await wait_until(lambda: not machines.engine.engine.is_busy)

    asyncio.run(run())


@pytest.mark.usefixtures("impatient")
def test_a_connection_over_which_somebody_lets_little_pass_ends() -> None:
    async def run() -> None:
        async with opened(IMPATIENT_ENTRY) as machines:
            expected, waiting = await expected_of(machines), bytearray()

            def drip(connection: int, way: int, data: bytes) -> bytes:
                if connection or not way or len(machines.tap.heard[0][1]) < 4000:
                    return data
                waiting.extend(data)
                passed = bytes(waiting[:100])
                del waiting[:100]
                return passed  # a token now and then

            machines.tap.change, machines.tap.holds_ends = drip, True
            async with asyncio.timeout(300):
                assert await machines.answer() == expected
            assert len(machines.tap.heard) > 1

    asyncio.run(run())


def test_a_connection_over_which_an_engine_has_nothing_to_say_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((carried_channel, "LOOK_S"), (heartbeats, "LOOK_S"), (heartbeats, "PAUSE_S")):
        monkeypatch.setattr(module, name, 0.01)

    async def run() -> None:
        async with opened() as machines:
            assert await machines.answer() == await machines.answer()
            num_before = [len(machines.tap.heard[0][way]) for way in (0, 1)]
            await wait_until(lambda: len(machines.tap.heard[0][1]) - num_before[1] >= 50 * 20)
            assert len(machines.tap.heard[0][0]) - num_before[0] >= 40 * 20
            assert len(machines.tap.heard) == 2
            assert all(worker.health().good for worker in machines.workers)

    asyncio.run(run())


def test_an_engine_ends_a_connection_over_which_nobody_agrees_on_keys() -> None:
    async def run() -> None:
        async with opened(IMPATIENT_ENTRY) as machines:
            end = await machines.open_channel(1)
            end.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(300):
                assert len(await loop.sock_recv(end, 1000)) >= 32
                while await loop.sock_recv(end, 1000):
                    pass
            end.close()

    asyncio.run(run())


def test_a_repeated_connection_reaches_no_engine() -> None:
    async def run() -> None:
        async with opened() as machines:
            await machines.answer()
            recorded = bytes(machines.tap.heard[0][0])
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", machines.tap._port)
                writer.write(recorded)
                await end_of(reader)
                writer.close()
            assert machines.refused == ["a connection of the leader was repeated by somebody else"] * 2

    asyncio.run(run())


def test_a_header_that_the_leader_did_not_make_reaches_no_engine() -> None:
    async def run() -> None:
        async with opened() as machines:
            await machines.answer()
            recorded = bytes(machines.tap.heard[0][0][: len(CARRY) + carriers._HEAD.size + 32])
            for place in range(len(CARRY), len(recorded), 4):  # purpose, pair, engine, number, MAC
                header = bytearray(recorded)
                header[place] ^= 1
                machines.refused.clear()
                reader, writer = await asyncio.open_connection("127.0.0.1", machines.tap._port)
                writer.write(header)
                await end_of(reader)
                writer.close()
                assert machines.refused == ["a connection was not made by this member's leader"]

    asyncio.run(run())


def test_an_engine_elsewhere_that_dies_is_reached_again_once_another_one_runs() -> None:
    async def run() -> None:
        async with opened() as machines:
            expected, tokens = await expected_of(machines), list[int]()
            first = machines.engine.engine.pid
            async for output in (await machines.make_worker()).generate(make_request()):
                if not tokens:
                    machines.engine.transport.kill()
                tokens += output.token_ids
            assert tokens == expected
            assert machines.engine.engine.pid != first

    asyncio.run(run())


@pytest.mark.parametrize("by_leader", [True, False])
def test_nothing_of_a_pair_is_left_when_it_has_ended(*, by_leader: bool) -> None:
    async def run() -> None:
        async with opened() as machines:
            worker, num_files = await machines.make_worker(), len(os.listdir("/proc/self/fd"))
            outputs: list[object] = []
            worker.submit(make_request(), outputs.append)
            await wait_until(lambda: bool(outputs))
            if by_leader:
                machines.leader.remove(PAIR_ID)
            else:
                machines.member.remove_leader(PAIR_ID)
            await wait_until(lambda: not worker.health().good)
            await wait_until(lambda: not machines.engine.engine.is_busy)  # its engine has no request any more
            worker.abort("the name of a request")
            await worker.drain(0.0)
            await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_files)
            if by_leader:
                with pytest.raises(EngineError):
                    await machines.open_channel(1)

    asyncio.run(run())


def test_a_pair_carries_a_bounded_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "MAX_CARRIED", 2)

    async def run() -> None:
        async with opened() as machines:
            loop = asyncio.get_running_loop()
            ends = [await machines.open_channel(1) for _ in range(5)]
            for end in ends:
                end.setblocking(False)
            async with asyncio.timeout(300):
                got = [await loop.sock_recv(end, 32) for end in ends]
            assert [len(each) for each in got] == [32, 32, 0, 0, 0]
            for end in ends:
                end.close()

    asyncio.run(run())


def test_secrets_are_of_one_connection() -> None:
    async def run() -> None:
        async with opened() as machines:
            ends = [await machines.open_channel(1) for _ in range(3)]
            for end in ends:
                end.setblocking(False)
            async with asyncio.timeout(300):
                got = {await asyncio.get_running_loop().sock_recv(end, 32) for end in ends}
            assert len(got) == 3
            assert SECRET not in got
            for end in ends:
                end.close()

    asyncio.run(run())


def test_numbers_are_admitted_once_in_any_order_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "WINDOW", 8)
    window = carriers._Window()
    assert [window.admit(number) for number in (1, 3, 2, 3, 2, 1, 4)] == [True, True, True, False, False, False, True]
    assert window.admit(100)
    assert [window.admit(number) for number in (93, 92, 93, 4, 2**63)] == [True, False, False, False, True]


def test_a_pump_reads_no_more_than_it_can_pass_on() -> None:
    async def run() -> None:
        sender, one = socket.socketpair()
        other, receiver = socket.socketpair()
        for sock in (sender, one, other, receiver):
            sock.setblocking(False)
        pumping = asyncio.create_task(pump(one, other))
        num_sent = 0
        for _ in range(200):
            with contextlib.suppress(BlockingIOError):
                num_sent += sender.send(bytes(2**20))
            await asyncio.sleep(0)
        assert num_sent < 2 * 2**20  # buffers of sockets, and one of the pump
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        for sock in (sender, one, other, receiver):
            sock.close()

    asyncio.run(run())


def test_the_kernel_watches_the_other_machine() -> None:
    with socket.socket() as sock:
        watch_peer(sock)
        idle_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        probes_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) * sock.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPINTVL
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle_s + probes_s == carriers.DEAD_S
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * carriers.DEAD_S


def test_a_leader_that_has_no_pair_any_more_is_carried_nowhere() -> None:
    async def run() -> None:
        async with opened() as machines:
            machines.member.set_leader(Pair(b"j" * 16, b"t" * 32, None, 1, 1))
            worker = await machines.make_worker()
            worker.submit(make_request(), lambda output: None)
            await wait_until(lambda: bool(machines.refused))
            assert machines.refused[0] == "a connection was not made by this member's leader"

    asyncio.run(run())
