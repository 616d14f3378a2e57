"""Transport of a front to an engine on another machine, over a link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from cloister.cluster.link import Link, decode_frame, encode_frame
from cloister.cluster.virtual.processors import FrontThread
from cloister.cluster.virtual.replica import Host
from cloister.engine import channel
from cloister.engine.supervision import Supervision
from cloister.engine.transports import LOST, Deliver
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import EngineMessage, FrontMessage, Outputs, Ready, Submit

CONNECT_S: Final = 6.0
"""Longest wait of a front for an engine to be there and describe itself."""


class LinkTransport:
    """Transport to an engine on another machine over a link (protocol `engine.transports.Transport`).

    Args:
        owns_engine: the engine ends with the client of this transport; else it waits for the next front.
        thread: the front's, which takes time for what it sends and receives; None: it takes none.
    """

    lost = LOST
    pid = None

    def __init__(
        self,
        host: Host,
        draw: random.Random,
        supervision: Supervision,
        amend: Callable[[FrontMessage], list[FrontMessage]] = lambda message: [message],
        *,
        owns_engine: bool = False,
        thread: FrontThread | None = None,
    ) -> None:
        self.ready: Ready | None = None
        self.supervision: Supervision | None = supervision
        self._host, self._draw, self._amend, self._owns_engine = host, draw, amend, owns_engine
        self._thread = thread
        self._session = 0
        self._is_crashed = False
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._received: list[EngineMessage] = []
        self._loop: asyncio.AbstractEventLoop

    async def open(self, config: EngineConfig) -> None:
        """Connects to the engine, which is started if it does not run. Raises EngineError if it is not ready in time."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._host.start(config.lora)
                self._connect()
                while not self._received:
                    if self._link is None or self._link.is_lost:
                        raise EngineError("the engine cannot be reached")
                    await self._wait()
        except TimeoutError as error:
            self.kill()  # it hangs, or is out of reach and will find that its front is gone
            await self.close()
            raise EngineError("the engine did not answer in time") from error
        except EngineError:
            await self.close()
            raise
        match self._received.pop(0):
            case Ready() as ready:
                self.ready = ready
            case _:
                await self.close()
                raise EngineError("the engine sent something else before it described itself")

    def send(self, message: FrontMessage) -> None:
        """Sends a message; with a thread, when that has done its work for it and for all before."""
        link = self._link
        if link is None:
            return
        if self._thread is None:
            self._put(message, link)
        else:
            work_s = self._thread.costs.request_s if isinstance(message, Submit) else 0.0
            self._thread.do(work_s).add_done_callback(lambda _: self._put(message, link))

    def _put(self, message: FrontMessage, link: Link) -> None:
        if link is self._link:  # else what the message was for has ended
            for each in self._amend(message):
                link.send(channel.encode(each))
            self._poll()

    async def run(self, deliver: Deliver) -> None:
        """Dispatches messages until the link is lost."""
        while self._link is not None:
            received, self._received = self._received, []
            for message in received:
                if isinstance(message, Outputs):
                    if self._thread is not None:
                        costs = self._thread.costs
                        num_tokens = sum(len(output.token_ids) for output in message.outputs)
                        await self._thread.do(costs.message_s + costs.token_s * num_tokens)
                    deliver(message)
            if self._link.is_lost:
                return
            if not self._received:
                await self._wait()

    def kill(self) -> None:
        """Kills the engine, and waits for no reply."""
        if self._is_crashed:
            return
        self._host.kill()
        if self._link is not None:
            self._link.is_lost = True
            self._changed.set()

    def crash(self) -> None:
        """Ends the front's side at once, as SIGKILL of the front does: the engine hears nothing of it."""
        self._is_crashed, self._link = True, None
        self._host.listen(self._session, None)
        if self._timer is not None:
            self._timer.cancel()

    async def close(self) -> str | None:
        """Ends the session; the engine keeps running, and aborts its requests."""
        if self._link is None:
            return None
        self._host.send(self._session, encode_frame(self._link.reset()))
        self._host.listen(self._session, None)
        if self._timer is not None:
            self._timer.cancel()
        self._link = None
        self._received.clear()
        return "the link to it was lost"

    async def discard_template(self, *, is_final: bool = False) -> None:
        """Ends the engine if it was this client's; one that belongs to its own machine stays."""
        if is_final and self._owns_engine and not self._is_crashed:
            self._host.kill()

    def _connect(self) -> None:
        self._session = self._draw.getrandbits(62)
        self._received.clear()
        self._link = Link(self._session, self._loop.time(), times=self._host.times)
        self._host.listen(self._session, self._receive)
        self._poll()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _receive(self, data: bytes) -> None:
        if self._link is not None:
            self._received += [
                channel.decode_engine(payload) for payload in self._link.receive(decode_frame(data), self._loop.time())
            ]
            self._poll()
            self._changed.set()

    def _poll(self) -> None:
        if self._link is None:
            return
        for frame in self._link.poll(self._loop.time()):
            self._host.send(self._session, encode_frame(frame))
        if self._timer is not None:
            self._timer.cancel()
        if self._link.is_lost:
            self._changed.set()
        else:
            self._timer = self._loop.call_at(self._link.next_poll_s, self._poll)
