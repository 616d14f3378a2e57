"""Ratchet: Python calls that a streamed token costs the front, from the engine's message to the server's `send`.

What the web server below (uvicorn, h11) and the kernel do with the bytes is not counted. How to lower it: as in `test_step`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
from starlette.types import ASGIApp, Message

from cloister.engine import EngineClient
from cloister.server.app import create_app
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.events import Arrived, Event, Outputs, Progressed, Scheduled, Stepped, Submit
from cloister.types.request import Request, SequenceOutput
from tests.engine.fake_transport import FakeTransport
from tests.server.running_server import INFO, make_gate, write_model

NUM_STEPS = 32
NUM_STREAMS = 16
LIMITS = {"/v1/chat/completions": 58, "/v1/completions": 58}
"""Python calls per token."""
FIELDS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


class SpokenEngine(FakeTransport):
    """An engine that says what the test tells it to: `speak` is one step of every request."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.client = EngineClient(self, EngineConfig(max_waiting=NUM_STREAMS, max_num_seqs=NUM_STREAMS))

    @property
    def requests(self) -> list[Request]:
        return [message.request for message in self.sent if isinstance(message, Submit)]

    def start(self) -> None:
        events: list[Event] = [Arrived(request.request_id, 0.0, 5) for request in self.requests]
        events += [Scheduled(request.request_id, 0.0, 0.0, 0, 5) for request in self.requests]
        self.client.receive(Outputs([], events))

    def speak(self, number: int) -> None:
        events: list[Event] = [Progressed(r.request_id, i, 0, float(number), 1, False) for i, r in enumerate(self.requests)]
        events.append(Stepped(float(number), 0.01, NUM_STREAMS, NUM_STREAMS, NUM_STREAMS, 0, 99, 9, 999))
        outputs = [
            SequenceOutput(request_id=r.request_id, index=0, text=" word", token_ids=[7], num_output_tokens=number)
            for r in self.requests
        ]
        self.client.receive(Outputs(outputs, events))


@dataclass
class Client:
    """One ASGI connection that reads a stream."""

    app: ASGIApp
    path: str
    num_sent: int = 0

    async def run(self) -> None:
        fields = {"model": INFO.name, "stream": True, "max_tokens": 200, **FIELDS[self.path]}
        body: list[Message] = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]
        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": headers, "query_string": b""}

        async def receive() -> Message:
            if body:
                return body.pop()
            return await asyncio.Future[Message]()

        async def send(message: Message) -> None:
            assert message.get("status", 200) == 200, message
            self.num_sent += 1

        await self.app(scope, receive, send)


async def count_calls(path: str, model_path: Path) -> float:
    """Returns Python calls per token while every stream gets one token a step."""
    engine = SpokenEngine()
    await engine.client.start()
    app = create_app(
        engine.client, Tokenizer(model_path), ChatTemplate.load(model_path), make_gate(), ServerConfig(log_requests=True)
    )
    clients = [Client(app, path) for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(client.run()) for client in clients]

    async def speak(first: int) -> None:
        for number in range(first, first + NUM_STEPS):
            num_sent = clients[-1].num_sent
            engine.speak(number)
            while clients[-1].num_sent == num_sent:
                await asyncio.sleep(0)

    while len(engine.requests) < NUM_STREAMS:
        await asyncio.sleep(0.001)
    engine.start()
    await speak(1)
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, what: object) -> None:
        calls[event] += 1

    before = [client.num_sent for client in clients]
    gc.collect()
    gc.disable()  # finalisers of what other tests left would be counted
    sys.setprofile(note)
    try:
        await speak(1 + NUM_STEPS)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert [client.num_sent - num for client, num in zip(clients, before, strict=True)] == [NUM_STEPS] * NUM_STREAMS
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return calls["call"] / (NUM_STEPS * NUM_STREAMS)


@pytest.mark.parametrize("path", LIMITS)
def test_a_streamed_token_costs_the_front_no_more_than_it_did(path: str, tmp_path: Path) -> None:
    model_path = write_model(tmp_path)
    found = asyncio.run(asyncio.wait_for(count_calls(path, model_path), 300.0))
    assert found <= LIMITS[path], f"{path}: Python calls per token rose to {found}"
