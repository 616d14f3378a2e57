from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.trust import Trust, encode_trust
from tests.serving import ServeProcess

STAND_IN = Path(__file__).with_name("start_and_stop.py")


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


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    real = shutil.which("cloister", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    shim = programs / "cloister"
    shim.write_text(f'#!/bin/sh\n[ "$1" = serve ] && exec {sys.executable} {STAND_IN} {real} "$@"\nexec {real} "$@"\n')
    shim.chmod(0o755)
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
