"""Takes the place of pypdf in the process that reads a PDF file: a parser that a file has captured, and what it tries.

The file is JSON: `{"try": {...}}` names what to reach for, and the text of its one page is what became of each attempt;
`{"say": "..."}` is written to standard output in place of an answer, as often as `times` says.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

PR_GET_DUMPABLE = 3
PR_GET_PDEATHSIG = 2


class PdfReader:
    is_encrypted = False

    def __init__(self, file: BinaryIO) -> None:
        self._wanted = json.loads(file.read())

    @property
    def pages(self) -> list[PdfReader]:
        return [self]

    def extract_text(self) -> str:
        if "text" in self._wanted:
            return str(self._wanted["text"])
        if "say" in self._wanted:
            for _ in range(self._wanted["times"]):
                os.write(1, self._wanted["say"].encode())
            os._exit(0)
        return json.dumps({name: outcome(attempt) for name, attempt in attempts(**self._wanted["try"]).items()})


def outcome(attempt: Callable[[], object]) -> str:
    try:
        return f"done: {attempt()}"
    except Exception as error:
        return type(error).__name__


def attempts(secret: str, port: int, parent: int) -> dict[str, Callable[[], Any]]:
    place = Path(secret)
    return {
        "read a file": place.read_text,
        "list a directory": lambda: os.listdir(place.parent),
        "empty a file": lambda: place.open("w"),
        "make a file": lambda: (place.parent / "new").open("w"),
        "remove a file": (place.parent / "other").unlink,
        "open a file to others": lambda: place.chmod(0o666),
        "call out": lambda: socket.create_connection(("127.0.0.1", port), timeout=1),
        "make a socket": lambda: socket.socket(socket.AF_UNIX),
        "fork": lambda: os.fork() or os._exit(0),
        "run a program": lambda: subprocess.run(["/bin/true"], check=True),
        "signal its parent": lambda: os.kill(parent, 0),
        "end its parent": lambda: signal.pidfd_send_signal(os.pidfd_open(parent), 0),
        "slow its parent": lambda: os.setpriority(os.PRIO_PROCESS, parent, 0),
        "limit its parent": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE, (1024, 1024)),
        "look into its parent": lambda: Path(f"/proc/{parent}/environ").read_bytes() and "",
        "load a library": lambda: ctypes.CDLL("libutil.so.1"),
        "be dumpable": lambda: ctypes.CDLL(None).prctl(PR_GET_DUMPABLE) or 1 / 0,
        "outlive its parent": lambda: _parent_death_signal() == signal.SIGKILL and 1 / 0,
        "be spared when memory is short": lambda: Path("/proc/self/oom_score_adj").read_text() == "1000\n" and 1 / 0,
    }


def _parent_death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value
