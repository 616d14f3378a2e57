"""The step loop of one replica, output processing, and the two ways to run them: in a thread or in a process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.engine.adapter_register import AdapterRegister
    from cloister.engine.base import AsyncEngine, EventListener, Health
    from cloister.engine.core import EngineCore
    from cloister.engine.machine import Machine, read_machine
    from cloister.engine.memory import MemoryBudget, budget_memory
    from cloister.engine.output_processor import OutputProcessor
    from cloister.engine.process import ProcessEngine, Supervision
    from cloister.engine.thread import ThreadEngine

__all__ = [
    "AdapterRegister",
    "AsyncEngine",
    "EngineCore",
    "EventListener",
    "Health",
    "Machine",
    "MemoryBudget",
    "OutputProcessor",
    "ProcessEngine",
    "Supervision",
    "ThreadEngine",
    "budget_memory",
    "read_machine",
]

_HOMES = {
    "adapter_register": ("AdapterRegister",),
    "base": ("AsyncEngine", "EventListener", "Health"),
    "core": ("EngineCore",),
    "machine": ("Machine", "read_machine"),
    "memory": ("MemoryBudget", "budget_memory"),
    "output": ("OutputProcessor",),
    "process": ("ProcessEngine", "Supervision"),
    "thread": ("ThreadEngine",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    # lazy: the child must not load the front's half, nor the command line numpy for `--help`
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
