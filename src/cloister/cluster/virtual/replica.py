"""The machines of a virtual cluster: each runs the process of one engine, which serves one front at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from cloister.cluster.link import RESET, TIMER_ERROR_S, Link, LinkFrame, LinkServer, LinkTimes, decode_frame, encode_frame
from cloister.cluster.virtual.engine import VirtualEngine
from cloister.cluster.virtual.kv_links import KVSwitch, VirtualKVLinks
from cloister.cluster.virtual.network import VirtualNetwork
from cloister.cluster.virtual.processors import Processors
from cloister.engine import channel
from cloister.engine.channel import InputQueue
from cloister.engine.engine_process import NICENESS
from cloister.kv import KVFormat
from cloister.types.errors import EngineError
from cloister.types.events import Abort, CancelPrefetch, EngineMessage, Outputs, Ready


class _WakingQueue(InputQueue):
    """An engine's queue of messages: who wakes the engine wakes its task."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def wake(self) -> None:
        super().wake()
        self._wake()


class VirtualProcess:
    """The process of an engine: runs its steps, and serves one front at a time.

    A front that connects gets a description of the engine as soon as all requests and loads of the front before it have ended,
    so it hears of nothing that it has not asked for. (A real engine ends with its front.)

    Args:
        send: sends a datagram to the fronts.
        processors: the cores that it shares with others; None: it has one of its own.
    """

    def __init__(
        self,
        engine: VirtualEngine,
        send: Callable[[bytes], None],
        draw: random.Random,
        times: LinkTimes,
        processors: Processors | None = None,
    ) -> None:
        self.engine = engine
        engine.core.input_queue = _WakingQueue(lambda: self._woken.set())
        self.kv_links: VirtualKVLinks | None = None
        self.hangs_until_s = 0.0
        self._send_datagram = send
        self._processors = processors
        self._server = LinkServer(lambda: 1 + draw.getrandbits(62), times)
        self._link: Link | None = None
        self._is_told = True
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_gone = False
        self._beside: set[asyncio.Task[None]] = set()
        self._interpreter = asyncio.Lock()
        self.task = asyncio.create_task(self._run())

    def receive(self, data: bytes) -> None:
        """Takes a datagram of a front."""
        messages, replies = self._server.receive(decode_frame(data), self._loop.time())
        for reply in replies:
            self._send_datagram(encode_frame(reply))
        core, is_new = self.engine.core, self._server.link is not self._link
        if is_new:
            self._leave_front()
            self._link, self._is_told = self._server.link, False
        for message in messages:
            core.input_queue.put(channel.decode_front(message))
        if messages or is_new or core.is_done:  # an acknowledgement is news for an engine that ends
            self._woken.set()
        self._poll()

    def exchange_kv(self, index: int, switch: KVSwitch) -> None:
        """Connects the engine to those of other replicas."""

        def make_links(form: KVFormat) -> VirtualKVLinks:
            self.kv_links = VirtualKVLinks(index, switch, form, costs=self.engine.links, work=self._work_beside)
            self.kv_links.on_news(self._woken.set)
            return self.kv_links

        self.engine.core.exchange_kv(make_links)

    def _work_beside(self, work_s: float, job: Callable[[], None]) -> None:
        """Does a job when a thread beside the steps, which is as nice as they are, has worked for so long. One of these threads
        works at a time, as in a real engine, where one thread at a time runs Python."""
        if not work_s:
            job()
            return
        thread = asyncio.create_task(self._run_beside(work_s, job))
        self._beside.add(thread)
        thread.add_done_callback(self._beside.discard)

    async def _run_beside(self, work_s: float, job: Callable[[], None]) -> None:
        async with self._interpreter:
            await self._spend(work_s)
        job()

    async def _spend(self, work_s: float) -> None:
        """Waits until the calling thread of this process has worked for `work_s`."""
        await (asyncio.sleep(work_s) if self._processors is None else self._processors.run(work_s, NICENESS))

    def end(self) -> None:
        """Ends at once, as SIGKILL does."""
        if not self._is_gone:
            self.engine.leave_pool()
        self._is_gone = True
        if self.kv_links is not None:
            self.kv_links.close()
        for task in (self.task, *self._beside):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def has_front(self) -> bool:
        """Whether a front is connected."""
        return self._link is not None and not self._link.is_lost

    def _leave_front(self) -> None:
        """Aborts what the last front submitted, and what it had loaded for requests that have not come."""
        queue, scheduler = self.engine.core.input_queue, self.engine.scheduler
        queue.take()  # what it has not admitted, it never will
        for request_id in scheduler.requests:
            queue.put(Abort(request_id))
        for request_id in scheduler.kv_loads.loading:
            queue.put(CancelPrefetch(request_id))

    def _poll(self) -> None:
        if self._link is None or self._is_gone:
            return
        for frame in self._link.poll(self._loop.time()):
            self._send_datagram(encode_frame(frame))
        if self._timer is not None:
            self._timer.cancel()
        if self._link.is_lost:
            self._leave_front()
            self._link = None
            self._woken.set()
        else:
            self._timer = self._loop.call_at(self._link.next_poll_s, self._poll)

    def _send(self, link: Link | None, message: EngineMessage) -> None:
        if link is not None and link is self._link:
            link.send(channel.encode(message))
            self._poll()

    async def _run(self) -> None:
        core, clock = self.engine.core, self.engine.clock
        while not core.is_done or (self._link is not None and self._link.has_unread):  # what it said last must arrive
            while self._loop.time() < self.hangs_until_s:
                await asyncio.sleep(self.hangs_until_s - self._loop.time())
            self._describe()
            self._woken.clear()
            link = self._link if self._is_told else None
            outputs = core.step(lambda early, link=link: self._send(link, early))  # type: ignore[misc]
            if clock.ahead_s:
                took_s, clock.ahead_s = clock.ahead_s, 0.0
                await self._spend(took_s)
            if outputs is not None:
                self._send(link, outputs)
            elif core.is_done:
                await self._woken.wait()
            else:
                await self._wait(link)

    async def _wait(self, link: Link | None) -> None:
        """Waits for news, as long as the engine can; one that waits for others shows that it lives."""
        core = self.engine.core
        # a shorter wait may run out before its time, again and again
        timer = self._loop.call_later(max(core.patience_s(), TIMER_ERROR_S), self._woken.set)
        await self._woken.wait()
        timer.cancel()
        if core.waits_for_others:
            self._send(link, Outputs([], []))

    def _describe(self) -> None:
        """Describes the engine to a new front, once the requests and loads of the last one have ended."""
        scheduler = self.engine.scheduler
        if not (self._is_told or scheduler.requests or len(scheduler.kv_loads)):
            core = self.engine.core
            self._is_told = True
            self._send(self._link, Ready(core.model, core.memory, core.adapters.loaded, core.startup, core.kv_endpoint))


class Host:
    """A machine that runs the engine of one replica.

    Args:
        index: a number of its own, from 0: of the replica, or of one that an update has brought.
        make: makes an engine.
        switch: connects it to the engines of other replicas; None: it exchanges no KV.
        processors: as of its `VirtualProcess`.

    Attributes:
        index: as above.
        process: the engine that runs; None if there is none.
        refuses_starts: number of next engines that cannot start.
        num_starts: engines that were started.
        lora: the adapters with which the last one was started (setting `lora`); None: those of its shape.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[], VirtualEngine],
        network: VirtualNetwork,
        draw: random.Random,
        *,
        start_s: float,
        times: LinkTimes,
        switch: KVSwitch | None = None,
        processors: Processors | None = None,
    ) -> None:
        self.process: VirtualProcess | None = None
        self.refuses_starts = 0
        self.num_starts = 0
        self.lora: str | None = None
        self.times = times
        self.index, self._make, self._network, self._draw, self._start_s = index, make, network, draw, start_s
        self._switch, self._processors = switch, processors
        self._fronts: dict[int, Callable[[bytes], None]] = {}

    async def start(self, lora: str | None = None) -> None:
        """Starts an engine with these adapters if none runs. Raises EngineError if it cannot start."""
        await asyncio.sleep(self._start_s)
        if self.process is not None:
            return
        self.num_starts += 1
        self.lora = lora or ""
        if self.refuses_starts:
            self.refuses_starts -= 1
            raise EngineError("the engine was to refuse to start")
        self.process = VirtualProcess(self._make(), self._reply, self._draw, self.times, self._processors)
        if self._switch is not None:
            self.process.exchange_kv(self.index, self._switch)
        self.process.task.add_done_callback(self._note_end)

    def kill(self) -> None:
        """Kills the engine."""
        if self.process is not None:
            self.process.end()
            self.process = None

    def send(self, session: int, data: bytes) -> None:
        """Sends a front's datagram to the engine."""
        self._network.send(self.index, True, data, self._arrive)

    def listen(self, session: int, receive: Callable[[bytes], None] | None) -> None:
        """Registers what takes the datagrams of a session; None: nothing does any more."""
        if receive is None:
            self._fronts.pop(session, None)
        else:
            self._fronts[session] = receive

    def _arrive(self, data: bytes) -> None:
        if self.process is not None:
            self.process.receive(data)
        elif (frame := decode_frame(data)).number >= 0:
            self._reply(
                encode_frame(LinkFrame(frame.session, frame.token, RESET))
            )  # as the kernel answers for a port without a server

    def _reply(self, data: bytes) -> None:
        self._network.send(self.index, False, data, self._come_back)

    def _come_back(self, data: bytes) -> None:
        receive = self._fronts.get(decode_frame(data).session)
        if receive is not None:
            receive(data)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if self.process is not None and self.process.task is task:
            self.process.end()
            self.process = None
        if not task.cancelled():
            task.exception()  # an engine ends after too many steps failed, or is killed; that is no error of the loop
