"""Reloads API keys and certificates on SIGHUP or when their files change, without dropping a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloister.types.errors import CloisterError

LOOK_EVERY_S: Final = 2.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchedFiles:
    """Data that was read from files.

    Attributes:
        name: for the log.
        read: reads it again; on failure raises CloisterError and changes nothing.
    """

    name: str
    paths: tuple[Path, ...]
    read: Callable[[], None]

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Returns a value that changes when a file is written or replaced; None for a missing file."""
        return tuple(map(_stamp, self.paths))


class Reloader:
    """Reloads sources when their files change. An unusable file is logged, and the previous data stays in use."""

    def __init__(self, sources: Sequence[WatchedFiles]) -> None:
        self._stamps = {source: source.stamp() for source in sources}

    def reload(self) -> None:
        """Reads everything again."""
        for source in self._stamps:
            self._read(source)

    async def watch(self, every_s: float = LOOK_EVERY_S) -> None:
        """Reloads changed files until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            for source, stamp in self._stamps.items():
                if source.stamp() != stamp:
                    self._read(source)

    def _read(self, source: WatchedFiles) -> None:
        self._stamps[source] = source.stamp()
        try:
            source.read()
        except CloisterError as error:
            _logger.error("the %s could not be read again and stay as they were: %s", source.name, error.message)
        else:
            _logger.info("the %s were read again", source.name)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
