"""Workers reach an engine through channels of their own, and the front hears counts of theirs and no content."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloister.engine import EngineClient, ProcessTransport, SealedWorkerTransport, Supervision
from cloister.engine.client import NOT_STARTED
from cloister.engine.sealed_channels import CONNECT
from cloister.engine.supervision import Restarts
from cloister.engine.transports import Deliver
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import Ended, Event, Outputs, Progressed, Ready, Submit
from cloister.types.request import FinishReason, ModelInfo, Request, SamplingParams, SequenceOutput
from tests.engine.replica import TRIGGER, VOCAB_SIZE, make_config, make_request
from tests.history_program import greedy_continuation

CONFIG = EngineConfig(
    model="cloister-5m", kv_memory_mb=64, max_model_len=2048, num_threads=1, weights_cache="", profile="private"
)
ONCE = Supervision(restarts=Restarts(max_restarts=0))


class HeardTransport(ProcessTransport):
    """To an engine process, with every event that comes from there."""

    def __init__(self, heard: list[Event], entry: str, **options: Any) -> None:
        super().__init__(entry, **options)
        self._heard = heard

    async def run(self, deliver: Deliver) -> None:
        def hear(message: Outputs) -> None:
            self._heard.extend(message.events)
            deliver(message)

        await super().run(hear)


class EngineProcess:
    """An engine process with a listener, and the events that its front heard."""

    def __init__(
        self, entry: str = "cloister.launch:build_engine", config: EngineConfig = CONFIG, supervision: Supervision = ONCE
    ) -> None:
        self.config = config
        self.listeners: list[socket.socket] = []
        self.events: list[Event] = []
        self.heard: list[Event] = []
        self.transport = HeardTransport(self.heard, entry, supervision=supervision, keep_listener=self.listeners.append)
        self.engine = EngineClient(self.transport, config)
        self.engine.subscribe(self.events.append)
        self.links: list[EngineClient] = []

    async def close(self) -> None:
        for link in self.links:
            await link.drain(0.0)
        await self.engine.drain(1.0)
        for listener in self.listeners:
            listener.close()

    async def open_channel(self) -> socket.socket:
        near, far = socket.socketpair()
        with far:
            try:
                socket.send_fds(self.listeners[-1], [CONNECT], [far.fileno()])
            except OSError:
                near.close()
                raise EngineError("it does not run") from None
        return near

    async def link(self) -> EngineClient:
        transport = SealedWorkerTransport(Ready(self.engine.model, self.engine.memory))
        engine = EngineClient(transport, self.config)
        transport.attach(self.open_channel)
        await engine.start()
        assert await engine.wake(20.0)
        self.links.append(engine)
        return engine


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.01)


async def complete(engine: EngineClient, name: str, **options: object) -> str:
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **options)  # type: ignore[arg-type]
    request = Request(request_id=name, token_ids=[414, 500, 600], sampling=sampling, timeout_s=600)
    return "".join([output.text async for output in engine.generate(request)])


def test_workers_get_their_own_answers_and_the_front_gets_counts() -> None:
    async def run() -> None:
        process = EngineProcess()
        await process.engine.start()
        try:
            first, second = await process.link(), await process.link()
            whole = await complete(first, "a")
            stop = whole[3:6]
            answers = await asyncio.gather(complete(first, "b"), complete(second, "c"), complete(second, "d", stop=(stop,)))
            assert answers[0] == answers[1] == whole
            assert whole.startswith(answers[2])
            assert stop not in answers[2]
        finally:
            await process.close()
        ends = [event for event in process.events if isinstance(event, Ended)]
        assert not ends  # a request that the front did not send is none of its listeners' business
        told = [event.stop_reason for event in process.heard if isinstance(event, Ended)]
        assert len(told) == 4
        assert not any(told)  # what ended an answer is content
        assert not any(isinstance(event, Progressed) for event in process.events)

    asyncio.run(run())


SLOW = "tests.engine.replica:build_slow"
"""Its answers still run when something happens to them, however fast the machine is."""


def test_a_worker_that_goes_away_takes_its_request_with_it(model_path: Path) -> None:
    async def run() -> None:
        process = EngineProcess(SLOW, make_config(model_path))
        await process.engine.start()
        try:
            worker = await process.link()
            async for _ in worker.generate(make_request(max_tokens=200)):
                break
            await worker.drain(0.0)
            await wait_until(lambda: any(isinstance(event, Ended) for event in process.heard))
            assert not process.engine._requests.is_waited_for
        finally:
            await process.close()
        assert [event.reason for event in process.heard if isinstance(event, Ended)] == [FinishReason.ABORT]

    asyncio.run(run())


def test_a_worker_that_takes_the_name_of_anothers_request_gets_nothing_of_it_and_harms_nobody(model_path: Path) -> None:
    async def run() -> None:
        process = EngineProcess(SLOW, make_config(model_path))
        await process.engine.start()
        try:
            owner, thief = await process.link(), await process.link()
            request = make_request(max_tokens=40)
            answer = owner.generate(request)
            token_ids = list((await anext(answer)).token_ids)
            stolen: list[SequenceOutput] = []
            thief.submit(request, stolen.append)
            await wait_until(lambda: not thief.health().good)  # its channel is closed
            thief.abort(request.request_id)
            assert stolen == []
            token_ids += [token_id async for output in answer for token_id in output.token_ids]
            assert token_ids == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)
            assert process.engine.health().good
        finally:
            await process.close()

    asyncio.run(run())


def test_a_request_goes_on_in_the_engine_that_is_started_again(model_path: Path) -> None:
    async def run() -> None:
        process = EngineProcess(SLOW, make_config(model_path), Supervision())
        await process.engine.start()
        try:
            request = make_request(max_tokens=40)
            worker, first, tokens = await process.link(), process.engine.pid, list[int]()
            async for output in worker.generate(request):
                if not tokens:
                    process.transport.kill()
                tokens += output.token_ids
            assert tokens == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)
            assert first != process.engine.pid
        finally:
            await process.close()

    asyncio.run(run())


def test_an_engine_that_hangs_in_the_very_first_step_for_a_worker_is_replaced(model_path: Path) -> None:
    async def run() -> None:
        supervision = Supervision(first_step_timeout_s=2.0, look_every_s=0.05)
        process = EngineProcess("tests.engine.replica:build_hanging", make_config(model_path), supervision)
        await process.engine.start()
        try:
            first, worker = process.engine.pid, await process.link()
            assert [o.finish_reason async for o in worker.generate(make_request([TRIGGER, 1]))] == [FinishReason.ERROR]
            await wait_until(lambda: process.engine.health().good and process.engine.pid not in (None, first))
            again = await process.link()
            assert [o.finish_reason async for o in again.generate(make_request())][-1] is FinishReason.LENGTH
        finally:
            await process.close()

    asyncio.run(run())


@pytest.mark.parametrize("num_sequences", [0, 17, 100_000])
def test_a_worker_that_asks_for_more_sequences_than_run_at_once_loses_its_channel(model_path: Path, num_sequences: int) -> None:
    async def run() -> None:
        process = EngineProcess("tests.engine.replica:build", make_config(model_path))
        await process.engine.start()
        try:
            liar, worker = await process.link(), await process.link()
            request = make_request(n=max(1, num_sequences))
            liar._send(
                Submit(msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, n=num_sequences)))
            )
            await wait_until(lambda: not liar.health().good)
            assert [o.finish_reason async for o in worker.generate(make_request())][-1] is FinishReason.LENGTH
            assert not process.heard or request.request_id not in {getattr(e, "request_id", None) for e in process.heard}
        finally:
            await process.close()

    asyncio.run(run())


def test_an_engine_that_was_not_reached_takes_no_request() -> None:
    info = ModelInfo(name="none", path="", max_model_len=8, vocab_size=8, eos_token_ids=())
    with pytest.raises(EngineError, match=NOT_STARTED):
        asyncio.run(complete(EngineClient(SealedWorkerTransport(Ready(info, [])), CONFIG), "a"))
