"""The protocol of a hardening measure: it prevents one kind of access, and reports whether it is in force or why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Needs:
    """What one process must be able to do; everything else may be removed.

    Attributes:
        role: its name in evidence: front, engine, starter, worker, sealer.
        read: files and directories that it reads, in addition to the interpreter and its libraries.
        write: directories that it writes to.
        listen: TCP ports that it listens on; 0 means one picked by the kernel.
        connect: TCP ports of peers that it connects to.
        fork: it creates processes, only by fork: no process of a sealed node can execute a program.
    """

    role: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    listen: tuple[int, ...] = ()
    connect: tuple[int, ...] = ()
    fork: bool = False


class Missing(Exception):
    """A measure is not available here.

    Attributes:
        reason: what is missing.
        remedy: what an operator can do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Measure(Protocol):
    """One measure. `apply` changes this process irrevocably.

    Attributes:
        name: its name in evidence.
        stops: description of what it prevents.
    """

    @property
    def name(self) -> str: ...

    @property
    def stops(self) -> str: ...

    def apply(self, needs: Needs) -> str:
        """Applies and checks it, and returns a short description of the result.

        Raises:
            Missing: it is not available here.
        """
        ...

    def probe(self) -> str:
        """Returns a short description of what `apply` would do, without changing anything.

        Raises:
            Missing: `apply` would fail here.
        """
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one measure.

    Attributes:
        detail: what is in force, or why it is not.
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
    """The results of all measures in one process.

    Attributes:
        role: role of the process.
        items: in the order of application.
    """

    role: str
    items: tuple[Result, ...] = field(default=())

    @property
    def missing(self) -> tuple[Result, ...]:
        return tuple(item for item in self.items if not item.applied)

    def statement(self) -> dict[str, str]:
        """Returns the entries for the attestation statement: `role.measure` -> `applied: ...` or `missing: ...`."""
        return {f"{self.role}.{item.measure}": str(item) for item in self.items}

    def __iter__(self) -> Iterator[Result]:
        return iter(self.items)
