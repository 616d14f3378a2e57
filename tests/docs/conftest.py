from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.trust import Trust, encode_trust
from tests.serving import ServeProcess

STAND_IN = Path(__file__).with_name("start_and_stop.py")
FORKED = Path(__file__).with_name("forked_cli.py")


@dataclass(frozen=True)
class Sandbox:
    """An empty working directory and home, with `cloister` on the path and in `.venv/bin`, as after `make serve`."""

    directory: Path
    environment: Mapping[str, str]


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of the server that the pages speak to, with the embedded model."""
    folder = tmp_path_factory.mktemp("server")
    with ServeProcess("--num-threads", "1", "--files", str(folder)) as running:
        yield running.url.removeprefix("http://")
        running.stop()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a process that forks one for each command."""
    path = tmp_path_factory.mktemp("forks") / "socket"
    with subprocess.Popen([sys.executable, "-m", "tests.docs.forked_cli", str(path)], stdin=subprocess.DEVNULL) as process:
        give_up_s = time.monotonic() + 120
        while not path.exists():
            assert process.poll() is None, "it ended"
            assert time.monotonic() < give_up_s, "it does not begin"
            time.sleep(0.02)
        yield path
        process.terminate()


@pytest.fixture
def sandbox(tmp_path: Path, forks: Path) -> Sandbox:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    real = shutil.which("cloister", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    forked = programs / "forked"
    forked.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FORKED} {forks} "$@"\n')
    shim = programs / "cloister"
    shim.write_text(  # servers that are started for real are no forks
        f'#!/bin/sh\n[ "$1" = serve ] || exec {forked} "$@"\n'
        f'program={real}\n[ "$EXPLAIN" ] && program={forked}\nexec {sys.executable} {STAND_IN} "$program" "$@"\n'
    )
    for program in (forked, shim):
        program.chmod(0o755)
    (tmp_path / "home").mkdir()
    (tmp_path / "trust.json").write_bytes(encode_trust(make_trust()))
    (tmp_path / "api-key").write_text("sk-of-the-page\n")
    environment = {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "error::DeprecationWarning:__main__",
    }
    return Sandbox(tmp_path, environment)


def make_trust() -> Trust:
    """What clients of https://relay.example would be given."""
    log, release = (PrivateKey.generate(f"{name}.example", Kind.NOTE).public for name in ("log", "release"))
    witnesses = tuple(PrivateKey.generate(f"witness{number}.example", Kind.COSIGNATURE).public for number in (1, 2))
    return Trust(log, witnesses, (release,))
