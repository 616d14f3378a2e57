"""configfs-tsm as an ordinary directory: what the kernel does on mkdir, write and rmdir, done by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


class FakeConfigfs:
    """A directory below which requests for reports are answered.

    Args:
        folder: where.
        provider: what the kernel calls the platform.
        sign: makes the report for what is written into `inblob`.
        auxiliary: what stands in `auxblob`; None where the kernel has none.
        jumps: writes by another program that happen beside each of ours.
    """

    def __init__(
        self,
        folder: Path,
        provider: str,
        sign: Callable[[bytes], bytes],
        auxiliary: bytes | None = None,
        jumps: int = 0,
    ) -> None:
        self.folder = folder
        self._provider = provider
        self._sign = sign
        self._auxiliary = auxiliary
        self._jumps = jumps
        folder.mkdir()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes directories below the folder behave."""
        mkdir, write, rmdir = Path.mkdir, Path.write_bytes, Path.rmdir

        def make(path: Path) -> None:
            mkdir(path)
            if path.parent == self.folder:
                (path / "generation").write_text("4\n")
                (path / "provider").write_text(f"{self._provider}\n")

        def put(path: Path, data: bytes) -> int:
            if path.parent.parent == self.folder:
                generation = path.parent / "generation"
                generation.write_text(f"{int(generation.read_text()) + 1 + self._jumps}\n")
                write(path.parent / "outblob", self._sign(data))
                if self._auxiliary is not None:
                    write(path.parent / "auxblob", self._auxiliary)
            return write(path, data)

        def remove(path: Path) -> None:
            if path.parent == self.folder:
                shutil.rmtree(path)
            else:
                rmdir(path)

        monkeypatch.setattr(Path, "mkdir", make)
        monkeypatch.setattr(Path, "write_bytes", put)
        monkeypatch.setattr(Path, "rmdir", remove)
