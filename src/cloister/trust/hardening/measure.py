"""The protocol of a hardening measure: it closes one way in, and reports whether it holds and why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Needs:
    """What one process has to be able to do; everything else may be taken from it.

    Attributes:
        role: its name in evidence: front, engine, starter, worker, sealer.
        read: files and directories that it reads beside the interpreter and its libraries.
        write: directories that it writes to.
        listen: TCP ports that it takes; 0 stands for one that the kernel picks.
        connect: TCP ports of peers that it calls.
        fork: it makes processes, by fork alone: no process of a sealed node can execute a program.
    """

    role: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    listen: tuple[int, ...] = ()
    connect: tuple[int, ...] = ()
    fork: bool = False


class Missing(Exception):
    """A measure cannot be had here.

    Attributes:
        reason: what is not there.
        remedy: what a person can do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Measure(Protocol):
    """One measure. `apply` changes this process for good; nothing takes it back.

    Attributes:
        name: what evidence calls it.
        stops: what it stops, for people.
    """

    @property
    def name(self) -> str: ...

    @property
    def stops(self) -> str: ...

    def apply(self, needs: Needs) -> str:
        """Applies it, makes sure that it holds, and returns what holds now in a few words.

        Raises:
            Missing: it cannot be had here.
        """
        ...

    def probe(self) -> str:
        """Says in a few words what `apply` would find, and changes nothing.

        Raises:
            Missing: `apply` would fail here.
        """
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one measure.

    Attributes:
        detail: what holds, or the reason why it does not.
        remedy: what to do about a missing one.
    """

    measure: str
    applied: bool
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{'applied' if self.applied else 'missing'}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Results:
    """What became of every measure in one process.

    Attributes:
        role: whose process it is.
        items: in the order of application.
    """

    role: str
    items: tuple[Result, ...] = field(default=())

    @property
    def missing(self) -> tuple[Result, ...]:
        return tuple(item for item in self.items if not item.applied)

    def statement(self) -> dict[str, str]:
        """Returns what goes into the attestation statement: `role.measure` -> `applied: ...` or `missing: ...`."""
        return {f"{self.role}.{item.measure}": str(item) for item in self.items}

    def __iter__(self) -> Iterator[Result]:
        return iter(self.items)
