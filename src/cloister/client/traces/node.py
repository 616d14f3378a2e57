"""Starts what is searched: a server, or relay, gateway and sealed node, as processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import httpx

from cloister.client.traces.sealing import DirectTransport
from cloister.privacy.residue.processes import Process
from cloister.privacy.shape import shape_of
from cloister.types.errors import EngineError

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
_ADDRESS: Final = re.compile(r"Serving on (http\S+)")


class Path(Protocol):
    """A way from a client to a node that runs.

    Attributes:
        roots: pids that were started.
    """

    roots: tuple[int, ...]

    def client(self) -> httpx.AsyncClient:
        """Returns a client whose requests go the whole way."""
        ...

    def role(self, process: Process) -> str:
        """Names a process in words."""
        ...

    def holds_content(self, process: Process) -> bool:
        """Whether a process sees prompts or answers while a request runs, in whatever form."""
        ...

    def stop(self) -> None: ...


@dataclass(slots=True)
class RunningProgram:
    """A program of this package that runs, with the address that it announced."""

    process: subprocess.Popen[str]
    address: str
    drain: threading.Thread

    @staticmethod
    def start(arguments: Sequence[str], announced: re.Pattern[str] = _ADDRESS) -> RunningProgram:
        """Starts `cloister ARGUMENTS` and waits until it serves.

        Raises:
            EngineError: it did not start; its own words are on standard error.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cloister.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if found := announced.search(line):
                    drain = threading.Thread(target=_drain, args=(process,), daemon=True)
                    drain.start()
                    return RunningProgram(process, found[1], drain)
        finally:
            timer.cancel()
        process.wait()
        raise EngineError(f"`cloister {arguments[0]}` did not start; what it printed says why")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.drain.join(STOP_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


class ServeProgram:
    """One `cloister serve` and nothing before it.

    Args:
        arguments: of `serve`, beside profile and port.
    """

    def __init__(self, profile: str, arguments: Sequence[str] = ()) -> None:
        self._program = RunningProgram.start(["serve", "--profile", profile, "--port", "0", "--no-log-requests", *arguments])
        self.roots: tuple[int, ...] = (self._program.process.pid,)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._program.address, timeout=60.0)

    def role(self, process: Process) -> str:
        if process.pid in self.roots:
            return "front"
        return "engine" if "cloister.engine.engine_process" in process.command else "other"

    def holds_content(self, process: Process) -> bool:
        return self.role(process) in ("front", "engine")

    def stop(self) -> None:
        self._program.stop()


class SealedNode(ServeProgram):
    """One `cloister serve --sealed`, asked without relay and gateway between."""

    def __init__(self, profile: str, arguments: Sequence[str] = ()) -> None:
        super().__init__(profile, ("--sealed", *arguments))
        self._shaped = shape_of(profile) is not None

    def client(self) -> httpx.AsyncClient:
        transport = DirectTransport(self._program.address, shaped=self._shaped)
        return httpx.AsyncClient(base_url="https://localhost", timeout=60.0, transport=transport)

    def role(self, process: Process) -> str:
        if process.pid in self.roots:
            return "front"
        return process.name.removeprefix("cl-") if process.name.startswith("cl-") else "starter"

    def holds_content(self, process: Process) -> bool:
        return self.role(process) in ("worker", "engine")


def _drain(process: subprocess.Popen[str]) -> None:
    """Keeps a program's pipe from filling up."""
    assert process.stdout is not None
    for _ in process.stdout:
        time.sleep(0)
