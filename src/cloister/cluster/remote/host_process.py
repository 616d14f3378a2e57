"""Starts an engine host as a process of this machine, and says where it listens and when it ends."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import msgspec

from cloister.cluster.remote.host import HostReport, HostRequest
from cloister.types.errors import EngineError

START_S: Final = 60.0
"""Longest start of a host: a Python process, and no model."""


class HostProcess:
    """An engine host in a process of its own, which ends with the process that started it.

    Attributes:
        report: where it listens.
    """

    def __init__(self, process: asyncio.subprocess.Process, report: HostReport) -> None:
        self.report = report
        self._process = process

    @classmethod
    async def start(cls, front: str, address: str) -> HostProcess:
        """Starts a host.

        Args:
            front: the certificate of its front, PEM.
            address: of this machine, on which it listens.

        Raises:
            EngineError: it cannot start; the message says why.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "cloister.cluster.remote.host",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,  # so that Ctrl-C in a terminal reaches the front only
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(HostRequest(front, address)) + b"\n")
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
            report = msgspec.json.decode(line, type=HostReport)
        except (TimeoutError, msgspec.MsgspecError):
            report = HostReport(error="it did not say where it listens; the log may say why")
        if report.error:
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise EngineError(f"the engine's host cannot start: {report.error}")
        return cls(process, report)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kills it, and its engine with it."""
        if self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> str:
        """Waits until it has ended; says how."""
        return f"its process ended with status {await self._process.wait()}"
