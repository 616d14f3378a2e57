"""The front's side of Ray: has a driver process place engine hosts.

Ray runs in a process of its own (`cluster.backend.ray`): its libraries end their process when the cluster is lost, and no
process that holds a request should have Ray in it. Front and driver exchange messages over a socket pair
(`cluster.backend.ray_messages`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

import msgspec

from cloister.cluster.backend.ray_folder import make_folder, remove_folder
from cloister.cluster.backend.ray_messages import (
    Connected,
    DriverCommand,
    DriverReport,
    HostEnded,
    HostStarted,
    KillHost,
    RayFailed,
    RaySettings,
    StartHost,
)
from cloister.cluster.remote.placement import Place
from cloister.types.errors import EngineError

REACH_S: Final = 5.0
"""Longest wait until something answers at the address of a cluster."""
CONNECT_S: Final = 120.0
"""Longest start of Ray, or of joining a cluster."""
STOP_S: Final = 20.0
"""Longest end of the driver, and of a Ray that it started; it is killed then."""
KILL_S: Final = 5.0
"""Longest wait for a driver that was killed."""
DRIVER_ENDED: Final = (
    "the Ray driver has ended; its last messages, if any, are on standard error, and those of a Ray that runs on its "
    "own are in /tmp/ray/session_latest/logs of its machine"
)
TAKES_COMMANDS: Final = (
    "anybody who reaches the ports of this Ray cluster can run programs on its machines; start it with "
    "RAY_AUTH_MODE=token, on a network of its own"
)
MAX_RETRY_S: Final = 10.0
"""Longest pause between attempts to reach a Ray that was there before."""
_FIRST_RETRY_S: Final = 0.5
_EXIT_POLL_S: Final = 0.02

_logger = logging.getLogger(__name__)


def driver_variables(address: str | None) -> dict[str, str]:
    """Returns environment variables of a driver: no statistics leave, and a Ray of its own has a secret and loopback."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
    if address is None:
        variables |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on those systems, every port listens on loopback
            "RAY_prestart_worker_first_driver": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # engines have a budget
        }
    return variables


async def check_reachable(address: str | None) -> None:
    """Connects to HOST:PORT and closes the connection: Ray itself would try for minutes. Other addresses are Ray's to find.

    Raises:
        EngineError: nothing listens there.
    """
    host, colon, port = (address or "").rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal()):
        return
    try:  # in a thread: while the front starts, its event loop may stand still for longer
        await asyncio.to_thread(_connect, host.strip("[]"), int(port))
    except (OSError, OverflowError, TimeoutError) as error:
        why = f"no reply within {REACH_S:.0f} s" if isinstance(error, TimeoutError) else _describe_os_error(error)
        raise EngineError(
            f"no Ray cluster answers at {address} ({why}); give --ray-address as `ray start --head` prints it on the head node"
        ) from None


def _connect(host: str, port: int) -> None:
    with socket.create_connection((host, port), timeout=REACH_S):
        pass


def _describe_os_error(error: OSError | OverflowError) -> str:
    """Returns why a connection failed, in words."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return "there is no such host or port"


class _DriverEndedError(EngineError):
    """The driver ended while a host was starting."""


@dataclass(slots=True)
class _Host:
    """What is known of a host."""

    started: asyncio.Future[Place]
    ended: asyncio.Future[str]


class RayPlacer:
    """Places engine hosts by Ray.

    Args:
        settings: `folder` is chosen here.
        driver: the module of the driver.
    """

    def __init__(self, settings: RaySettings, driver: str = "cloister.cluster.backend.ray") -> None:
        self._settings = settings
        self._module = driver
        self._hosts: dict[int, _Host] = {}
        self._num_hosts = 0
        self._driver: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._folder: str | None = None
        self._connecting = asyncio.Lock()
        self._has_connected = False

    async def connect(self) -> None:
        """Starts the driver if it does not run, and waits until Ray has a place for each replica.

        A Ray that was there before is waited for, however long its head is gone: its replicas come back with it.

        Raises:
            EngineError: it has not; the message says why.
        """
        async with self._connecting:
            if self._reading is not None and not self._reading.done():
                return
            if self._has_connected:
                await self._reconnect()
            else:
                await self._connect()
                self._has_connected = True

    async def _reconnect(self) -> None:
        pause_s, told = _FIRST_RETRY_S, ""
        while True:
            try:
                await self._connect()
            except EngineError as error:
                if error.message != told:
                    _logger.error("%s; the replicas start again when Ray is back", error.message)
                    told = error.message
            else:
                _logger.warning("Ray is back, with a place for each replica")
                return
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_RETRY_S, 2 * pause_s)

    async def _connect(self) -> None:
        await self._end_driver()
        await check_reachable(self._settings.address)
        try:
            reader = await self._start_driver()
            async with asyncio.timeout(CONNECT_S):
                report = await _read_report(reader)
        except TimeoutError:
            where = "" if self._settings.address is None else f" at {self._settings.address}"
            report = RayFailed(f"Ray{where} had no place for each replica within {CONNECT_S:.0f} s")
        except BaseException:
            await self._end_driver()
            raise
        if not isinstance(report, Connected):
            await self._end_driver()
            raise EngineError(report.message if isinstance(report, RayFailed) else DRIVER_ENDED)
        if report.takes_commands:
            _logger.warning(TAKES_COMMANDS)
        self._reading = asyncio.create_task(self._read(reader), name="Ray's driver")

    async def close(self) -> None:
        """Ends the driver, its hosts, and a Ray that it started."""
        await self._end_driver()

    def placement(self, index: int) -> RayPlacement:
        """Returns the placement of a replica."""
        return RayPlacement(self, index)

    def start_host(self, index: int) -> tuple[int, _Host]:
        """Asks for a host; returns its number."""
        self._num_hosts += 1
        loop = asyncio.get_running_loop()
        host = self._hosts[self._num_hosts] = _Host(loop.create_future(), loop.create_future())
        self._send(StartHost(self._num_hosts, index))
        return self._num_hosts, host

    def kill_host(self, number: int) -> None:
        """Ends a host."""
        self._send(KillHost(number))
        self._note_end(number, "it was killed")

    def _send(self, command: DriverCommand) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(command) + b"\n")

    async def _start_driver(self) -> asyncio.StreamReader:
        if self._settings.address is None:
            self._folder = make_folder()
        near, far = socket.socketpair()
        with far:
            self._driver = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(far.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **driver_variables(self._settings.address)},
                pass_fds=(far.fileno(),),
                process_group=0,
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=near)
        settings = msgspec.structs.replace(self._settings, folder=self._folder or "")
        self._writer.write(msgspec.json.encode(settings) + b"\n")
        return reader

    async def _end_driver(self) -> None:
        """Ends the driver, its hosts, and a Ray that it started. If it is cancelled, the next call goes on."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._writer is not None:
            self._writer.close()  # the driver ends with it, and what it started
            self._writer = None
        if (driver := self._driver) is not None:
            if not await _has_ended(driver, STOP_S):
                driver.kill()
                await _has_ended(driver, KILL_S)
            self._driver = None
        if (folder := self._folder) is not None:
            await asyncio.to_thread(remove_folder, folder)
            self._folder = None
        for number in list(self._hosts):
            self._note_end(number, DRIVER_ENDED)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Takes the driver's reports until it ends."""
        while (report := await _read_report(reader)) is not None:
            match report:
                case HostStarted() as said:
                    found = self._hosts.get(said.host)
                    if found is not None and not found.started.done():
                        found.started.set_result(
                            Place(said.address, said.port, said.certificate, said.num_threads, said.memory_share)
                        )
                case HostEnded(number, how):
                    self._note_end(number, how)
                case _:
                    pass
        _logger.error(DRIVER_ENDED)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for number in list(self._hosts):
            self._note_end(number, DRIVER_ENDED)

    def _note_end(self, number: int, how: str) -> None:
        host = self._hosts.pop(number, None)
        if host is None:
            return
        if not host.started.done():
            kind = _DriverEndedError if how is DRIVER_ENDED else EngineError
            host.started.set_exception(kind(f"Ray could not start the engine's host: {how}"))
            host.started.exception()  # perhaps nobody waits for it any more
        if not host.ended.done():
            host.ended.set_result(how)


class RayPlacement:
    """A replica's host, placed by Ray (protocol `Placement`)."""

    def __init__(self, placer: RayPlacer, index: int) -> None:
        self._placer = placer
        self._index = index
        self._number = 0
        self._host: _Host | None = None

    async def start(self) -> Place:
        while True:
            if self._host is None or self._host.ended.done():
                await self._placer.connect()
                self._number, self._host = self._placer.start_host(self._index)
            try:
                return await asyncio.shield(self._host.started)
            except _DriverEndedError:
                continue  # the next driver is asked, for as long as the caller waits
            except BaseException:
                self.kill()
                raise

    async def wait_ended(self) -> str:
        assert self._host is not None, "start it first"
        return await asyncio.shield(self._host.ended)

    def kill(self) -> None:
        if self._host is not None:
            self._placer.kill_host(self._number)
            self._host = None


async def _read_report(reader: asyncio.StreamReader) -> DriverReport | None:
    """Reads a driver's report; None if it has ended."""
    try:
        line = await reader.readline()
        return msgspec.json.decode(line, type=DriverReport) if line else None
    except (OSError, ValueError):  # ValueError: a line that is too long, or no report
        return None


async def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Waits for a process; returns whether it has ended in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while process.poll() is None:
                await asyncio.sleep(_EXIT_POLL_S)
    return process.poll() is not None
