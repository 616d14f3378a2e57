"""A driver (`cluster.backend.placer`) that starts hosts on this machine, without Ray: for tests of the front's side.

Its cluster is gone while there is a file at its address, which gets a line for each attempt to join. Without an address it
starts what outlives it for a minute and makes its folder anew again and again, as processes of Ray do for some seconds.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from cloister.cluster.backend.ray_messages import (
    Connected,
    DriverCommand,
    HostEnded,
    HostStarted,
    KillHost,
    RayFailed,
    RaySettings,
    StartHost,
)
from cloister.cluster.remote.host_process import HostProcess

STRAGGLER = """
import contextlib, os, sys, time
os.makedirs(sys.argv[1])
with open(sys.argv[1] + "/log", "w"):
    for _ in range(6000):
        with contextlib.suppress(OSError):
            os.makedirs(sys.argv[1] + "/more", exist_ok=True)
        time.sleep(0.01)
"""


async def main(fd: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    settings = msgspec.json.decode(await reader.readline(), type=RaySettings)
    hosts: dict[int, HostProcess] = {}

    def say(report: msgspec.Struct) -> None:
        writer.write(msgspec.json.encode(report) + b"\n")

    async def run_host(number: int) -> None:
        host = hosts[number] = await HostProcess.start(settings.front, "127.0.0.1")
        say(HostStarted(number, "127.0.0.1", host.report.port, host.report.certificate, 1, 0.5))
        say(HostEnded(number, await host.wait()))

    if settings.address is None:
        command = [sys.executable, "-c", STRAGGLER, f"{settings.folder}/r"]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        while not Path(settings.folder, "r", "log").exists():
            await asyncio.sleep(0.01)
    gone = Path(settings.address or "nowhere")
    if gone.exists() or settings.address == "nowhere" or settings.num_replicas == 0:
        if gone.exists():
            with gone.open("a") as file:
                file.write("tried\n")
        say(RayFailed("there is no such cluster"))
        await writer.drain()
        return
    say(Connected(1, False))
    tasks = []
    while line := await reader.readline():
        match msgspec.json.decode(line, type=DriverCommand):
            case StartHost(number, 7):
                say(HostEnded(number, "no machine is left"))
            case StartHost(number, _):
                tasks.append(asyncio.create_task(run_host(number)))
            case KillHost(number) if number in hosts:
                hosts[number].kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
