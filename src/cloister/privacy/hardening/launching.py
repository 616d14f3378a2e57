"""What the launcher was asked to start, and what follows for each process of the node. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloister.privacy.hardening.measure import Needs
from cloister.privacy.hardening.starter import Role

ENGINE: Final = "engine"
ENGINE_MODULE: Final = "cloister.engine.child"


@dataclass(frozen=True, slots=True)
class Launch:
    """A node to start.

    Attributes:
        read: what its processes read beside the interpreter and its libraries.
        write: directories that the engine, or a module without one, writes to until it is closed.
        listen, connect: TCP ports of the front.
        with_engine: the module starts engine processes.
        module, arguments: what the front runs.
    """

    profile: str
    read: tuple[str, ...]
    write: tuple[str, ...]
    listen: tuple[int, ...]
    connect: tuple[int, ...]
    with_engine: bool
    module: str
    arguments: tuple[str, ...]

    @property
    def front(self) -> Needs:
        """The process that runs the module: it has the network and, beside an engine, writes nowhere."""
        write = () if self.with_engine else self.write
        return Needs("front", read=self.read, write=write, listen=self.listen, connect=self.connect)

    @property
    def starter(self) -> Needs:
        """The process that forks others: it reaches what they reach."""
        return Needs("starter", read=self.read, write=self.write, fork=True)

    @property
    def roles(self) -> Mapping[str, Role]:
        """The processes that the starter may make: an engine has no network at all."""
        return {ENGINE: Role(ENGINE_MODULE, Needs(ENGINE, read=self.read, write=self.write), "before it is ready")}
