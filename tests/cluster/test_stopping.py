"""A set of replicas that is stopped lets its requests end, also those that must go on in another engine first."""

from __future__ import annotations

import asyncio

import pytest

from cloister.cluster import ReplicaSet
from cloister.cluster.replica_states import ClusterConfig
from cloister.engine import EngineClient, Supervision
from cloister.engine.transports import Deliver
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import (
    Arrived,
    Ended,
    FrontMessage,
    Outputs,
    PrefillDone,
    Progressed,
    Ready,
    Scheduled,
    Shutdown,
    Submit,
)
from cloister.types.request import FinishReason, SequenceOutput
from tests.cluster.test_rolling_update import make_router
from tests.engine.fake_transport import MODEL, FakeTransport
from tests.engine.replica import make_request
from tests.engine.test_process import until


class IdleEngine(FakeTransport):
    """An engine that ends as soon as it is told to, as it has no request then."""

    supervision = Supervision()

    def __init__(self, index: int) -> None:
        super().__init__()
        self.ready = Ready(MODEL, [], kv_endpoint=f"unix:{index}")

    async def open(self, config: EngineConfig) -> None:
        self.ended = asyncio.Event()

    def send(self, message: FrontMessage) -> None:
        super().send(message)
        if isinstance(message, Shutdown):
            asyncio.get_running_loop().call_soon(self.ended.set)

    async def run(self, deliver: Deliver) -> None:
        self.deliver = deliver
        await self.ended.wait()

    def has(self, kind: type[FrontMessage]) -> bool:
        return any(isinstance(message, kind) for message in self.sent)


def test_a_request_whose_prompt_is_being_computed_goes_on_where_answers_do_although_the_server_stops() -> None:
    async def main() -> None:
        prefill, decode = engines = [IdleEngine(0), IdleEngine(1)]
        clients = [EngineClient(engine, EngineConfig()) for engine in engines]
        replicas = ReplicaSet(clients, make_router, ClusterConfig(("prefill", "decode")))
        await replicas.start()
        outputs: list[SequenceOutput] = []
        request = make_request(list(range(100)))
        name = request.request_id
        replicas.submit(request, outputs.append)
        stopping = asyncio.create_task(replicas.drain(60.0))
        await asyncio.sleep(0.2)
        assert [engine.has(Shutdown) for engine in engines] == [False, False], "it waits for the request"
        assert not replicas.health().good
        with pytest.raises(EngineError, match="shutting down"):
            replicas.submit(make_request([1, 2, 3]), outputs.append)
        events = [Arrived(name, 1.0, 100), Scheduled(name, 1.0, 0.0, 0, 100), Progressed(name, 1, 0, 1.0, 1, True)]
        first = SequenceOutput(request_id=name, index=0, token_ids=[7])
        prefill.deliver(Outputs([first], [*events, PrefillDone(name, 1.0, (1,), 0)]))
        await until(lambda: decode.has(Submit))
        last = SequenceOutput(request_id=name, index=0, token_ids=[8], finish_reason=FinishReason.STOP)
        decode.deliver(Outputs([last], [Ended(name, 1, 0, 2.0, FinishReason.STOP, 100, 2, 0, 1.0, 1.0, last=True)]))
        await asyncio.wait_for(stopping, 300.0)
        assert [token for output in outputs for token in output.token_ids] == [7, 8]
        assert outputs[-1].finish_reason is FinishReason.STOP

    asyncio.run(main())
