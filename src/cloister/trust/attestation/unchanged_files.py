"""Whether files were left alone since a moment before they were read: a node states digests of files that it has read earlier.

Engine, workers and front read the model when a node starts, and the node digests it afterwards; an engine that is made again
reads it once more, perhaps weeks later. A person who may write to these files could have one content loaded and another one
measured. The digests would be equal, so what is compared is what the file system knows of each file: another file in its place
has another number, and each write, rename and link sets the time of its last change to that of the clock. No call sets it to
another time, but root may set the clock back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from cloister.trust.attestation.base import AttestationError

CHECK_TIMEOUT_S: Final = 60.0
"""Most time for a look at all files; 5,000 of them take about a second."""
UNLOADED: Final = frozenset({".git", ".cache", ".DS_Store"})
"""What other programs keep in a model's folder and no loader reads."""


class FilesChangedError(AttestationError):
    """Files are others than those that a node states, or cannot be looked at: no engine may load them again."""

    is_final = True


class _Entry(NamedTuple):
    """What the file system knows of a name.

    Attributes:
        path: the file that it leads to.
        numbers: device, number and kind of the name itself and of what it leads to.
        times: size and times of change of both.
    """

    path: str
    numbers: tuple[int, ...]
    times: tuple[int, ...]
    is_folder: bool


_Found = Mapping[str, _Entry]


class UnchangedFiles:
    """Files and folders, as they are now.

    Args:
        paths: files, and folders with all that is in them but `UNLOADED`. One that does not exist has to stay away.
        folders: in which nothing may come and go while files are loaded; what is in them may change.
        timeout_s: most time for a look at them later.

    Raises:
        AttestationError: a folder cannot be read, or contains a link to a folder.
    """

    def __init__(self, paths: Iterable[Path], folders: Iterable[Path] = (), timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._paths = tuple(dict.fromkeys(path.absolute() for path in paths))
        self._timeout_s = timeout_s
        # a sealed process may not read a folder that was absent when it was started, but sees that it is there
        self._absent = frozenset(str(path) for path in self._paths if not path.exists())
        self._folders = tuple(dict.fromkeys(folder.absolute() for folder in folders))
        self._found = self._identify()

    async def check(self) -> None:
        """Compares them with what they were, in a thread.

        Raises:
            FilesChangedError: one was replaced, written to, added or removed, or its name or permissions were changed; or the
                file system did not answer in time.
        """
        _compare(self._found, await self._look())

    @contextlib.asynccontextmanager
    async def guard_load(self) -> AsyncIterator[None]:
        """Checks before they are loaded again that they are the same, and afterwards that nothing changed meanwhile.

        Between two loads a folder may get files and lose them again.

        Raises:
            FilesChangedError: see `check`.
        """
        before = await self._look()
        _compare(_without_folder_times(self._found), _without_folder_times(before))
        yield
        _compare(before, await self._look())

    async def _look(self) -> _Found:
        loop = asyncio.get_running_loop()
        looked: asyncio.Future[_Found] = loop.create_future()

        def settle(found: _Found | None, error: Exception | None) -> None:
            if looked.done():
                return
            if found is None:
                looked.set_exception(error or AttestationError("nothing was found"))
            else:
                looked.set_result(found)

        def look() -> None:
            found, failed = None, None
            try:
                found = self._identify()
            except Exception as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, found, failed)

        # no thread of the pool: the process could not end while the file system does not answer
        threading.Thread(target=look, name="cloister-files", daemon=True).start()
        try:
            return await asyncio.wait_for(looked, self._timeout_s)
        except TimeoutError:
            raise FilesChangedError(
                f"the file system did not answer within {self._timeout_s:g} s, so nobody knows whether the files of this node "
                "were changed; make its disk or network share answer, and start the node again"
            ) from None
        except AttestationError as error:
            raise FilesChangedError(error.message) from None

    def _identify(self) -> _Found:
        names = [*map(str, self._folders), *self._absent]
        names += [name for path in map(str, self._paths) if path not in self._absent for name in _walk(path)]
        return {name: entry for name in names if (entry := _identify(name)) is not None}


def _compare(before: _Found, after: _Found) -> None:
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if changed:
        raise FilesChangedError(
            f"{changed[-1]} was changed since this node was started, so nobody knows what was loaded from it; leave the "
            "files of a node alone while it runs, and start it again"
        )


def _without_folder_times(found: _Found) -> _Found:
    return {name: entry._replace(times=()) if entry.is_folder else entry for name, entry in found.items()}


def _identify(name: str) -> _Entry | None:
    try:
        entry, target = os.lstat(name), os.stat(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AttestationError(f"cannot look at {name}: {error.strerror}") from None
    # what a link leads to has an identity of its own, also where it is another file of the same content
    numbers = [number for found in (entry, target) for number in (found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode))]
    times = [time for found in (entry, target) for time in (found.st_size, found.st_mtime_ns, found.st_ctime_ns)]
    return _Entry(os.path.realpath(name), tuple(numbers), tuple(times), stat.S_ISDIR(target.st_mode))


def _walk(path: str) -> Iterable[str]:
    yield path
    if not os.path.isdir(path):
        return
    for folder, subfolders, names in os.walk(path, onerror=_refuse_unread):
        subfolders[:] = [name for name in subfolders if name not in UNLOADED]
        for name in subfolders:
            if os.path.islink(os.path.join(folder, name)):
                raise AttestationError(
                    f"{os.path.join(folder, name)} is a link to a folder, which is not measured; copy it here"
                )
        yield from (os.path.join(folder, name) for name in (*subfolders, *names) if name not in UNLOADED)


def _refuse_unread(error: OSError) -> None:
    raise AttestationError(f"cannot look at {error.filename}: {error.strerror}; let this node read it, or remove it")
