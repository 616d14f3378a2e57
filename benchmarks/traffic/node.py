"""A sealed node to be watched: the real server in front of a real engine, its answers shaped as a profile asks, sealed.

`python -m benchmarks.traffic.node PROFILE MODEL THREADS QUANT [DRAFTING]` prints its address and serves; 0 threads are all, and
DRAFTING is JSON: settings of drafters, and `silent` for the shape that the profile has where nothing drafts, drafts or not.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.traffic.recording import open_app
from cloister.private.node import NodeConfig, node_app
from cloister.private.program import run_program
from cloister.private.serving import Lifespan
from cloister.private.unsealing import LocalUnsealer
from cloister.trust.sealing import NODE_KEY_LIFE_S, KeyRing, Receiver, ReplayCache
from cloister.trust.shape import shape_of


class _Later:
    """An application that is there once the engine has started."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class _Life(Lifespan):
    def __init__(
        self, later: _Later, profile: str, model: str, num_threads: int | None, quant: str, drafting: dict[str, Any]
    ) -> None:
        super().__init__(None)
        self._later = later
        self._settings = (num_threads, model, profile, quant)
        self._drafting = drafting

    @asynccontextmanager
    async def __call__(self, app: Starlette) -> AsyncIterator[None]:
        self._later.app, engine = await open_app(*self._settings, **self._drafting)
        async with super().__call__(app):
            yield
        await engine.drain(1.0)


def main() -> int:
    profile, model, num_threads, quant = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    later = _Later()
    ring = KeyRing(time.monotonic())
    unsealer = LocalUnsealer(Receiver(ring, ReplayCache(NODE_KEY_LIFE_S)))
    drafting = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    shape = shape_of(profile, drafts=not drafting.pop("silent", False) and "speculate" in drafting)
    life = _Life(later, profile, model, num_threads or None, quant, drafting)
    app = node_app(later, NodeConfig(shape=shape), unsealer, life)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    return run_program(app, listener)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
