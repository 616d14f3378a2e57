"""A whole server for tests: uvicorn on a free port, in a thread, in front of a real engine or a scripted one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.engine import EngineClient, Health, ThreadTransport
from cloister.engine.in_flight import RequestObserver
from cloister.policy import Credentials, Gate, Policy
from cloister.server.app import create_app
from cloister.server.serve import Server, ServerApp, address_of, bind
from cloister.server.tls import Certificate
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.request import FinishReason, ModelInfo, Request, SequenceOutput
from tests.engine.fake_transport import FakeTransport
from tests.engine.replica import MAX_MODEL_LEN, VOCAB_SIZE, SpeakingRunner, SteppedRunner, make_config, make_replica

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
MODEL = "history"
INFO = ModelInfo(
    name=MODEL,
    path="",
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(256,),
    defaults={"temperature": 0.25, "top_k": 7},
    fingerprint="fp_test",
    created_s=1_700_000_000,
)


def write_model(path: Path) -> Path:
    """Writes a tokenizer of one token per byte, and a chat template."""
    write_byte_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class ScriptedEngine(EngineClient):
    """The client of an engine that plays a script: for each request a list of outputs, delays, or an error to raise.

    Attributes:
        script: what happens to a request; a float is a pause in seconds, an Event is waited for, an Exception is raised.
        taken: every request that was submitted.
        left: ids of requests whose iterator was closed before its end.
    """

    def __init__(
        self,
        script: Callable[[Request], Sequence[SequenceOutput | float | threading.Event | Exception]],
        good: bool = True,
        model: ModelInfo = INFO,
    ) -> None:
        super().__init__(FakeTransport(model), EngineConfig())
        self.script = script
        self.good = good
        self.taken: list[Request] = []
        self.left: list[str] = []
        self.ended = threading.Event()

    async def generate(
        self, request: Request, observer: RequestObserver | None = None, *, in_batches: bool = False
    ) -> AsyncGenerator[SequenceOutput, None]:
        self.taken.append(request)
        complete = False
        try:
            for item in self.script(request):
                if isinstance(item, Exception):
                    if observer is not None:
                        observer.refuse()
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                elif isinstance(item, threading.Event):
                    while not item.is_set():
                        await asyncio.sleep(0.005)
                else:
                    yield item
            complete = True
        finally:
            if not complete:
                self.left.append(request.request_id)
            self.ended.set()

    def health(self) -> Health:
        return Health(self.good, "scripted")

    async def drain(self, timeout_s: float) -> None:
        self.good = False


def output(
    request: Request, text: str = "", *, index: int = 0, end: FinishReason | None = None, **more: object
) -> SequenceOutput:
    tokens = {"token_ids": list(text.encode()), "num_prompt_tokens": len(request.token_ids), **more}
    return SequenceOutput(request_id=request.request_id, index=index, text=text, finish_reason=end, **tokens)


def says(text: str) -> Callable[[Request], list[SequenceOutput | float | Exception]]:
    """A script in which every sequence gets a text, letter by letter."""

    def script(request: Request) -> list[SequenceOutput | float | Exception]:
        letters = [output(request, letter, index=i) for letter in text for i in range(request.sampling.n)]
        return [*letters, *(output(request, index=i, end=FinishReason.STOP) for i in range(request.sampling.n))]

    return script


def endless(request: Request) -> Iterator[SequenceOutput | float]:
    """A script without an end."""
    while True:
        yield output(request, "a")
        yield 0.01


async def start_speaking(path: Path, speech: str = "Größe: 5 €. ") -> EngineClient:
    """Starts a real engine whose every sequence says the same."""
    engine = EngineClient(ThreadTransport(make_replica(path, SpeakingRunner(speech)).core), make_config(path))
    await engine.start()
    return engine


async def start_slow(path: Path) -> EngineClient:
    """Starts a real engine whose steps take their time."""
    core = make_replica(path, wrap=lambda runner: SteppedRunner(runner, step_s=0.1)).core
    engine = EngineClient(ThreadTransport(core), make_config(path))
    await engine.start()
    return engine


async def start_thinking(path: Path) -> EngineClient:
    """Starts a real engine with a real runner and a tiny program."""
    engine = EngineClient(ThreadTransport(make_replica(path).core), make_config(path))
    await engine.start()
    return engine


@dataclass
class RunningServer:
    """A server that runs in a thread.

    Attributes:
        uvicorn: what runs its event loop.
    """

    url: str
    engine: EngineClient
    uvicorn: Server


def make_gate(profile: str = "open", credentials: Credentials | None = None) -> Gate:
    return Gate(Policy(profile), credentials, loopback=True)


@contextmanager
def running(open_app: Callable[[], AbstractAsyncContextManager[ServerApp]], config: ServerConfig) -> Iterator[RunningServer]:
    """Serves while the block runs what `open_app` makes, and closes, in the event loop of the server."""
    ready: list[RunningServer] = []
    started = threading.Event()

    async def main() -> None:
        async with open_app() as app:
            with bind(config.host, 0) as listener:
                certificate = Certificate.of(config)
                server = Server(app, config, certificate)
                ready.append(RunningServer(address_of(listener, has_tls=certificate is not None), app.engine, server))
                started.set()
                await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    give_up_s = time.monotonic() + 300
    while not started.wait(0.1):
        assert thread.is_alive(), "the server did not start: its thread has ended, with what pytest says of it"
        assert time.monotonic() < give_up_s, "the server did not start within 300 s"
    try:
        yield ready[0]
    finally:
        ready[0].uvicorn.should_exit = True
        thread.join(300)
        assert not thread.is_alive(), "the server does not stop"


@contextmanager
def serving(
    path: Path,
    start: Callable[[], Awaitable[EngineClient]],
    *,
    gate: Gate | None = None,
    config: ServerConfig | None = None,
    **options: float,
) -> Iterator[RunningServer]:
    """Serves an engine while the block runs."""
    config = config or ServerConfig(port=0, drain_timeout_s=1.0)
    options = {"prepare_timeout_s": 300.0, **options}  # a busy machine may read for longer than a server has time for

    @asynccontextmanager
    async def open_app() -> AsyncIterator[ServerApp]:
        engine = await start()
        yield ServerApp(
            create_app(engine, Tokenizer(path), ChatTemplate.load(path), gate or make_gate(), config, **options), engine
        )

    with running(open_app, config) as server:
        yield server


async def _return(engine: EngineClient) -> EngineClient:
    return engine


@contextmanager
def serving_script(path: Path, engine: ScriptedEngine, **options: object) -> Iterator[RunningServer]:
    """Serves a scripted engine."""
    with serving(path, lambda: _return(engine), **options) as server:
        yield server
