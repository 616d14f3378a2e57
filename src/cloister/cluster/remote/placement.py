"""Placement of engine hosts: where they run, and the protocol of what starts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Place:
    """A host that runs.

    Attributes:
        address, port: where it listens.
        certificate: PEM; only the process that holds its key is the host.
        num_threads: threads that its engine may use; None: as in the settings.
        memory_share: share of its machine's memory that its engine may plan with; it multiplies that of the settings.
    """

    address: str
    port: int
    certificate: str
    num_threads: int | None = None
    memory_share: float = 1.0


class Placement(Protocol):
    """Keeps one engine host somewhere."""

    async def start(self) -> Place:
        """Returns where the host runs, and starts one if none does.

        Raises:
            EngineError: none can be started; the message says why.
        """
        ...

    async def wait_ended(self) -> str:
        """Waits until the host has ended that `start` returned; says how."""
        ...

    def kill(self) -> None:
        """Ends the host, so that `start` starts another one."""
        ...
