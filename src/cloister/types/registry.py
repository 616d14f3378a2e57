"""Named feature registries. A feature without a threat profile cannot be registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from cloister.types.errors import ConfigError
from cloister.types.threat import ThreatProfile

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one protocol, by name.

    Args:
        kind: kind of the entries for error messages, such as "scheduling policy".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[T, ThreatProfile]] = {}

    def register(self, name: str, threat: ThreatProfile) -> Callable[[T], T]:
        """Returns a decorator that registers an implementation under `name`.

        Raises:
            TypeError: `threat` is not a ThreatProfile.
            ValueError: the name is taken.
        """
        if not isinstance(threat, ThreatProfile):
            raise TypeError(f"{self.kind} {name!r} needs a ThreatProfile before it can be registered")
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already")

        def file_entry(entry: T) -> T:
            self._entries[name] = (entry, threat)
            return entry

        return file_entry

    def get(self, name: str) -> T:
        """Returns the implementation called `name`.

        Raises:
            ConfigError: the name is unknown; the message lists the existing ones.
        """
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of: {', '.join(self.names())}")
        return self._entries[name][0]

    def threat(self, name: str) -> ThreatProfile:
        """Returns the threat profile registered for `name` (ConfigError as in `get`)."""
        self.get(name)
        return self._entries[name][1]

    def names(self) -> tuple[str, ...]:
        """Every registered name, in the order of registration."""
        return tuple(self._entries)

    def __iter__(self) -> Iterator[tuple[str, ThreatProfile]]:
        return ((name, threat) for name, (_, threat) in self._entries.items())
