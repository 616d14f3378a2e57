"""What is wrong with settings, collected so that a user learns all of it at once. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from cloister.types.errors import CloisterError, ConfigError, PolicyError

_NAME: Final = re.compile(r"\w+")


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
        names = _NAME.findall(refusal.param or "")[:1]
        if self._refused.union(self._unread).isdisjoint(names) and not any(_names(refusal.message, n) for n in self._unread):
            self._refused.update(names)
            self._found.append(refusal)

    def add_unreadable(self, refusal: ConfigError, *names: str) -> None:
        """Takes the refusal of a value that cannot be read, once for several models, and the settings that it leaves unset."""
        if refusal.message not in (found.message for found in self._found):
            self._found.append(refusal)
        self._unread.update(names)

    def fork(self) -> Refusals:
        """Returns a collection for one of several models, which knows what was refused before."""
        forked = Refusals()
        forked._refused, forked._unread = set(self._refused), set(self._unread)
        return forked

    def merge(self, of_models: Mapping[str, Refusals]) -> None:
        """Takes the refusals of several models: what all share once, and what only some have with the model's name."""
        said_by = {name: {refusal.message for refusal in forked._found} for name, forked in of_models.items()}
        shared = set.intersection(*said_by.values())
        for name, forked in of_models.items():
            for refusal in forked._found:
                if refusal.message not in shared:
                    self._found.append(_of_model(name, refusal))
                elif refusal.message not in (found.message for found in self._found):
                    self._found.append(refusal)
            self._refused |= forked._refused
            self._unread |= forked._unread

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


def _names(message: str, setting: str) -> bool:
    """Whether a message names a setting. A name of one word may also be an everyday word, such as `on` or `port`: it counts
    where it is set apart, or where the message says to set it or to leave it out."""
    name = re.escape(setting)
    if "_" in setting:
        return re.search(rf"\b{name}\b", message) is not None
    apart = rf"(?:`|--|\b(?:add|leave|set(?: \w+ and)?) |\band (?={name} to\b)){name}\b|\b{name} '"
    return re.search(apart, message) is not None


def _of_model(name: str, refusal: CloisterError) -> CloisterError:
    named = copy.copy(refusal)
    named.message = f"[models.{name}]: {refusal.message}"
    named.args = (named.message,)
    return named
