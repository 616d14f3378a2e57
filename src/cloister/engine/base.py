"""What a front sees of an engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cloister.engine.adapter_calls import AdapterCalls
from cloister.types.events import Event
from cloister.types.request import ModelInfo, Request, SequenceOutput

EventListener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Health:
    """Health means progress (rule 11).

    Attributes:
        good: steps advance, or nothing waits.
        detail: one line for an operator, free of content.
    """

    good: bool
    detail: str


class AsyncEngine(Protocol):
    """An engine as the front's event loop uses it.

    Attributes:
        model: what it serves.
        memory: itemised budget, (what, bytes).
        startup: how long its start took, (phase, seconds).
    """

    model: ModelInfo
    memory: list[tuple[str, int]]
    startup: list[tuple[str, float]]

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Submits a request at the first `anext` and yields what its sequences gain, until the last one ended.

        Closing the iterator early aborts the request; its blocks are free at the next step. Every sequence's last
        output carries a finish reason, errors included: the iterator itself raises only before the first output.

        Raises:
            QueueFullError: as many requests wait as the configuration allows.
            EngineError: the engine is not running (it is being restarted, or it drains).
        """
        ...

    def subscribe(self, listener: EventListener) -> None:
        """Calls `listener` with every event, on the front's event loop."""
        ...

    def health(self) -> Health: ...

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, waits until the running ones ended or `timeout_s` passed, then stops the engine."""
        ...


@runtime_checkable
class AdapterEngine(AsyncEngine, Protocol):
    """An engine that requests can ask for LoRA adapters.

    Attributes:
        adapters: those that it has, and calls to load and unload them.
    """

    adapters: AdapterCalls
