"""The store of pulled models: one directory each, moved into place when it is complete."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, NoReturn

import msgspec

from cloister.types.errors import ModelError

MANIFEST: Final = "model.json"
"""Manifest of a pulled model's directory, by which the model is found."""
_SAMPLING: Final = "generation_config.json"
_SCRATCH: Final = ".pulling-"
_OLDER: Final = f"{_SCRATCH}older-"
"""Suffix of a model that is being replaced; restored if the replacement fails."""
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")
_SPARE_BYTES: Final = 64 << 20
"""Disk space that a download leaves free."""


@dataclass(frozen=True, slots=True)
class PulledModel:
    """One pulled model, as described in its `model.json`.

    Attributes:
        source: its source: `pypi:PACKAGE==VERSION`, or a URL without its query.
        file: name of the GGUF file in the directory.
        sha256: digest of that file when it was pulled (hex).
        licence: SPDX identifier or name of the terms; "unknown" if the source does not state it.
        sampling: default sampling parameters, stored as generation_config.json.
    """

    name: str
    source: str
    file: str
    sha256: str
    size_bytes: int
    licence: str = "unknown"
    title: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)


class StoreFullError(ModelError):
    """The disk of the store has too little space for a model."""


class Store:
    """The directory of pulled models.

    Args:
        root: None is `~/.cache/cloister/models`.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else _own_root()

    def list(self) -> Iterator[PulledModel]:
        """Yields pulled models, by name. Directories without a readable manifest are skipped."""
        for place in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if not place.name.startswith(".") and (model := self.find(place.name)) is not None:
                yield model

    def find(self, name: str) -> PulledModel | None:
        """Returns a pulled model, None if there is none of this name."""
        if not _NAME.fullmatch(name):
            return None
        try:
            model = msgspec.json.decode((self.root / name / MANIFEST).read_bytes(), type=PulledModel)
        except (OSError, msgspec.DecodeError, RecursionError):
            return None
        return model if model.name == name and self.path(model).is_file() else None

    def path(self, model: PulledModel) -> Path:
        """Returns the model's GGUF file."""
        return self.root / model.name / Path(model.file).name

    def remove(self, name: str) -> int:
        """Deletes a pulled model; returns the size of its file in bytes.

        Raises:
            ModelError: there is none of that name, or it cannot be deleted.
        """
        model = self.find(name)
        if model is None:
            raise ModelError(f"no model {name!r} was pulled; `cloister list` shows what there is", param="name")
        with self._lock():
            gone = self.root / f"{_SCRATCH}removed-{name}"
            try:
                shutil.rmtree(gone, ignore_errors=True)
                (self.root / name).rename(gone)  # from here on it cannot be found partially deleted
                shutil.rmtree(gone)
            except OSError as error:
                raise ModelError(f"{name} cannot be deleted from {self.root}: {error.strerror}") from None
        return model.size_bytes

    @contextmanager
    def adding(self, need_bytes: int) -> Iterator[Path]:
        """Yields a temporary directory on the store's disk. One process adds at a time.

        Args:
            need_bytes: maximum size of its content.

        Raises:
            StoreFullError: the disk has too little space, or fills up.
            ModelError: the store cannot be written, or another process adds.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._fail(error)
        self.check_room(need_bytes)
        with self._lock():
            scratch = None
            try:
                for left_behind in self.root.glob(f"{_SCRATCH}*"):  # left by a killed process
                    self._clear(left_behind)
                scratch = Path(mkdtemp(prefix=_SCRATCH, dir=self.root))
                yield scratch
            except OSError as error:
                self._fail(error)
            finally:
                if scratch is not None:
                    shutil.rmtree(scratch, ignore_errors=True)

    def _fail(self, error: OSError) -> NoReturn:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError(f"the disk of {self.root} is full; free some, and run the command again") from None
        raise ModelError(f"models cannot be kept in {self.root}: {error.strerror}") from None

    def check_room(self, need_bytes: int) -> None:
        """Raises StoreFullError if the disk lacks space for this many more bytes."""
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes < need_bytes + _SPARE_BYTES:
            raise StoreFullError(
                f"the disk of {self.root} has {free_bytes / 1e6:,.0f} MB free, and {(need_bytes + _SPARE_BYTES) / 1e6:,.0f} MB "
                "are needed for a while; free some, and run the command again"
            )

    def commit(self, scratch: Path, model: PulledModel, chat_template: str | None = None) -> PulledModel:
        """Moves a directory with the model's file into place, replacing an older one.

        Args:
            chat_template: Jinja that replaces the one in the file; None keeps that.

        Raises:
            ModelError: the name is invalid.
        """
        check_name(model.name)
        if model.sampling:
            _write_json(scratch / _SAMPLING, dict(model.sampling))
        if chat_template is not None:
            (scratch / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        _write_json(scratch / MANIFEST, asdict(model))
        scratch.chmod(0o755)
        place, older = self.root / model.name, self.root / f"{_OLDER}{model.name}"
        if place.exists():
            place.rename(older)
        try:
            scratch.rename(place)
        except OSError:
            self._clear(older)
            raise
        shutil.rmtree(older, ignore_errors=True)
        return model

    def _clear(self, left_behind: Path) -> None:
        """Cleans up temporary files; restores a model whose replacement failed."""
        name = left_behind.name.removeprefix(_OLDER)
        if name != left_behind.name and left_behind.is_dir() and not (self.root / name).exists():
            left_behind.rename(self.root / name)
        else:
            shutil.rmtree(left_behind, ignore_errors=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            lock = (self.root / ".lock").open("w")
        except OSError as error:
            raise ModelError(f"models cannot be kept in {self.root}: {error.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ModelError("another process is pulling or removing a model; try again when it is done") from None
            yield


def _own_root() -> Path:
    """Returns this user's store; for a user without a home directory, as in many containers, an empty read-only one."""
    try:
        return Path.home() / ".cache" / "cloister" / "models"
    except RuntimeError:  # neither HOME nor a user entry
        return Path(os.devnull) / "cloister"


def check_name(name: str) -> None:
    """Raises ModelError for an invalid model name."""
    if not _NAME.fullmatch(name):
        raise ModelError("a model's name has letters, digits, `.`, `-` and `_`, 128 at most; give another", param="name")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
