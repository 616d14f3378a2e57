"""Adapters of virtual engines, by number from 1 on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cloister.cluster.virtual.history_program import HistoryProgram, make_adapter
from cloister.engine.adapters import AdapterRegister
from cloister.executor.adapters import AdapterSlots
from cloister.models.adapters import Adapter
from cloister.types.config import parse_adapters

NUM_SLOTS: Final = 3
"""Adapters that an engine can have at a time."""


def adapter_digest(number: int) -> str:
    """Returns the digest of an adapter."""
    return hashlib.sha256(b"adapter %d" % number).hexdigest()


def adapter_name(number: int) -> str:
    """Returns the name of an adapter."""
    return f"a{number}"


def list_adapters(count: int) -> str:
    """Returns the setting `lora` of the first adapters: the path of each is its number."""
    return ",".join(f"{adapter_name(number)}={number}" for number in range(1, count + 1))


def _read_adapter(path: Path, _: Callable[[], None]) -> Adapter:
    return Adapter(make_adapter(int(path.name)), adapter_digest(int(path.name)))


def open_adapters(program: HistoryProgram, lora: str) -> tuple[AdapterSlots, AdapterRegister]:
    slots = AdapterSlots(program, _read_adapter, NUM_SLOTS)
    return slots, AdapterRegister(slots, [slots.load(name, path) for name, path in parse_adapters(lora)])
