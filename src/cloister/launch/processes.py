"""Starts the engine's process: as a program of its own, or through the starter in a sealed node."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cloister.trust import hardening
from cloister.types.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from cloister.engine import EngineClient
    from cloister.engine.transports import ProcessHandle


ENGINE_ENTRY: Final = "cloister.launch:build_engine"
SEALED_ENGINE_ENTRY: Final = "cloister.launch:build_sealed_engine"


def make_engine(
    config: EngineConfig, front: ServerConfig, keep_listener: Callable[[socket.socket], None] | None = None
) -> EngineClient:
    """Returns an engine in a process of its own, one with no way in if the front has none."""
    from cloister.engine import EngineClient, ProcessTransport

    is_sealed = hardening.sealed() is not None
    transport = ProcessTransport(
        SEALED_ENGINE_ENTRY if is_sealed else ENGINE_ENTRY,
        log_format=front.log_format,
        spawn=_start_sealed_engine if is_sealed else None,
        keep_listener=keep_listener,
    )
    return EngineClient(transport, config)


def _start_sealed_engine(far: socket.socket) -> ProcessHandle:
    """Has the starter make an engine process: in a sealed node nothing executes a program."""
    state = hardening.sealed()
    assert state is not None
    assert state.starter is not None
    return state.starter.start("engine", [], far.fileno())


def start_sealed_module(module: str, sock: socket.socket) -> ProcessHandle:
    """Has the starter make a process beside the engine, by the role that the module has."""
    from cloister.trust.hardening.launching import ROLE_OF

    state = hardening.sealed()
    assert state is not None
    assert state.starter is not None
    return state.starter.start(ROLE_OF[module], [], sock.fileno())


# Locks the processes of a sealed node that hold plaintext: no module is imported afterwards.


FRONT_PACKAGES: Final = tuple(
    f"cloister.{name}" for name in ("server", "private", "trust", "policy", "engine", "text", "types")
)
ENGINE_PACKAGES: Final = tuple(f"cloister.{name}" for name in ("engine", "scheduler", "kv", "executor", "text", "types"))
LATE_MODULES: Final = ("uvicorn.lifespan.off", "anyio._backends._asyncio", "pydantic._internal._dataclasses", "llguidance")
"""What is imported before a sealed node is closed: a request that needs a module later would fail."""


def close_front() -> None:
    """Closes this process if it is the front of a sealed node.

    Raises:
        HardeningError: it cannot be closed.
    """
    if hardening.sealed() is not None:
        hardening.preload(FRONT_PACKAGES, LATE_MODULES)
        hardening.close_this()


def close_engine() -> None:
    """Closes this process, a sealed node's engine.

    Raises:
        HardeningError: it cannot be closed.
    """
    hardening.preload(ENGINE_PACKAGES, LATE_MODULES)
    hardening.close_this()
