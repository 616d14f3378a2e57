"""What the launcher left in this process for whoever puts the evidence together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cloister.privacy.hardening.applying import close
from cloister.privacy.hardening.measure import Needs, Results

if TYPE_CHECKING:
    from cloister.privacy.hardening.starter import Starter

HOST_EXCLUDED: Final = "host-excluded"
"""What no measure inside a machine gives: whoever has SYS_PTRACE or SYS_ADMIN in this kernel, or runs it, reads it all."""


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
    starter: Starter | None = None

    def in_force(self) -> dict[str, bool]:
        """Returns each measure of this process and of those that it had made, as `role.measure`, and whether it holds."""
        every = [self.results, *(self.starter.results.values() if self.starter is not None else ())]
        return {**{name: holds for results in every for name, holds in results.in_force().items()}, HOST_EXCLUDED: False}

    def statement(self) -> Mapping[str, str]:
        """Returns the same in words, for people."""
        every = [self.results, *(self.starter.results.values() if self.starter is not None else ())]
        words = {name: text for results in every for name, text in results.statement().items()}
        return {
            **words,
            HOST_EXCLUDED: "host not excluded: SYS_PTRACE or SYS_ADMIN in this kernel, or its host, reads this memory",
        }


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
