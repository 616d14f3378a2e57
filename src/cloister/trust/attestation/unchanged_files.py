"""Whether files were left alone since a moment before they were read: a node states digests of files that it has read earlier.

Engine, workers and front read the model when a node starts, and the node digests it afterwards; an engine that is made again
reads it once more, perhaps weeks later. A person who may write to these files could have one content loaded and another one
measured. The digests would be equal, so what is compared is what the file system knows of each file: another file in its place
has another number, and each write, rename and link sets the time of its last change, which no call can set.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from cloister.trust.attestation.base import AttestationError

_Identity = tuple[int, ...]


class UnchangedFiles:
    """Files and folders, as they are now.

    Args:
        paths: files, and folders with all that is in them. One that does not exist has to stay away.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(dict.fromkeys(path.absolute() for path in paths))
        self._found = _identify(self._paths)

    def check(self) -> None:
        """Compares them with what they were.

        Raises:
            AttestationError: one was replaced, written to, added or removed, or its name or permissions were changed.
        """
        found = _identify(self._paths)
        changed = sorted(name for name in {*found, *self._found} if found.get(name) != self._found.get(name))
        if changed:
            raise AttestationError(
                f"{changed[-1]} was changed since this node was started, so nobody knows what was loaded from it; leave the "
                "files of a node alone while it runs, and start it again"
            )


def _identify(paths: Iterable[Path]) -> dict[str, tuple[str, _Identity, _Identity]]:
    found: dict[str, tuple[str, _Identity, _Identity]] = {}
    for path in paths:
        for name in _walk(str(path)):
            try:
                entry, target = os.lstat(name), os.stat(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise AttestationError(f"cannot look at {name}: {error.strerror}") from None
            # what a link leads to has an identity of its own, also where it is another file of the same content
            found[name] = os.path.realpath(name), _identity(entry), _identity(target)
    return found


def _walk(path: str) -> Iterable[str]:
    yield path
    for folder, subfolders, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in (*subfolders, *names))


def _identity(found: os.stat_result) -> _Identity:
    kind = stat.S_IFMT(found.st_mode)
    return found.st_dev, found.st_ino, kind, found.st_size, found.st_mtime_ns, found.st_ctime_ns
