"""The driver of Ray: `python -m cloister.cluster.backend.ray FD`. Nothing else imports Ray.

Each replica has a bundle of a placement group, and in it an actor that starts the engine's host on its machine, and a second
one beside it while a rolling update replaces the engine. The actor says where a host listens and when it ends; the host's
standard input ends with the actor. What passes through Ray are certificates, addresses and exit statuses: no key, no settings
of the engine, no request.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import ray
from ray._private import services
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cloister.cluster.backend.loop_watchdog import LoopWatchdog
from cloister.cluster.backend.node_resources import choose_num_cpus, share_memory
from cloister.cluster.backend.ray_folder import remove_folder
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
from cloister.cluster.remote.host_process import HostProcess
from cloister.types.errors import EngineError

RESERVE_S: Final = 100.0
"""Longest wait until a cluster has a place for each replica."""
LOST_JOB_S: Final = 45.0
"""If hosts have run, none runs and none starts for so long, Ray has ended this driver's job, as it does when the node beside it
dies. Then nothing ever starts; another driver has another job."""
HUNG_S: Final = 60.0
"""Longest call of Ray. Many block the event loop until the head replies, some without a limit; after as long without a head Ray
itself ends a process. The front starts another driver then."""
_raylet: Any = importlib.import_module("ray._raylet")  # its types lack what is used here
_OBJECT_STORE_BYTES: Final = 80 * 2**20  # Ray takes no less; nothing is put there
_NOTE_CHARS: Final = 200


class HostActor:
    """Runs the engine's hosts of a replica on the machine where Ray puts it: one, or two while one replaces the other."""

    def __init__(self) -> None:
        self._hosts: dict[int, HostProcess] = {}

    async def start(self, number: int, front: str) -> dict[str, Any]:
        """Starts a host for the front with this certificate; returns where it is, or an error."""
        address = ray.util.get_node_ip_address()
        try:
            host = self._hosts[number] = await HostProcess.start(front, address)
        except EngineError as error:
            return {"error": error.message}
        node = ray.get_runtime_context().get_node_id()
        return {"address": address, "port": host.report.port, "certificate": host.report.certificate, "node": node}

    async def wait_ended(self, number: int) -> str:
        """Waits until a host has ended; says how."""
        host = self._hosts.get(number)
        return "it was not started" if host is None else await host.wait()

    async def kill(self, number: int) -> None:
        """Kills a host, and its engine with it."""
        if (host := self._hosts.get(number)) is not None:
            host.kill()


@dataclass(slots=True)
class _Bundle:
    """What runs in a place of the placement group.

    Attributes:
        hosts: those that the front wants there.
    """

    actor: Any
    hosts: set[int] = field(default_factory=set)


class Driver:
    """Does what the front asks for.

    Args:
        settings: the front's.
        writer: to the front.
    """

    def __init__(self, settings: RaySettings, writer: asyncio.StreamWriter) -> None:
        self._settings = settings
        self._writer = writer
        self._bundles: dict[int, _Bundle] = {}
        self._running: set[int] = set()
        self._has_run = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_cpus = 0
        self._group: Any = None
        self._actor_class: Any = ray.remote(HostActor)  # each one that is made is sent to the head

    def connect(self) -> Connected:
        """Starts Ray or joins it, and reserves a place for each replica.

        Raises:
            EngineError: it cannot.
        """
        settings, head = self._settings, None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if settings.address is None:
                os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's processes yield to all others
                ray.init(
                    "local",
                    num_cpus=settings.num_replicas * (settings.num_cpus or 1),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=f"{settings.folder}/r",  # Ray opens the one that it gets to everybody
                    **quiet,
                )
            else:
                ensure_token_if_auth_enabled(create_token_if_missing=False)  # without one Ray would end this process
                # asks the head who it is, wherever `auto` says that it is: `ray.init` tries a wrong token for half a minute
                if (head := services.canonicalize_bootstrap_address(settings.address)) is not None:
                    _raylet.GcsClient(address=head)
                ray.init(settings.address, **quiet)
        except AuthenticationError:
            raise EngineError(
                f"the Ray cluster at {head or settings.address} refuses the token of this process, or this process has "
                "none; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as they are in the cluster"
            ) from None
        except Exception as error:  # of any class: a node that starts too slowly is an `Exception`
            raise EngineError(_explain(settings.address, error)) from None
        self._reserve()
        takes_commands = settings.address is not None and os.environ.get("RAY_AUTH_MODE") != "token"
        return Connected(len(self._node_cpus()), takes_commands)

    def _node_cpus(self) -> dict[str, int]:
        return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}

    def _reserve(self) -> None:
        settings, nodes = self._settings, list(self._node_cpus().values())
        num_cpus = settings.num_cpus or choose_num_cpus(nodes, settings.num_replicas)
        if num_cpus is None:
            raise EngineError(
                f"the Ray cluster has {sum(nodes)} CPUs on {len(nodes)} machines, too few for {settings.num_replicas} "
                "replicas; add machines, or set --replicas to less"
            )
        bundle = {"CPU": num_cpus, **({"GPU": settings.num_gpus} if settings.num_gpus else {})}
        self._num_cpus = num_cpus
        self._group = placement_group([bundle] * settings.num_replicas, strategy="SPREAD")
        if not self._group.wait(RESERVE_S):
            raise EngineError(
                f"the Ray cluster ({sum(nodes)} CPUs on {len(nodes)} machines) has no place for {settings.num_replicas} "
                f"replicas of {bundle} now; end other work there, add machines, or set --replicas or --num-threads to less"
            )

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Does what the front asks for until it has ended."""
        watch = LoopWatchdog(HUNG_S)
        watch.start()
        beating = asyncio.create_task(watch.beat())
        try:
            await self._obey(reader)
        except ConnectionError:
            pass  # the front was killed
        finally:
            beating.cancel()  # and this process ends in time

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            match msgspec.json.decode(line, type=DriverCommand):
                case StartHost(host, index):
                    task = asyncio.create_task(self._run_host(host, index))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case KillHost(host):
                    self._kill(host)

    def _enter(self, host: int, index: int) -> Any:
        """Returns the actor in which a host is to run: that of its place, or a new one if there is none."""
        if index not in self._bundles:
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = {"num_cpus": self._num_cpus, "num_gpus": self._settings.num_gpus, "scheduling_strategy": place}
            self._bundles[index] = _Bundle(self._actor_class.options(**options).remote())
        self._bundles[index].hosts.add(host)
        return self._bundles[index].actor

    async def _run_host(self, host: int, index: int) -> None:
        """Has a host run, and says what becomes of it."""
        actor: Any = None
        try:
            actor = self._enter(host, index)
            said = await self._start(actor, host)
            if host not in self._bundles.get(index, _Bundle(None)).hosts:
                actor.kill.remote(host)  # it was told to end before it had begun
            elif "error" in said:
                self.say(HostEnded(host, said["error"]))
            else:
                cpus = self._node_cpus().get(said["node"], self._num_cpus)
                share = share_memory(cpus, self._num_cpus, self._settings.num_replicas)
                self._running.add(host)
                self._has_run = True
                self.say(HostStarted(host, said["address"], said["port"], said["certificate"], self._num_cpus, share))
                self.say(HostEnded(host, await actor.wait_ended.remote(host)))
        except AuthenticationError:
            os._exit(1)  # another cluster is at this address now, which knows nothing of this job
        except RayError as error:
            self._end_bundle(index, actor)  # before the front asks for another host there
            self.say(HostEnded(host, f"Ray says {_note(error)}"))
        finally:
            self._running.discard(host)
            self._kill(host)

    async def _start(self, actor: Any, host: int) -> dict[str, Any]:
        """Has an actor start a host, for as long as that takes; ends this process if Ray has ended its job."""
        starting = asyncio.wrap_future(actor.start.remote(host, self._settings.front).future())
        starting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which nobody reads after a cancel
        while True:
            done, _ = await asyncio.wait([starting], timeout=LOST_JOB_S)
            if done:
                said: dict[str, Any] = starting.result()
                return said
            if self._has_run and not self._running:
                os._exit(1)  # `ray.shutdown` would wait for a node that is gone

    def _kill(self, host: int) -> None:
        """Ends a host, with its actor if that has no other one. Does nothing if it has ended."""
        found = next(((index, bundle) for index, bundle in self._bundles.items() if host in bundle.hosts), None)
        if found is None:
            return
        index, bundle = found
        bundle.hosts.discard(host)
        if not bundle.hosts:
            self._end_bundle(index, bundle.actor)
        elif ray.is_initialized():
            bundle.actor.kill.remote(host)

    def _end_bundle(self, index: int, actor: Any) -> None:
        """Ends an actor, and what runs in it; its place is free for another one."""
        bundle = self._bundles.get(index)
        if bundle is not None and bundle.actor is actor:
            del self._bundles[index]
            if ray.is_initialized():
                ray.kill(actor)

    async def close(self) -> None:
        """Ends all hosts, and Ray if it was started here."""
        for task in (tasks := set(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        ray.shutdown()
        if self._settings.folder:
            remove_folder(self._settings.folder)

    def say(self, report: DriverReport) -> None:
        """Reports to the front."""
        self._writer.write(msgspec.json.encode(report) + b"\n")


def _note(error: Exception) -> str:
    """The first line of an error of Ray, in short."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:_NOTE_CHARS]


def _explain(address: str | None, error: Exception) -> str:
    if address is None:
        return (
            f"Ray does not start on this machine ({_note(error)}); it may be too busy, or short of memory: try again when "
            "it has less to do, or leave `--on ray` out"
        )
    where = "HOST:PORT of its head" if address == "auto" else address
    return (
        f"the Ray cluster at {address} cannot be joined ({_note(error)}); a node of it must run on this machine: "
        f"ray start --address={where} --num-cpus=0, with the same versions of Ray and Python; if the cluster has a token, "
        "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN must be set here"
    )


async def _main(fd: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    settings = msgspec.json.decode(await reader.readline(), type=RaySettings)
    driver = Driver(settings, writer)
    try:
        driver.say(driver.connect())
        await driver.serve(reader)
    except EngineError as error:
        driver.say(RayFailed(error.message))
        await writer.drain()
    finally:
        await driver.close()


def main(fd: int) -> int:
    """Drives Ray for the front at the other end of a socket; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main(fd))
    return 0


if __name__ == "__main__":
    from cloister.cluster.backend.ray import main as main_of_module  # actors are of a module that other machines have, too

    sys.exit(main_of_module(int(sys.argv[1])))
