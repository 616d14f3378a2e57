"""A way to an engine that does nothing by itself: tests read what was sent, and say what the engine says."""

from __future__ import annotations

import asyncio

from cloister.engine import EngineClient, Supervision
from cloister.engine.transports import Deliver
from cloister.types.clock import Clock
from cloister.types.config import EngineConfig
from cloister.types.events import FrontMessage, Ready
from cloister.types.request import ModelInfo

MODEL = ModelInfo(name="fake", path="", max_model_len=256, vocab_size=257, eos_token_ids=(256,))


class FakeTransport:
    """A `Transport`.

    Attributes:
        sent: what the client said.
    """

    lost = "the engine died"
    pid = None
    supervision: Supervision | None = None

    def __init__(self, model: ModelInfo = MODEL) -> None:
        self.ready: Ready | None = Ready(model, [])
        self.sent: list[FrontMessage] = []

    async def open(self, config: EngineConfig) -> None:
        pass

    def send(self, message: FrontMessage) -> None:
        self.sent.append(message)

    async def run(self, deliver: Deliver) -> None:
        await asyncio.Event().wait()

    def kill(self) -> None:
        pass

    async def close(self) -> str | None:
        return None

    async def discard_template(self, *, is_final: bool = False) -> None:
        pass


def opened_client(transport: FakeTransport, clock: Clock | None = None, **settings: object) -> EngineClient:
    """Returns a client that takes requests, without an event loop."""
    client = EngineClient(transport, EngineConfig(**settings), clock=clock)  # type: ignore[arg-type]
    asyncio.run(client._open())
    return client
