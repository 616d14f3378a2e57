"""`make serve` is the server: what ends make ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serving import START_TIMEOUT_S, free_port

ROOT = Path(__file__).parents[2]


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(port: int, *, opened: bool) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while is_open(port) != opened:
        assert time.monotonic() < give_up_s, f"port {port} is {'closed' if opened else 'open'} after {START_TIMEOUT_S} s"
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_sigterm_to_make_serve_ends_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "a clone of mine"  # with a path that has spaces
    (folder / ".venv/bin").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, folder)
    program = folder / ".venv/bin/cloister"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cloister.cli "$@" --weights-cache ""\n')
    program.chmod(0o755)
    for name in ("bin/python", ".ready", ".installed"):
        (folder / ".venv" / name).touch()  # installed, as far as make can see
    port = free_port()
    environment = {**os.environ, "MAKEFLAGS": ""}
    make = subprocess.Popen(
        ["make", "serve", "MODEL=cloister-5m", f"PORT={port}"], cwd=folder, env=environment, start_new_session=True
    )
    try:
        wait_until(port, opened=True)
        make.send_signal(signal.SIGTERM)
        make.wait(300)
        wait_until(port, opened=False)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(make.pid, signal.SIGKILL)
