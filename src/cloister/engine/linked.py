"""An engine as one worker sees it: through a channel of its own, for as long as its request takes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

import msgspec

from cloister.engine import channel
from cloister.engine.adapter_calls import AdapterCalls
from cloister.engine.base import EventListener, Health
from cloister.engine.desk import Desk
from cloister.types.clock import WallClock
from cloister.types.config import EngineConfig
from cloister.types.events import FrontMessage, Outputs, Ready
from cloister.types.request import Request, SequenceOutput

NOT_LINKED = "the engine has not been reached"
GONE = "the engine stopped while it held this request; send it again"
_LIMIT_BYTES = 2**20


class LinkedEngine:
    """An AsyncEngine behind a socket that somebody else opened.

    Args:
        ready: what the engine said of itself when it started.
        config: its settings.
    """

    def __init__(self, ready: Ready, config: EngineConfig) -> None:
        self.model, self.memory, self.startup = ready.model, ready.memory, ready.startup
        self.adapters = AdapterCalls(self._send)
        self.adapters.start(ready.adapters)
        self._desk = Desk(self._send, WallClock(), max_waiting=config.max_waiting, max_num_seqs=config.max_num_seqs)
        self._desk.closed = NOT_LINKED
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    async def attach(self, sock: socket.socket) -> None:
        """Takes the channel. Called once, on the event loop that requests will be made on."""
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=_LIMIT_BYTES)
        self._listener = asyncio.create_task(self._listen(reader), name="engine channel")
        self._desk.closed = None

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        return self._desk.generate(request)

    def subscribe(self, listener: EventListener) -> None:
        self._desk.subscribe(listener)

    def health(self) -> Health:
        return Health(self._desk.closed is None, self._desk.closed or "the engine is reached")

    async def drain(self, timeout_s: float) -> None:
        """Lets go of the channel; the engine itself is not this process's."""
        if self._writer is not None:
            self._writer.close()

    def _send(self, message: FrontMessage) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(channel.frame(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await channel.receive(reader)) is not None:
                message = channel.decode_engine(frame)
                if isinstance(message, Outputs):
                    self._desk.deliver(message)
        except (channel.ChannelError, msgspec.MsgspecError):
            pass
        finally:
            self._desk.closed = GONE
            self._desk.fail_all(GONE)
