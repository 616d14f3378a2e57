"""`cloister serve` as a person starts it: a process of its own on a free port. For tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx

MODEL = "cloister-5m"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
_POLL_S = 0.01
_PORTS_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody has. It is none of those that the kernel gives to who asks for any, as other tests do meanwhile."""
    first_given = int(_PORTS_GIVEN.read_text().split()[0]) if _PORTS_GIVEN.exists() else 0
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(1024, first_given) if first_given > 5000 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise RuntimeError("no port is free")


class ServeProcess:
    """A server process that takes requests, and where it listens.

    What it prints goes to a file, which is never full as a pipe that nobody reads would be.

    Args:
        flags: of `cloister serve`; without `--config` and a model it is the embedded one, without `--port` a free one.
        log: where what it prints goes and stays; None, to a file that goes when it has ended.
        module: what runs with these flags, and its first argument.

    Raises:
        RuntimeError: it did not start; the message has what it printed.
    """

    def __init__(
        self,
        *flags: str,
        log: Path | None = None,
        timeout_s: float = START_TIMEOUT_S,
        module: tuple[str, str] = ("cloister.cli", "serve"),
    ) -> None:
        model = () if {"--config", "--model"} & {*flags} else ("--model", MODEL)
        port = () if "--port" in flags else ("--port", "0")
        self.command = [sys.executable, "-m", *module, *model, *port, *flags]
        self._is_kept = log is not None
        descriptor, name = (os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC), str(log)) if log else tempfile.mkstemp(".log")
        self._log = Path(name)
        self.process = subprocess.Popen(self.command, stdout=descriptor, stderr=subprocess.STDOUT)
        os.close(descriptor)
        try:
            self.url = self._wait_for_address(timeout_s)
        except BaseException:
            self.kill()
            raise

    def _wait_for_address(self, timeout_s: float) -> str:
        give_up_s = time.monotonic() + timeout_s
        while not (found := re.search(r"Serving on (\S+)\n", self.printed)):
            if self.process.poll() is not None or time.monotonic() >= give_up_s:
                raise RuntimeError(f"the server did not start: {self.printed}")
            time.sleep(_POLL_S)
        return found[1]

    @property
    def printed(self) -> str:
        """Everything that it printed so far."""
        return self._log.read_text("utf-8")

    @property
    def lines(self) -> list[str]:
        return self.printed.splitlines()

    @property
    def engine_pid(self) -> int:
        """The engine's process; of several, the oldest."""
        return find_processes(self.process.pid, "engine")[0]

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=300).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"cloister_{name}(\{{| )", line))

    def is_well(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=300).status_code == 200
        return False

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 300) -> None:
        """Returns when a condition holds.

        Raises:
            TimeoutError: it did not come to hold.
        """
        give_up_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= give_up_s:
                raise TimeoutError(f"it did not come about within {timeout_s:g} s; {self._describe()}")
            time.sleep(_POLL_S)

    def _describe(self) -> str:
        """What somebody has to know who sees nothing but a failed test: how the server is, and what it said last."""
        status = self.process.poll()
        state = "it runs" if status is None else f"it ended with status {status}"
        return f"{state}, and said last: {' / '.join(self.lines[-8:])}"

    def stop(self) -> tuple[int, str]:
        """Ends the server as an operator would; returns exit status and everything it printed."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Waits for its end; returns as `stop`."""
        status = self.process.wait(STOP_TIMEOUT_S)
        printed = self.printed
        self._forget()
        return status, printed

    def kill(self) -> None:
        """Kills what is left of it, engine and all."""
        if self.process.poll() is None:
            for pid in (*descendants(self.process.pid), self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        self._forget()

    def _forget(self) -> None:
        if not self._is_kept:
            self._log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def descendants(pid: int) -> list[int]:
    """Returns every process under `pid`, each before those below it."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # this thread of it has
                children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return [*children, *(below for child in children for below in descendants(child))]


def find_processes(pid: int, name: str) -> list[int]:
    """Returns the processes under `pid` that call themselves `cl-NAME`, such as engine, template."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{child}/comm").read_text().strip() == f"cl-{name}":
                found.append(child)
    return found
