"""The launcher's state in this process, for the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from cloister.trust.hardening.applying import close
from cloister.trust.hardening.measure import Needs, Results

HOST: Final = "host"
HOST_TEXT: Final = "missing: host not excluded: who has SYS_PTRACE or SYS_ADMIN in this kernel, or runs it, reads this memory"
"""What no measure inside a machine gives."""


class Made(Protocol):
    """A process that was made for this one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class Maker(Protocol):
    """Makes processes for one that may not (`starter.Starter`)."""

    @property
    def results(self) -> Mapping[str, Results]: ...

    def start(self, role: str, arguments: Sequence[str], descriptor: int) -> Made: ...


@dataclass(frozen=True, slots=True)
class Sealed:
    """A process that the launcher started.

    Attributes:
        profile: the privacy profile that its measures were taken under.
        results: what became of them.
        starter: makes the processes beside this one; None in a process that needs none.
    """

    profile: str
    needs: Needs
    results: Results
    starter: Maker | None = None

    def statement(self) -> dict[str, str]:
        """Returns what goes into the attestation statement: each measure of this process and of those that it had made.

        `role.measure` -> `applied: ...` or `missing: ...`, and `host`, which is always missing.
        """
        every = [self.results, *(self.starter.results.values() if self.starter is not None else ())]
        return {**{name: text for results in every for name, text in results.statement().items()}, HOST: HOST_TEXT}


_sealed: list[Sealed] = []


def sealed() -> Sealed | None:
    """Returns what the launcher did in this process; None if no launcher started it."""
    return _sealed[-1] if _sealed else None


def remember(state: Sealed) -> None:
    """Keeps what the launcher did. Called once, before the module runs, and again when the process is closed."""
    _sealed[:] = [state]


def close_this() -> None:
    """Closes this process, if the launcher started it: everything is loaded, and the first request may come.

    Raises:
        HardeningError: it cannot be closed, and the profile wants it.
    """
    state = sealed()
    if state is not None:
        remember(replace(state, results=close(state.profile, state.results, replace(state.needs, write=()))))
