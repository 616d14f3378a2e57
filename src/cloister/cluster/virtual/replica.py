"""An engine on another machine, in virtual time: scheduler, runner and output processing around a program without weights."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers

from cloister.cluster.link import RESET, Frame, Link, LinkServer, LinkTimes, decode_frame, encode_frame
from cloister.cluster.virtual.history_program import HistoryProgram
from cloister.cluster.virtual.network import Network
from cloister.engine import channel
from cloister.engine.core import EngineCore
from cloister.engine.output_processor import OutputProcessor
from cloister.engine.supervision import Supervision
from cloister.engine.transports import LOST, Deliver
from cloister.executor import ModelRunner
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.text import Tokenizer
from cloister.types.clock import Clock
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import Abort, EngineMessage, FrontMessage, Outputs, Ready
from cloister.types.request import ModelInfo
from cloister.types.step import StepPlan, StepResult

EOS: Final = 256
VOCAB_SIZE: Final = 257
"""A token for each byte, and one that ends an answer."""
CONNECT_S: Final = 6.0
"""Longest wait of a front for an engine to be there and describe itself."""


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer with a token for each byte, whose id is the byte, and `<eos>`; returns the folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Encoder(models.BPE({letter: _byte_of(letter) for letter in letters}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _byte_of(letter: str) -> int:
    """GPT-2's byte-level alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    if ord(letter) < 0x100:
        return ord(letter)
    others = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b <= 0xFF)]
    return others[ord(letter) - 0x100]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of an engine, and the times of its steps.

    Attributes:
        step_s, token_s: a step takes `step_s` and `token_s` for each of its tokens.
        start_s: from the start of its process until it is ready.
    """

    num_blocks: int = 64
    block_size: int = 8
    max_num_seqs: int = 8
    max_waiting: int = 16
    max_model_len: int = 256
    max_batched_tokens: int = 64
    step_s: float = 0.01
    token_s: float = 0.0002
    start_s: float = 0.5


class EngineClock:
    """The clock of an engine: that of the event loop, and what the steps since then have taken."""

    def __init__(self, clock: Clock) -> None:
        self.ahead_s = 0.0
        self._clock = clock

    def now(self) -> float:
        return self._clock.now() + self.ahead_s


class TimedRunner:
    """Runs plans, and lets virtual time pass.

    Attributes:
        slowness: steps take so many times as long.
        num_failing: so many of the next steps fail.
    """

    def __init__(self, runner: ModelRunner, clock: EngineClock, shape: EngineShape) -> None:
        self.slowness = 1.0
        self.num_failing = 0
        self._runner, self._clock, self._shape = runner, clock, shape

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a plan (`engine.core.Runner`). Raises OSError if the step is to fail."""
        elapsed_s = self.slowness * (self._shape.step_s + self._shape.token_s * plan.num_tokens)
        self._clock.ahead_s += elapsed_s
        if self.num_failing:
            self.num_failing -= 1
            raise OSError("a step that was to fail")
        result = self._runner.run(plan)
        result.elapsed_s = elapsed_s
        return result


@dataclass
class VirtualEngine:
    """One engine and what it is made of."""

    core: EngineCore
    scheduler: Scheduler
    runner: TimedRunner
    clock: EngineClock


def make_engine(shape: EngineShape, tokenizer: Tokenizer, clock: Clock) -> VirtualEngine:
    """Returns an engine that computes nothing but which token follows."""
    model = ModelInfo(
        name="history",
        path="",
        max_model_len=shape.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        fingerprint="history",
    )
    own = EngineClock(clock)
    program = HistoryProgram(vocab_size=VOCAB_SIZE, num_blocks=shape.num_blocks, block_size=shape.block_size)
    runner = ModelRunner(program, vocab_size=VOCAB_SIZE, max_model_len=shape.max_model_len, block_size=shape.block_size)
    timed = TimedRunner(runner, own, shape)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=shape.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            budget=BudgetConfig(shape.max_batched_tokens),
            eos_token_ids=(EOS,),
        ),
        BlockPool(shape.num_blocks, shape.block_size),
        PrefixKeys(model.fingerprint, shape.block_size),
    )
    core = EngineCore(scheduler, timed, OutputProcessor(tokenizer, model), model=model, memory=[], clock=own)
    return VirtualEngine(core, scheduler, timed, own)


class VirtualProcess:
    """The process of an engine: runs its steps, and serves one front at a time.

    A front that connects gets a description of the engine as soon as all requests of the front before it have ended.

    Args:
        send: sends a datagram to the fronts.
    """

    def __init__(self, engine: VirtualEngine, send: Callable[[bytes], None], draw: random.Random, times: LinkTimes) -> None:
        self.engine = engine
        self.hangs_until_s = 0.0
        self._send_datagram = send
        self._server = LinkServer(lambda: 1 + draw.getrandbits(62), times)
        self._link: Link | None = None
        self._is_told = True
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_gone = False
        self.task = asyncio.create_task(self._run())

    def receive(self, data: bytes) -> None:
        """Takes a datagram of a front."""
        messages, replies = self._server.receive(decode_frame(data), self._loop.time())
        for reply in replies:
            self._send_datagram(encode_frame(reply))
        if self._server.link is not self._link:
            self._leave_front()
            self._link, self._is_told = self._server.link, False
        for message in messages:
            self.engine.core.input_queue.put(channel.decode_front(message))
        self._woken.set()
        self._poll()

    def end(self) -> None:
        """Ends at once, as SIGKILL does."""
        self._is_gone = True
        self.task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def has_front(self) -> bool:
        """Whether a front is connected."""
        return self._link is not None and not self._link.is_lost

    def _leave_front(self) -> None:
        """Aborts what the last front submitted."""
        queue = self.engine.core.input_queue
        queue.take()  # what it has not admitted, it never will
        for request_id in self.engine.scheduler.requests:
            queue.put(Abort(request_id))

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
                await asyncio.sleep(took_s)
            if outputs is not None:
                self._send(link, outputs)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), core.patience_s())

    def _describe(self) -> None:
        """Describes the engine to a new front, once the requests of the last one have ended."""
        if not (self._is_told or self.engine.scheduler.requests):
            core = self.engine.core
            self._is_told = True
            self._send(self._link, Ready(core.model, core.memory, core.adapters.loaded, core.startup))


class Host:
    """A machine that runs the engine of one replica.

    Args:
        index: of the replica.
        make: makes an engine.

    Attributes:
        process: the engine that runs; None if there is none.
        refuses_starts: so many of the next engines cannot start.
        num_starts: engines that were started.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[], VirtualEngine],
        network: Network,
        draw: random.Random,
        *,
        start_s: float,
        times: LinkTimes,
    ) -> None:
        self.process: VirtualProcess | None = None
        self.refuses_starts = 0
        self.num_starts = 0
        self.times = times
        self._index, self._make, self._network, self._draw, self._start_s = index, make, network, draw, start_s
        self._fronts: dict[int, Callable[[bytes], None]] = {}

    async def start(self) -> None:
        """Starts an engine if none runs. Raises EngineError if it cannot start."""
        await asyncio.sleep(self._start_s)
        if self.process is not None:
            return
        self.num_starts += 1
        if self.refuses_starts:
            self.refuses_starts -= 1
            raise EngineError("the engine was to refuse to start")
        self.process = VirtualProcess(self._make(), self._reply, self._draw, self.times)
        self.process.task.add_done_callback(self._note_end)

    def kill(self) -> None:
        """Kills the engine."""
        if self.process is not None:
            self.process.end()
            self.process = None

    def send(self, session: int, data: bytes) -> None:
        """Sends a front's datagram to the engine."""
        self._network.send(self._index, True, data, self._arrive)

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
                encode_frame(Frame(frame.session, frame.token, RESET))
            )  # as the kernel answers for a port without a server

    def _reply(self, data: bytes) -> None:
        self._network.send(self._index, False, data, self._come_back)

    def _come_back(self, data: bytes) -> None:
        receive = self._fronts.get(decode_frame(data).session)
        if receive is not None:
            receive(data)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if self.process is not None and self.process.task is task:
            self.process.end()
            self.process = None
        if not task.cancelled():
            task.exception()  # an engine ends after too many steps failed; that is no error of the loop


class LinkTransport:
    """Transport to an engine on another machine over a link (protocol `engine.transports.Transport`)."""

    lost = LOST
    pid = None

    def __init__(self, host: Host, draw: random.Random, supervision: Supervision) -> None:
        self.ready: Ready | None = None
        self.supervision: Supervision | None = supervision
        self._host, self._draw = host, draw
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
                await self._host.start()
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
        """Sends a message."""
        if self._link is not None:
            self._link.send(channel.encode(message))
            self._poll()

    async def run(self, deliver: Deliver) -> None:
        """Dispatches messages until the link is lost."""
        while self._link is not None:
            received, self._received = self._received, []
            for message in received:
                if isinstance(message, Outputs):
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
        """Ends the session; the engine goes on, and aborts its requests."""
        if self._link is None:
            return None
        self._host.send(self._session, encode_frame(self._link.reset()))
        self._host.listen(self._session, None)
        if self._timer is not None:
            self._timer.cancel()
        self._link = None
        self._received.clear()
        return "the link to it was lost"

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
