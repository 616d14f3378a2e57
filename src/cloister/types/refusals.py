"""What is wrong with settings, collected so that a user learns all of it at once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from cloister.types.errors import CloisterError, ConfigError, PolicyError

_WORD: Final = re.compile(r"\w+")


class RefusedSettings(ConfigError):
    """Several settings are wrong or refused.

    Attributes:
        refusals: one error for each, in the order in which they were found.
    """

    def __init__(self, refusals: tuple[CloisterError, ...]) -> None:
        lines = (f"- {refusal.message}" for refusal in refusals)
        super().__init__("\n".join((f"{len(refusals)} settings are wrong or refused:", *lines)), param=refusals[0].param)
        self.refusals = refusals

    def __reduce__(self) -> tuple[type[RefusedSettings], tuple[tuple[CloisterError, ...]]]:
        return type(self), (self.refusals,)  # so that it passes between processes


class Refusals:
    """Collects refusals of settings. As a context, it raises at the end what was found.

    Each setting has one refusal, the first: a further one may be about what the first one takes away. A value that cannot be
    read counts as unset, so refusals that name its setting are left out: they may follow from that.
    """

    def __init__(self) -> None:
        self._found: list[CloisterError] = []
        self._refused: set[str] = set()
        self._unread: set[str] = set()

    def __enter__(self) -> Refusals:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises what was found, with a refusal that ended the context.

        Raises:
            ConfigError, PolicyError: the only refusal.
            RefusedSettings: all of several.
        """
        if error is None or isinstance(error, ConfigError | PolicyError):
            if error is not None:
                self.add(error)
            if len(self._found) == 1:
                raise self._found[0] from None
            if self._found:
                raise RefusedSettings(tuple(self._found)) from None

    def add(self, refusal: CloisterError) -> None:
        """Takes a refusal, of which `param` begins with the setting's name."""
        names = _WORD.findall(refusal.param or "")[:1]
        if self._refused.isdisjoint(names) and self._unread.isdisjoint((*names, *_WORD.findall(refusal.message))):
            self._refused.update(names)
            self._found.append(refusal)

    def add_unreadable(self, refusal: ConfigError, *names: str) -> None:
        """Takes the refusal of a value that cannot be read, once for several models, and the settings that it leaves unset."""
        if refusal.message not in (found.message for found in self._found):
            self._found.append(refusal)
        self._unread.update(names)

    def extend(self, refusals: Iterable[CloisterError]) -> None:
        """Takes what a check yields, and the refusal that ends it."""
        with self.collect():
            for refusal in refusals:
                self.add(refusal)

    @contextmanager
    def collect(self, setting: str | None = None) -> Iterator[None]:
        """Takes the refusal that ends a block; what follows the block goes on.

        Args:
            setting: at fault if the refusal names none.
        """
        try:
            yield
        except (ConfigError, PolicyError) as refusal:
            refusal.param = refusal.param or setting
            self.add(refusal)
