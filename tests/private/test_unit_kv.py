"""KV between engines of two machines of a sealed unit, in both directions: over carriers, sealed, and computed where that
fails. Both machines are this one; steps of the engines are made by the test."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloister.engine.channel import wait_readable
from cloister.engine.kv_unit import UNREACHED, KVUnit, relative_endpoint
from cloister.engine.locked_keys import LockedKeys
from cloister.kv import KVSealer
from cloister.kv.objects import KVObject
from cloister.private.unit import carriers
from cloister.private.unit.carriers import NUM_RESERVED, LeaderCarriers, MemberCarriers
from cloister.private.unit.pairing import CARRY, Pair, UnitRefusedError
from cloister.text import Tokenizer
from cloister.types.events import KVLoaded
from tests.engine.test_kv_sealed_link import UnitPeer, go_on, prefill, words_of
from tests.engine.test_kv_transfer import NUM_HIT, answer, run_until
from tests.private.test_unit_carriers import Tap, wait_until

pytestmark = pytest.mark.usefixtures("patience")

ELSEWHERE = "sealed:1"
"""How the only engine of either machine finds that of the other one."""
PAIR_ID, SECRET = b"i" * 16, b"s" * 32


class TwoMachines:
    """The carriers of two machines, on an event loop of their own, with a tap between them.

    Attributes:
        units: the KV units of the leader and the member.
    """

    def __init__(self) -> None:
        self.units = (KVUnit(), KVUnit())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._do(self._open())

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    async def _open(self) -> None:
        self.port = socket.create_server(("127.0.0.1", 0))
        self.tap = Tap(self.port.getsockname()[1])
        self._tapping = await asyncio.start_server(self.tap.accept, "127.0.0.1", 0)
        self.member = MemberCarriers(LockedKeys())
        self.member.kv_unit = self.units[1]
        self.leader = LeaderCarriers(LockedKeys(), lambda index, listener: listener.close(), self.units[0])
        self._serving = asyncio.create_task(self._accept())
        pair = Pair(PAIR_ID, SECRET, self._tapping.sockets[0].getsockname()[:2], 1, 1)
        self.member.set_leader(pair)
        self.leader.add(pair)
        await wait_until(lambda: self.member._reserve.full())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self.port.setblocking(False)
        while True:
            await wait_readable(self.port)
            sock, _ = self.port.accept()
            sock.setblocking(False)
            try:
                await loop.sock_recv(sock, 1)
                await self.member.carry(sock, CARRY)
            except BaseException as error:
                sock.close()
                if not isinstance(error, UnitRefusedError | OSError):
                    raise

    def link(self, machine: int) -> socket.socket:
        """Opens a link to the other machine's engine, as an engine of this one does; returns its end."""
        near, far = socket.socketpair()
        near.settimeout(300)
        with far:
            socket.send_fds(self.units[machine]._carriers[1], [b"+"], [far.fileno()])
        return near

    def lose_reserve(self) -> None:
        """Ends the connections that the leader keeps in reserve, as an outage does, and waits until it has made others."""
        num_heard = len(self.tap.heard)
        self._do(self._lose_reserve())
        self._do(wait_until(lambda: len(self.tap.heard) >= num_heard + NUM_RESERVED and self.member._reserve.full()))

    async def _lose_reserve(self) -> None:
        for link, _ in list(self.member._reserve._queue):  # type: ignore[attr-defined]
            link.shutdown(socket.SHUT_RDWR)

    def part(self) -> None:
        """Ends the pair, on the member's side."""
        self._do(self._part())

    async def _part(self) -> None:
        self.member.remove_leader(PAIR_ID)

    def close(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for unit in self.units:
            unit.close()

    async def _close(self) -> None:
        self.leader.close()
        self.member.close()
        self._tapping.close()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self.port.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    made = TwoMachines()
    yield made
    made.close()


@pytest.fixture
def engines(machines: TwoMachines, tokenizer: Tokenizer) -> Iterator[tuple[UnitPeer, UnitPeer]]:
    made = tuple(UnitPeer(tokenizer, unit, 0) for unit in machines.units)
    yield made  # type: ignore[misc]
    for engine in made:
        engine.links.close()


@pytest.fixture
def expected(tokenizer: Tokenizer) -> Iterator[list[int]]:
    alone, unit = None, KVUnit()
    alone = UnitPeer(tokenizer, unit, 0)
    yield answer(alone)
    alone.links.close()
    unit.close()


BOTH_WAYS = pytest.mark.parametrize("source", [1, 0], ids=["leader loads", "member loads"])


@BOTH_WAYS
def test_kv_passes_between_machines_and_the_network_reads_none_of_it(
    machines: TwoMachines,
    engines: tuple[UnitPeer, UnitPeer],
    expected: list[int],
    source: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from_, to = engines[source], engines[1 - source]
    given, seal = list[KVObject](), KVSealer.seal
    monkeypatch.setattr(KVSealer, "seal", lambda *what: given.append(seal(*what)) or given[-1])
    assert go_on(to, from_, prefill(from_), ELSEWHERE) == expected
    assert to.find(KVLoaded)[0].num_tokens == NUM_HIT
    heard = machines.tap.everything()
    assert len(heard) > sum(found.num_bytes for found in given)
    assert [word for word in [*words_of(given), SECRET] if word in heard] == []
    run_until(lambda: not from_.links._peers, from_)


@BOTH_WAYS
@pytest.mark.parametrize("at", [130, *(pytest.param(at, marks=pytest.mark.slow) for at in (10, 95, 400, 2500))])
def test_what_the_network_changes_is_computed_instead(
    machines: TwoMachines, engines: tuple[UnitPeer, UnitPeer], expected: list[int], source: int, at: int
) -> None:
    passed: dict[tuple[int, int], int] = {}

    def flip(connection: int, way: int, data: bytes) -> bytes:
        start = passed.get((connection, way), 0)
        passed[connection, way] = start + len(data)
        if not start <= at < start + len(data):
            return data
        changed = bytearray(data)
        changed[at - start] ^= 1
        return bytes(changed)

    machines.tap.change = flip
    from_, to = engines[source], engines[1 - source]
    assert go_on(to, from_, prefill(from_), ELSEWHERE) == expected


@BOTH_WAYS
def test_without_the_other_machine_everything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
    machines: TwoMachines,
    engines: tuple[UnitPeer, UnitPeer],
    expected: list[int],
    source: int,
) -> None:
    for module in ("scheduler.kv_load", "scheduler.kv_exports", "engine.kv_transfer", "engine.kv_sockets"):
        monkeypatch.setattr(f"cloister.{module}.KV_LOAD_TIMEOUT_S", 5.0)
    from_, to = engines[source], engines[1 - source]
    tokens = prefill(from_)
    machines.part()
    assert go_on(to, from_, tokens, ELSEWHERE) == expected
    assert not to.find(KVLoaded)[0].complete


def test_the_member_has_connections_for_one_load_after_another(
    machines: TwoMachines, engines: tuple[UnitPeer, UnitPeer]
) -> None:
    leader, member = engines
    source = prefill(leader)
    go_on(member, leader, source, ELSEWHERE)
    give_up: Callable[[], bool] = lambda: machines.member._reserve.full()  # noqa: E731
    run_until(give_up, leader)  # the one that was used has another in its place


@pytest.mark.parametrize(
    ("endpoint", "target", "found"),
    [
        ("sealed:0", 1, "sealed:0"),  # both the leader's
        ("sealed:3", 0, "sealed:3"),  # a member's, for the leader
        ("sealed:3", 2, "sealed:1"),  # both the first member's
        ("sealed:1", 3, "sealed:3"),  # the leader's, for a member
        ("sealed:4", 2, UNREACHED),  # of two members
        ("shm:somewhere", 2, "shm:somewhere"),
    ],
)
def test_each_machine_numbers_engines_in_its_own_way(endpoint: str, target: int, found: str) -> None:
    assert relative_endpoint(endpoint, target, 2) == found


def test_an_outage_that_ends_reserved_connections_ends_no_load_after_it(
    monkeypatch: pytest.MonkeyPatch, machines: TwoMachines
) -> None:
    monkeypatch.setattr(carriers, "RESERVE_PAUSE_S", 0.1)
    machines.lose_reserve()
    for _ in range(NUM_RESERVED + 1):
        with machines.link(1) as end:
            assert len(end.recv(32)) == 32
    machines._do(wait_until(lambda: machines.member._reserve.full()))  # those that were taken have others in their places
    num_heard = len(machines.tap.heard)
    time.sleep(0.5)
    assert len(machines.tap.heard) <= num_heard + 1  # the leader makes no more than are taken


def test_a_reserved_connection_that_has_ended_is_passed_over(monkeypatch: pytest.MonkeyPatch, machines: TwoMachines) -> None:
    monkeypatch.setattr(carriers, "RESERVE_PAUSE_S", 0.1)
    machines._do(machines._lose_reserve())  # and at once, before others have taken their places:
    with machines.link(1) as end:
        assert len(end.recv(32)) == 32


def num_open(path: str) -> int:
    """Returns how many descriptors of this process are of a file."""
    return sum(os.path.realpath(f"/proc/self/fd/{number}") == path for number in os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("machine", [0, 1])
def test_a_descriptor_that_is_no_socket_ends_nothing_and_is_closed(machines: TwoMachines, machine: int) -> None:
    before = num_open(os.devnull)
    with open(os.devnull) as file:
        for _ in range(3):
            socket.send_fds(machines.units[machine]._carriers[1], [b"+"], [file.fileno()])
    with machines.link(machine) as end:
        assert len(end.recv(32)) == 32
    assert num_open(os.devnull) == before


def test_links_for_kv_take_no_channel_from_workers(monkeypatch: pytest.MonkeyPatch, machines: TwoMachines) -> None:
    monkeypatch.setattr(carriers, "MAX_CARRIED_KV", 2)
    ends = [machines.link(0) for _ in range(4)]
    assert sorted(len(end.recv(32)) for end in ends) == [0, 0, 32, 32]
    [carried] = machines.leader._pairs.values()
    assert carried.is_full(carriers.KV_LINK)
    assert not carried.is_full(carriers.CHANNEL)
    for end in ends:
        end.close()
    machines._do(wait_until(lambda: not carried.is_full(carriers.KV_LINK)))
