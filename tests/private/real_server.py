"""The server itself behind a node: the embedded model, its engine in a thread, under the profile of sealed nodes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from cloister.engine import EngineClient, ThreadTransport
from cloister.launch import build_engine
from cloister.policy import Gate, Policy
from cloister.server.app import create_app
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.step import StepPlan, StepResult


class RealServer:
    """Serves `cloister-5m` or the model of `settings`; the engine starts with the first request, on the loop that brings it."""

    def __init__(self, profile: str = "private", **settings: Any) -> None:
        settings = {"kv_memory_mb": 64, "max_model_len": 1024, **settings}
        config = EngineConfig(weights_cache="", profile=profile, num_threads=1, **settings)
        core = build_engine(config)
        self._run, self._steps_left, self._goes_on = core._runner.run, -1, threading.Event()
        self._goes_on.set()
        core._runner.run = self._run_or_stand_still  # type: ignore[method-assign]
        self._engine = EngineClient(ThreadTransport(core), config)
        path = Path(self._engine.model.path)
        gate = Gate(Policy(profile), None, loopback=False, reuses_prefixes=False, sealed=True)
        server = ServerConfig(host="sealed", page=False, log_requests=False)
        self._app = create_app(self._engine, Tokenizer(path), ChatTemplate.load(path), gate, server, prepare_timeout_s=300.0)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            await self._engine.start()
        await self._app(scope, receive, send)

    @contextlib.contextmanager
    def standing_still(self, *, after_steps: int) -> Iterator[None]:
        """Has the engine stand still after so many steps, until the block ends."""
        self._goes_on.clear()
        self._steps_left = after_steps
        try:
            yield
        finally:
            self._steps_left = -1
            self._goes_on.set()

    def _run_or_stand_still(self, plan: StepPlan) -> StepResult:
        if self._steps_left == 0:
            self._goes_on.wait(300)
        elif self._steps_left > 0:
            self._steps_left -= 1
        return self._run(plan)

    def close(self) -> None:
        """Ends the engine; while the loop that it started on still runs."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._engine.drain(0.0), self._loop).result(300)
