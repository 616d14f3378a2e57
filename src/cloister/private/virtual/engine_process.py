"""The process of an engine of a sealed node, and the node's client of it, in virtual time. Channels of workers, and what they
may say, are those of production (`engine.sealed_channels`)."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import Any, Final

from cloister.cluster.link import TIMER_ERROR_S
from cloister.cluster.virtual.engine import VirtualEngine
from cloister.engine.channel import InputQueue
from cloister.engine.sealed_channels import SealedChannels, open_listener
from cloister.engine.supervision import Supervision
from cloister.engine.transports import LOST, Deliver
from cloister.private.virtual.event_loop import on_clock
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import FrontMessage, Outputs, Ready

NUM_OWN: Final = 2
"""Sockets that the channels of an engine watch without a worker: their listener, and what wakes them."""


class _WaitsError(Exception):
    """A thread would wait for its sockets now."""


class _OneTurn:
    """The selector of a thread that runs in turns: where it would wait, its turn is over.

    Attributes:
        timeout_s: for how long it would wait; None: until something comes.
        has_waited: it has waited for so long.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.timeout_s: float | None = None
        self.has_waited = False
        self._selector = selector

    def select(self, timeout: float | None = None) -> list[Any]:
        ready: list[Any] = self._selector.select(0)
        if ready or self.has_waited:
            self.has_waited = False
            return ready
        self.timeout_s = timeout
        raise _WaitsError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


class _WakingQueue(InputQueue):
    """An engine's queue of messages, which wakes its task."""

    def __init__(self, wake: Callable[[], None], note: Callable[[FrontMessage], None]) -> None:
        super().__init__()
        self._wake, self._note = wake, note

    def put(self, message: FrontMessage) -> None:
        self._note(message)
        super().put(message)
        self._wake()

    def wake(self) -> None:
        super().wake()
        self._wake()


class UnitEngineProcess:
    """The process of an engine: runs its steps, and the thread that reads the channels of workers.

    Args:
        listener: the engine's end; it is closed here.
        note: called with each message that it is sent.

    Attributes:
        said: what it has told its front, which takes it away.
        has_spoken: set when there is something, or it has ended.
        has_ended: it has.
        hangs_until_s: it makes no step before.
    """

    def __init__(
        self, engine: VirtualEngine, listener: socket.socket, max_num_seqs: int, note: Callable[[FrontMessage], None]
    ) -> None:
        self.engine = engine
        self.said: list[Outputs] = []
        self.has_spoken = asyncio.Event()
        self.has_ended = False
        self.hangs_until_s = 0.0
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        engine.core.input_queue = _WakingQueue(self._woken.set, note)
        self.channels = SealedChannels(listener, engine.core.input_queue, max_num_seqs)
        self._turn = _OneTurn(self.channels._selector)
        self.channels._selector = self._turn  # type: ignore[assignment]
        self._descriptor: int = self._turn._selector.fileno()  # type: ignore[attr-defined]
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._descriptor, self._read_channels)
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._note_end)

    @property
    def num_channels(self) -> int:
        """Channels of workers that are open."""
        return 0 if self.has_ended else len(self._turn.get_map()) - NUM_OWN

    def end(self) -> None:
        """Ends at once, as SIGKILL does."""
        if self.has_ended:
            return
        self.has_ended = True
        self.task.cancel()
        self._loop.remove_reader(self._descriptor)
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self._turn.get_map().values()):
            key.fileobj.close()
        self._turn.close()
        self.channels._wake_sender.close()
        if self.channels._keys is not None:
            self.channels._keys.clear()
        self.engine.leave_pool()
        self.has_spoken.set()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self.end()
        if not task.cancelled():
            task.exception()  # it ends after too many steps failed, or is killed; that is no error of the loop

    def _read_channels(self) -> None:
        if self.has_ended:
            return
        with contextlib.suppress(_WaitsError), on_clock(self._loop):
            self.channels.run()
            self._loop.remove_reader(self._descriptor)  # its front has closed the listener, so the thread ends
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._turn.timeout_s is None else self._loop.call_later(self._turn.timeout_s, self._wake_reader)

    def _wake_reader(self) -> None:
        self._turn.has_waited = True
        self._read_channels()

    def _send(self, outputs: Outputs) -> None:
        if not self.has_ended:
            self.said.append(self.channels.deliver(outputs))
            self.has_spoken.set()

    async def _run(self) -> None:
        core, clock = self.engine.core, self.engine.clock
        while not core.is_done:
            while self._loop.time() < self.hangs_until_s:
                await asyncio.sleep(self.hangs_until_s - self._loop.time())
            self._woken.clear()
            outputs = core.step(self._send)
            if clock.ahead_s:
                took_s, clock.ahead_s = clock.ahead_s, 0.0
                await asyncio.sleep(took_s)
            if outputs is not None:
                self._send(outputs)
            elif not core.is_done:
                timer = self._loop.call_later(max(core.patience_s(), TIMER_ERROR_S), self._woken.set)
                await self._woken.wait()
                timer.cancel()
                if core.waits_for_others:
                    self._send(Outputs([], []))


class UnitTransport:
    """A front's transport to the process of an engine (protocol `engine.transports.Transport`), which it starts.

    Args:
        make: makes an engine.
        keep_listener: takes the front's end of its listener over.
        note: called with each message that an engine is sent.

    Attributes:
        process: the engine that runs; None if there is none.
        refuses_starts: so many of the next engines cannot start.
        num_starts: engines that were started.
    """

    lost = LOST
    pid = None

    def __init__(
        self,
        make: Callable[[], VirtualEngine],
        keep_listener: Callable[[socket.socket], None],
        note: Callable[[FrontMessage], None],
        supervision: Supervision,
        start_s: float,
    ) -> None:
        self.ready: Ready | None = None
        self.supervision: Supervision | None = supervision
        self.process: UnitEngineProcess | None = None
        self.refuses_starts = self.num_starts = 0
        self._make, self._keep_listener, self._note, self._start_s = make, keep_listener, note, start_s

    async def open(self, config: EngineConfig) -> None:
        """Starts an engine. Raises EngineError if it cannot start."""
        await asyncio.sleep(self._start_s)
        self.num_starts += 1
        if self.refuses_starts:
            self.refuses_starts -= 1
            raise EngineError("the engine was to refuse to start")
        near, far = open_listener()
        self.process = UnitEngineProcess(self._make(), far, config.max_num_seqs, self._note)
        core = self.process.engine.core
        self.ready = Ready(core.model, core.memory, core.adapters.loaded, core.startup, core.kv_endpoint)
        self._keep_listener(near)

    def send(self, message: FrontMessage) -> None:
        if self.process is not None and not self.process.has_ended:
            self.process.engine.core.input_queue.put(message)

    async def run(self, deliver: Deliver) -> None:
        process = self.process
        while process is not None:
            said, process.said = process.said, []
            for message in said:
                deliver(message)
            if process.has_ended:
                return
            process.has_spoken.clear()
            await process.has_spoken.wait()

    def kill(self) -> None:
        if self.process is not None:
            self.process.end()

    async def close(self) -> str | None:
        self.kill()
        self.process = None
        return "the process ended"

    async def discard_template(self, *, is_final: bool = False) -> None:
        """There is none."""
