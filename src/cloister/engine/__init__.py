"""The step loop of one replica, output processing, and one client for an engine in a process, a thread or behind a channel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.engine.adapters import AdapterRegister
    from cloister.engine.client import EngineClient, Health
    from cloister.engine.core import EngineCore
    from cloister.engine.in_flight import EventListener
    from cloister.engine.machine import Machine, read_machine
    from cloister.engine.memory import MemoryBudget, budget_memory
    from cloister.engine.output_processor import OutputProcessor
    from cloister.engine.supervision import Supervision
    from cloister.engine.transports import ProcessTransport, ThreadTransport, WorkerTransport

__all__ = [
    "AdapterRegister",
    "EngineClient",
    "EngineCore",
    "EventListener",
    "Health",
    "Machine",
    "MemoryBudget",
    "OutputProcessor",
    "ProcessTransport",
    "Supervision",
    "ThreadTransport",
    "WorkerTransport",
    "budget_memory",
    "read_machine",
]

_HOMES = {
    "adapters": ("AdapterRegister",),
    "client": ("EngineClient", "Health"),
    "core": ("EngineCore",),
    "in_flight": ("EventListener",),
    "machine": ("Machine", "read_machine"),
    "memory": ("MemoryBudget", "budget_memory"),
    "output_processor": ("OutputProcessor",),
    "supervision": ("Supervision",),
    "transports": ("ProcessTransport", "ThreadTransport", "WorkerTransport"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    # lazy: the child must not load the front's half, nor the command line numpy for `--help`
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
