"""Engines of a sealed node, as the worker of one request and as the front see them."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from cloister.cluster.sealed_unit import SealedUnit, connect_engines
from cloister.engine import EngineClient, RequestClient, SealedWorkerTransport, channel
from cloister.engine.channel import InputQueue
from cloister.engine.in_flight import PERHAPS_POISONED
from cloister.engine.kv_unit import CARRIED, KVUnit, endpoint_of
from cloister.engine.sealed_channels import CONNECT, SealedChannels, open_listener
from cloister.private.workers.channel_broker import NOT_RUNNING
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import ConfigError, EngineError
from cloister.types.events import (
    Abort,
    CancelPrefetch,
    Ended,
    FrontMessage,
    HoldKV,
    KVLoaded,
    KVSource,
    Outputs,
    PrefetchKV,
    PrefillDone,
    Progressed,
    Ready,
    Resumption,
    Scheduled,
    Stepped,
    Submit,
)
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput
from tests.engine.fake_transport import MODEL

CONFIG = EngineConfig(profile="private", block_size=4)
PROMPT = list(range(40))


def make_request(name: str = "r", token_ids: list[int] = PROMPT) -> Request:
    return Request(request_id=name, token_ids=token_ids, sampling=SamplingParams(max_tokens=3, temperature=0.0))


class FarEngine:
    """The engine's end of a worker's channel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(300)
        self.sock = sock

    async def read(self) -> FrontMessage:
        frame = await asyncio.to_thread(channel.receive_blocking, self.sock)
        assert frame is not None
        return channel.decode_front(frame)

    def say(self, *token_ids: int, ends: bool = False, first: bool = False) -> None:
        reason = FinishReason.LENGTH if ends else None
        output = SequenceOutput(request_id="r", index=0, token_ids=list(token_ids), finish_reason=reason)
        events = [Progressed("r", 1, 0, 1.0, len(token_ids), first)]
        end = [Ended("r", 1, 0, 1.0, FinishReason.LENGTH, len(PROMPT), 3, 0, 0.0, 0.5, last=True)] if ends else []
        self.sock.sendall(channel.frame(Outputs([output], [*events, *end])))


class Engines:
    """What runs: a worker gets a channel to an engine when it asks for one.

    Attributes:
        ends: the engines' ends of channels; the last one of each.
        asked: the engines that were asked for, whether they run or not.
    """

    def __init__(self, running: set[int]) -> None:
        self.running = running
        self.ends: dict[int, FarEngine] = {}
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> FarEngine:
        return self.ends[index]

    async def open(self, index: int) -> socket.socket:
        self.asked.append(index)
        if index not in self.running:
            raise EngineError(NOT_RUNNING)
        near, far = socket.socketpair()
        self.ends[index] = FarEngine(far)
        return near

    def has_asked(self, num_times: int) -> bool:
        return len(self.asked) >= num_times

    def kill(self, index: int) -> None:
        """Ends an engine."""
        self.running.discard(index)
        self.ends.pop(index).sock.close()


@asynccontextmanager
async def opened_unit(
    num_engines: int = 2, dead: tuple[int, ...] = (), num_machines: int = 1, **front: int
) -> AsyncIterator[tuple[RequestClient, Engines]]:
    engines, transports = Engines(set(range(num_engines)) - set(dead)), []
    members = ",".join(f"10.0.0.{machine}:9100" for machine in range(2, num_machines + 1)) or None
    for index in range(num_engines):
        ready = Ready(MODEL, [], kv_endpoint=endpoint_of(index) if front else None)
        transport = SealedWorkerTransport(ready, index, num_engines // num_machines)
        transport.attach(partial(engines.open, index))
        transports.append(transport)
    config = ServerConfig(replicas=num_engines // num_machines, unit_members=members, **front)  # type: ignore[arg-type]
    client = connect_engines(transports, CONFIG, config)
    await client.start()
    await asyncio.sleep(0)
    try:
        yield client, engines
    finally:
        await client.drain(0.0)
        for end in engines.ends.values():
            end.sock.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)


async def drawn_engine(engines: Engines) -> int:
    """Returns the engine that got the first message."""
    give_up_s = asyncio.get_running_loop().time() + 300
    while True:
        assert asyncio.get_running_loop().time() < give_up_s, "no engine gets a message"
        for index, end in list(engines.ends.items()):
            end.sock.setblocking(False)
            try:
                if end.sock.recv(1, socket.MSG_PEEK):
                    return index
            except BlockingIOError:
                pass
            finally:
                end.sock.settimeout(300)
        await asyncio.sleep(0.001)


def test_each_engine_is_drawn_by_its_capacity_whether_it_is_slow_or_quick() -> None:
    """Engine 0 never says anything: who slows an engine, or keeps it busy, moves no request to another one."""

    async def run() -> list[int]:
        drawn = []
        for _ in range(200):  # each is another worker, which knows of no request but its own
            async with opened_unit() as (client, ends):
                outputs: list[SequenceOutput] = []
                client.submit(make_request(), outputs.append)
                index = await drawn_engine(ends)
                drawn.append(index)
                if index == 1:
                    ends[1].say(1, 2, 3, ends=True, first=True)
        return drawn

    drawn = asyncio.run(run())
    assert 65 <= drawn.count(0) <= 135  # 100 ± 5 standard deviations


def test_a_request_goes_on_in_another_engine_with_the_next_token() -> None:
    async def run() -> None:
        async with opened_unit() as (client, ends):
            outputs: list[SequenceOutput] = []
            client.submit(make_request(), outputs.append)
            first = await drawn_engine(ends)
            submitted = await ends[first].read()
            ends[first].say(7, 8, first=True)
            await until(lambda: bool(outputs))
            ends.kill(first)
            assert await drawn_engine(ends) == 1 - first
            again = await ends[1 - first].read()
            assert isinstance(submitted, Submit)
            assert isinstance(again, Submit)
            assert again.resumption is not None
            assert again.resumption.token_ids == [[7, 8]]
            assert again.seed == submitted.seed  # the same noise
            ends[1 - first].say(9, ends=True)
            await until(lambda: len(outputs) == 2)
            assert [token for output in outputs for token in output.token_ids] == [7, 8, 9]
            assert outputs[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(run())


def test_a_request_goes_on_in_an_engine_that_was_started_again_during_it() -> None:
    """Both engines die, one after the other; the first one runs again when the second one dies."""

    async def run() -> None:
        async with opened_unit() as (client, ends):
            outputs: list[SequenceOutput] = []
            client.submit(make_request(), outputs.append)
            first = await drawn_engine(ends)
            await ends[first].read()
            ends[first].say(7, first=True)
            await until(lambda: bool(outputs))
            ends.kill(first)
            assert await drawn_engine(ends) == 1 - first
            await ends[1 - first].read()
            ends.running.add(first)
            ends[1 - first].say(8)
            await until(lambda: len(outputs) == 2)
            ends.kill(1 - first)
            assert await drawn_engine(ends) == first
            again = await ends[first].read()
            assert isinstance(again, Submit)
            assert again.resumption is not None
            assert again.resumption.token_ids == [[7, 8]]

    asyncio.run(run())


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_request_waits_while_no_engine_runs(num_engines: int) -> None:
    async def run() -> None:
        async with opened_unit(num_engines) as (client, ends):
            outputs: list[SequenceOutput] = []
            client.submit(make_request(), outputs.append)
            first = await drawn_engine(ends)
            await ends[first].read()
            ends.running.clear()
            ends.kill(first)
            await until(lambda: set(ends.asked[1:]) == set(range(num_engines)))
            with pytest.raises(EngineError, match="being restarted"):
                client.submit(make_request("s"), outputs.append)
            ends.running.add(first)
            assert await drawn_engine(ends) == first
            assert isinstance(await ends[first].read(), Submit)
            assert outputs == []

    asyncio.run(run())


def test_a_worker_draws_no_engine_that_does_not_run_and_opens_no_channel_that_it_does_not_use() -> None:
    async def run() -> None:
        async with opened_unit(3, dead=(0, 2)) as (client, ends):
            assert ends.asked == []
            outputs: list[SequenceOutput] = []
            client.submit(make_request(), outputs.append)
            assert await drawn_engine(ends) == 1
        async with opened_unit(3) as (client, ends):
            client.submit(make_request(), outputs.append)
            await drawn_engine(ends)
            assert len(ends.asked) == 1

    asyncio.run(run())


@pytest.mark.parametrize("num_tokens", [None, 0, 1])
def test_an_engine_of_another_machine_that_fails_brings_no_further_machine_requests(num_tokens: int | None) -> None:
    """None: it is not reached; else it is lost after so many tokens. Else who cuts connections to some machines, or restarts
    them, would choose which machine opens more of the requests."""

    async def run() -> None:
        for _ in range(30):
            dead = () if num_tokens is not None else (2, 3, 4, 5, 6, 7)
            async with opened_unit(12, dead, num_machines=6) as (client, engines):
                outputs: list[SequenceOutput] = []
                client.submit(make_request(), outputs.append)
                first = await drawn_engine(engines)
                if num_tokens is not None:
                    await engines[first].read()
                    if num_tokens:
                        engines[first].say(7, first=True)
                        await until(partial(bool, outputs))
                    engines.kill(first)
                    await drawn_engine(engines)
                if (drawn := engines.asked[0]) > 1:
                    assert set(engines.asked) - {drawn} <= {0, 1}

    asyncio.run(run())


def test_an_engine_of_the_leaders_machine_that_ends_brings_other_machines_requests_only_if_none_runs_there() -> None:
    """Else who has engines of the leader end would bring a member more of the requests than its share."""

    async def run() -> None:
        num_elsewhere = 0
        for number in range(40):
            is_alone = number % 2 == 0
            async with opened_unit(8, (1,) if is_alone else (), num_machines=4) as (client, engines):
                outputs: list[SequenceOutput] = []
                client.submit(make_request(), outputs.append)
                while (first := await drawn_engine(engines)) > 1:
                    engines.kill(first)  # an engine of another machine: the next one is one of the leader
                if engines.asked[0] > 1:
                    continue
                await engines[first].read()
                engines[first].say(7, first=True)
                await until(partial(bool, outputs))
                engines.kill(first)
                following = await drawn_engine(engines)
                num_elsewhere += following > 1
                assert is_alone or following == 1 - first

        assert num_elsewhere > 0

    asyncio.run(run())


def test_an_engine_of_the_leaders_machine_that_goes_on_with_answers_is_followed_by_one_that_does_so_too() -> None:
    """Engines 0 and 2 compute prompts, 1 and 3 go on with answers; 0 and 1 are those of the leader."""

    async def run() -> None:
        num_tried = 0
        while num_tried < 3:
            async with opened_unit(4, num_machines=2, prefill=1, decode=1) as (client, engines):
                outputs: list[SequenceOutput] = []
                client.submit(make_request(token_ids=[5]), outputs.append)  # too short to be handed over
                if await drawn_engine(engines) != 1:
                    continue
                num_tried += 1
                await engines[1].read()
                engines[1].say(7, first=True)
                await until(partial(bool, outputs))
                engines.kill(1)
                assert await drawn_engine(engines) == 3

    asyncio.run(run())


def test_a_request_waits_for_the_leaders_own_machine_after_one_elsewhere_has_failed() -> None:
    async def run() -> None:
        num_tried = 0
        while num_tried < 3:
            async with opened_unit(6, dead=(0,), num_machines=6) as (client, engines):
                outputs: list[SequenceOutput] = []
                client.submit(make_request(), outputs.append)
                first = await drawn_engine(engines)
                if engines.asked[0] != 0:
                    continue  # its own machine has to be known not to run
                num_tried += 1
                engines.kill(first)
                engines.running.add(first)
                await until(lambda: engines.asked.count(0) >= 5)
                assert set(engines.asked) == {0, first}
                assert engines.asked.count(first) == 1  # what it cannot use any more it does not ask for again and again
                engines.running.add(0)
                assert await drawn_engine(engines) == 0
                assert isinstance(await engines[0].read(), Submit)
                assert outputs == []

    asyncio.run(run())


def test_a_request_that_ends_every_engine_that_has_it_is_tried_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.engine.client.TRIAL_SPREAD_S", 0.1)

    async def run() -> None:
        async with opened_unit() as (client, ends):
            outputs: list[SequenceOutput] = []
            client.submit(make_request(), outputs.append)
            for _ in range(3):
                drawn = await drawn_engine(ends)
                await ends[drawn].read()
                ends[drawn].sock.sendall(channel.frame(Outputs([], [Scheduled("r", 1.0, 0.0, 0, len(PROMPT))])))
                ends.kill(drawn)
                ends.running.add(drawn)
            await until(lambda: bool(outputs))
            assert (outputs[0].finish_reason, outputs[0].error) == (FinishReason.ERROR, PERHAPS_POISONED)

    asyncio.run(run())


def test_a_prompt_is_computed_where_prompts_are_and_its_kv_follows_to_where_the_answer_goes_on() -> None:
    async def run() -> None:
        async with opened_unit(prefill=1, decode=1) as (client, ends):
            outputs: list[SequenceOutput] = []
            client.submit(make_request(), outputs.append)
            assert await drawn_engine(ends) == 0
            submitted = await ends[0].read()
            assert isinstance(submitted, Submit)
            assert submitted.prefill_only
            assert submitted.hold_kv_s > 0.0
            ends[0].sock.sendall(channel.frame(Outputs([], [Scheduled("r", 1.0, 0.0, 0, len(PROMPT))])))
            await until(lambda: 1 in ends.ends)
            followed = await ends[1].read()
            assert isinstance(followed, PrefetchKV)  # which had to wait for its channel
            assert followed.follows
            first = SequenceOutput(request_id="r", index=0, token_ids=[7])
            progress = Progressed("r", 1, 0, 1.0, 1, True)
            ends[0].sock.sendall(channel.frame(Outputs([first], [progress, PrefillDone("r", 1.0, (1,), 0)])))
            resumed = await ends[1].read()
            assert isinstance(resumed, Submit)
            assert resumed.kv_source == KVSource("sealed:0")
            assert resumed.resumption is not None
            assert resumed.resumption.token_ids == [[7]]

    asyncio.run(run())


def test_an_engine_elsewhere_that_was_to_load_kv_and_is_not_reached_brings_no_further_machine_the_answer() -> None:
    """Engines 0, 2 and 4 compute prompts; 1, 3 and 5 go on with answers. Engine 3 does not run."""

    async def run() -> None:
        num_tried = 0
        while num_tried < 4:
            async with opened_unit(6, dead=(2, 3, 4), num_machines=3, prefill=1, decode=1) as (client, engines):
                outputs: list[SequenceOutput] = []
                client.submit(make_request(), outputs.append)
                first = await drawn_engine(engines)
                if engines.asked != [0]:
                    continue  # the prompt is computed elsewhere, or was to be
                await engines[first].read()
                engines[first].sock.sendall(channel.frame(Outputs([], [Scheduled("r", 1.0, 0.0, 0, len(PROMPT))])))
                await until(partial(engines.has_asked, 2))
                if engines.asked[1] != 3:
                    continue  # it was to be loaded by another one
                num_tried += 1
                await asyncio.sleep(0.01)
                token = SequenceOutput(request_id="r", index=0, token_ids=[7])
                events = [Progressed("r", 1, 0, 1.0, 1, True), PrefillDone("r", 1.0, (1,), 0)]
                engines[first].sock.sendall(channel.frame(Outputs([token], events)))
                await until(lambda engines=engines: bool(engines.ends.keys() - {0}))
                assert engines.ends.keys() == {0, 1}

    asyncio.run(run())


def test_one_engine_that_cannot_be_started_again_ends_the_node() -> None:
    """Else the node would run with fewer engines than its evidence states."""

    class Client(EngineClient):
        def fault(self) -> str | None:
            return self._fault

    clients = [Client(SealedWorkerTransport(Ready(MODEL, [])), CONFIG) for _ in range(2)]
    unit = SealedUnit(clients, lambda model: pytest.fail("it routes nothing"))
    assert unit.fault() is None
    clients[1]._fault = "it died too often"
    assert unit.fault() == "it died too often"


def test_the_secret_of_the_engines_ends_with_them() -> None:
    async def run() -> None:
        unit = SealedUnit(
            [EngineClient(SealedWorkerTransport(Ready(MODEL, [])), CONFIG)], lambda model: pytest.fail("it routes nothing")
        )
        unit.kv_unit = KVUnit()
        secret, keys = unit.kv_unit.secret, unit.kv_unit._keys
        assert secret in bytes(keys._pages[0])
        await unit.drain(0.0)
        assert not any(secret in bytes(page) for page in keys._pages)

    asyncio.run(run())


# What a worker may send (`engine.sealed_channels`).


class Channels:
    """An engine's channels, without an engine."""

    def __init__(self) -> None:
        self.near, far = open_listener()
        self.queue = InputQueue()
        self.channels = SealedChannels(far, self.queue, max_num_seqs=4)
        self._workers: list[socket.socket] = []

    def close(self) -> None:
        for key in list(self.channels._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for sock in (self.near, self.channels._wake_sender, *self._workers):
            sock.close()
        self.channels._selector.close()

    def link(self) -> socket.socket:
        near, far = socket.socketpair()
        with far:
            socket.send_fds(self.near, [CONNECT], [far.fileno()])
        self.channels._admit()
        self._workers.append(near)
        return near

    def hear(self) -> list[FrontMessage]:
        """Reads what workers have sent."""
        for key, _ in self.channels._selector.select(0.0):
            if key.data is not None:
                self.channels._serve(key.data)
        return self.queue.take()


@pytest.fixture
def channels() -> Iterator[Channels]:
    made = Channels()
    yield made
    made.close()


PREFETCH = PrefetchKV(make_request(), PROMPT, KVSource("sealed:0"), follows=True)


def test_a_worker_has_the_kv_of_its_own_request_loaded_and_hears_of_it(channels: Channels) -> None:
    worker = channels.link()
    worker.sendall(channel.frame(PREFETCH) + channel.frame(Submit(make_request())))
    assert channels.hear() == [PREFETCH, Submit(make_request())]
    rest = channels.channels.deliver(Outputs([], [KVLoaded("r", 1.0, 8, 100, 0.1, complete=True)]))
    assert len(rest.events) == 1  # the front counts it
    worker.settimeout(300)
    heard = channel.decode_engine(channel.receive_blocking(worker) or b"")
    assert isinstance(heard, Outputs)
    assert isinstance(heard.events[0], KVLoaded)


def test_a_worker_touches_no_request_of_another_one(channels: Channels) -> None:
    mine, other = channels.link(), channels.link()
    mine.sendall(channel.frame(PREFETCH))
    assert channels.hear() == [PREFETCH]
    other.sendall(channel.frame(Abort("r")) + channel.frame(HoldKV("r", 60.0)) + channel.frame(CancelPrefetch("r")))
    assert channels.hear() == []
    other.sendall(channel.frame(Submit(make_request())))
    assert channels.hear() == []
    other.settimeout(300)
    assert other.recv(1) == b""  # it is closed: it would have got another one's outputs


def test_what_an_engine_holds_for_another_one_ends_with_the_worker(channels: Channels) -> None:
    worker, another = channels.link(), channels.link()
    submit = Submit(make_request(), hold_kv_s=15.0, prefill_only=True)
    worker.sendall(channel.frame(submit))
    another.sendall(channel.frame(PrefetchKV(make_request("s"), PROMPT, KVSource("sealed:0"))))
    assert len(channels.hear()) == 2
    channels.channels.deliver(Outputs([], [PrefillDone("r", 1.0, (1,), 0)]))
    assert "r" not in channels.channels._by_request
    worker.close()
    another.close()
    assert set(map(repr, channels.hear())) == {repr(HoldKV("r", 0.0)), repr(CancelPrefetch("s"))}
    assert not channels.channels._by_request


def test_no_worker_hears_of_steps(channels: Channels) -> None:
    """They tell what others do: a worker that knew them could be steered by them."""
    worker = channels.link()
    worker.sendall(channel.frame(Submit(make_request())))
    channels.hear()
    step = Stepped(1.0, 0.1, 1, 1, 1, 0, 1, 0, 8)
    assert channels.channels.deliver(Outputs([], [step])).events == [step]
    worker.setblocking(False)
    with pytest.raises(BlockingIOError):
        worker.recv(1)


def test_a_worker_that_comes_back_as_soon_as_its_prompt_is_done_keeps_its_channel(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = channels.link()
    worker.sendall(channel.frame(Submit(make_request(), hold_kv_s=15.0, prefill_only=True)))
    assert len(channels.hear()) == 1
    send, heard = channels.channels._send, list[FrontMessage]()

    def send_and_come_back(*args: Any) -> None:
        send(*args)  # the engine's thread has sent, and the worker answers before it runs on
        worker.sendall(channel.frame(Submit(make_request())))
        heard.extend(channels.hear())

    monkeypatch.setattr(channels.channels, "_send", send_and_come_back)
    channels.channels.deliver(Outputs([], [PrefillDone("r", 1.0, (1,), 0)]))
    assert [type(message) for message in heard] == [Submit]


def test_a_worker_that_comes_back_before_the_engine_has_ended_its_request_waits_for_that() -> None:
    """Its connection was cut during a long step, in which the engine reads no abort."""
    near, far = open_listener()
    queue, workers = InputQueue(), list[socket.socket]()
    channels = SealedChannels(far, queue, max_num_seqs=4)
    reading = threading.Thread(target=channels.run)
    reading.start()

    def link(*messages: FrontMessage) -> socket.socket:
        one, other = socket.socketpair()
        with other:
            socket.send_fds(near, [CONNECT], [other.fileno()])
        one.settimeout(300)
        one.sendall(b"".join(map(channel.frame, messages)))
        workers.append(one)
        return one

    async def run() -> None:
        heard: list[FrontMessage] = []

        def received() -> list[FrontMessage]:
            heard.extend(queue.take())
            return heard

        async def hears(num_messages: int) -> list[FrontMessage]:
            await until(lambda: len(received()) >= num_messages)
            return heard

        first = link(Submit(make_request()))
        await hears(1)
        first.close()
        assert await hears(2) == [Submit(make_request()), Abort("r")]
        link(Submit(make_request())).close()  # cut too
        again = link(Submit(make_request()), Abort("r"))
        await until(lambda: "r" in channels._later and len(channels._later["r"].messages) == 2)
        assert link(Submit(make_request())).recv(1) == b""  # of another one: it is not its turn
        assert len(await hears(2)) == 2
        end = Ended("r", 1, 0, 1.0, FinishReason.ABORT, len(PROMPT), 0, 0, 0.0, 0.5, last=True)
        channels.deliver(Outputs([], [end]))
        assert (await hears(4))[2:] == [Submit(make_request()), Abort("r")]
        channels.deliver(Outputs([], [end]))
        frame = await asyncio.to_thread(channel.receive_blocking, again)
        assert isinstance(channel.decode_engine(frame or b""), Outputs)

    try:
        asyncio.run(run())
    finally:
        near.close()
        reading.join(300)
        for sock in (far, *workers, channels._wake_sender, channels._wake_receiver):
            sock.close()
        for key in list(channels._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        channels._selector.close()


def test_an_engine_that_may_lock_no_memory_serves_workers_of_its_own_machine(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(setting: str) -> None:
        raise ConfigError("none may be locked", param=setting)

    monkeypatch.setattr("cloister.engine.locked_keys.lock_keys", refuse)
    near, far = socket.socketpair()
    with near:
        with far:
            socket.send_fds(channels.near, [CARRIED], [far.fileno()])
        assert channels.channels._admit()
        near.settimeout(300)
        assert near.recv(1) == b""
    worker = channels.link()
    worker.sendall(channel.frame(Submit(make_request())))
    assert channels.hear() == [Submit(make_request())]


@pytest.mark.parametrize(
    "message",
    [
        Submit(make_request(token_ids=[2**63] * 64)),
        Submit(make_request(), resumption=Resumption([[-1]])),
        Submit(make_request(), hold_kv_s=math.nan),
        PrefetchKV(make_request(), [2**31], KVSource("sealed:0")),
    ],
)
def test_a_worker_that_sends_what_would_end_the_engine_of_all_loses_its_channel(
    channels: Channels, message: FrontMessage
) -> None:
    bad, good = channels.link(), channels.link()
    bad.sendall(channel.frame(message))
    good.sendall(channel.frame(Submit(make_request("other"))))
    heard = [each for _ in range(2) for each in channels.hear()]
    assert [each.request.request_id for each in heard if isinstance(each, Submit)] == ["other"]
    bad.settimeout(5.0)
    assert bad.recv(1) == b""
