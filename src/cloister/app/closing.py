"""Closes the processes of a sealed node that hold a request's content in the clear: nothing is imported after that."""

from __future__ import annotations

from typing import Final

from cloister.privacy import hardening

FRONT_PACKAGES: Final = tuple(f"cloister.{room}" for room in ("server", "sealed", "privacy", "engine", "text", "types"))
ENGINE_PACKAGES: Final = tuple(f"cloister.{room}" for room in ("engine", "sched", "kv", "runner", "text", "types"))
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
