"""Puts together what workers serve, in the zygote, before there is any request."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Final

from cloister.engine import EngineClient, WorkerTransport
from cloister.privacy import Gate, Policy, hardening, read_credentials
from cloister.privacy.sealing import NODE_KEY_LIFE_S, KeyRing, Receiver, ReplayCache
from cloister.sealed.node import NodeConfig, node_app
from cloister.sealed.serving import Lifespan
from cloister.sealed.unsealing import LocalUnsealer
from cloister.sealed.workers.remote import RemoteUnsealer
from cloister.sealed.workers.serving import NodeServing
from cloister.sealed.workers.zygote import ZygoteBoot
from cloister.server.app import create_app
from cloister.text import ChatTemplate, Tokenizer

WORKER_PACKAGES: Final = tuple(f"cloister.{room}" for room in ("server", "sealed", "privacy", "engine", "text", "types"))
LATE_MODULES: Final = ("anyio._backends._asyncio", "pydantic._internal._dataclasses", "llguidance")
NOWHERE: Final = "sealed"
"""In place of an address: workers have none, and a sealed request has no Host that could be checked."""


def build_worker(boot: ZygoteBoot) -> NodeServing:
    """Returns what a worker does.

    Raises:
        ConfigError: the API key file cannot be used.
    """
    keys = boot.server.api_keys
    gate = Gate(
        Policy(str(boot.engine.profile)),
        read_credentials(Path(keys).expanduser()) if keys is not None else None,
        loopback=False,
        reuses_prefixes=bool(boot.engine.prefix_cache),
        sealed=True,
    )
    transport, unsealer = WorkerTransport(boot.ready), RemoteUnsealer()
    engine = EngineClient(transport, boot.engine)
    path = Path(boot.ready.model.path)
    tokenizer = Tokenizer(path, remembers=False)
    server = replace(boot.server, host=NOWHERE, page=False, log_requests=False, otlp_endpoint=None, allowed_origins=None)
    inner = create_app(
        engine,
        tokenizer,
        ChatTemplate.load(path, tokenizer.special),
        gate,
        server,
        request_timeout_s=boot.engine.request_timeout_s,
    )

    async def link(channel: socket.socket) -> None:
        transport.attach(channel)
        await engine.start()

    config = NodeConfig(shape=boot.shape, profile=str(boot.engine.profile))
    node = node_app(inner, config, unsealer, Lifespan(None))
    receiver = Receiver(KeyRing(0.0), ReplayCache(NODE_KEY_LIFE_S))
    rehearsal = node_app(inner, config, LocalUnsealer(receiver, lambda: 0.0), Lifespan(None))
    return NodeServing(node, link, unsealer, rehearsal, receiver.ring.current.configuration, _close)


def _close() -> None:
    if hardening.sealed() is not None:
        hardening.preload(WORKER_PACKAGES, LATE_MODULES)
        hardening.close_this()
