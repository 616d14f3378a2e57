"""The launcher's state in this process, for the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from cloister.trust.hardening.applying import close
from cloister.trust.hardening.measure import Needs, Results

HOST: Final = "host"
HOST_TEXT: Final = "missing: host not excluded: who has SYS_PTRACE or SYS_ADMIN in this kernel, or runs it, reads this memory"
"""Entry for the host, which no measure inside a machine can exclude."""


class Made(Protocol):
    """A process created on behalf of this one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class Maker(Protocol):
    """Creates processes on behalf of one that may not (`starter.Starter`)."""

    @property
    def results(self) -> Mapping[str, Results]: ...

    def start(self, role: str, arguments: Sequence[str], descriptor: int, name: str = "") -> Made: ...


@dataclass(frozen=True, slots=True)
class Sealed:
    """A process that the launcher started.

    Attributes:
        profile: the privacy profile of its measures.
        results: results of the measures.
        starter: creates further processes; None in a process that needs none.
    """

    profile: str
    needs: Needs
    results: Results
    starter: Maker | None = None

    def statement(self) -> dict[str, str]:
        """Returns the entries for the attestation statement: each measure of this process and of those created for it.

        `role.measure` -> `applied: ...` or `missing: ...`, and `host`, which is always missing.
        """
        every = [self.results, *(self.starter.results.values() if self.starter is not None else ())]
        return {**{name: text for results in every for name, text in results.statement().items()}, HOST: HOST_TEXT}


_sealed: list[Sealed] = []


def sealed() -> Sealed | None:
    """Returns the launcher's results in this process; None without a launcher."""
    return _sealed[-1] if _sealed else None


def remember(state: Sealed) -> None:
    """Stores the launcher's results. Called once before the module runs, and again when the process is locked down."""
    _sealed[:] = [state]


def close_this() -> None:
    """Locks down this process if the launcher started it, once everything is loaded and before the first request.

    Raises:
        HardeningError: it cannot be locked down, and the profile requires it.
    """
    state = sealed()
    if state is not None:
        remember(replace(state, results=close(state.profile, state.results, replace(state.needs, write=()))))
