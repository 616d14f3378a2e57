"""A Ray of three raylets on this machine, four replicas of the embedded model on them, and one raylet killed under load.

    make cluster-demo

First one engine alone answers all prompts; then replicas on Ray answer them, and while they do the raylet with most replicas
gets SIGKILL. Prints what the client saw: answers that came, that are the same to the letter, gaps in streams, and how long
until all replicas were there again. The load goes on until the loss was seen and answers moved.

Needs the extra `ray`. Ray listens on loopback only, and ends with this program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.serving import ServeProcess, descendants

NUM_CPUS = 2
"""Logical CPUs of a raylet: replicas that it takes."""
TIMEOUT_S = 300.0
START_S = 240.0
CLEAN_UP_S = 20.0
LOSS_S = 60.0
"""After the kill a replica must be seen to be gone, and an answer have moved, in so long."""
PROMPTS = ("The king", "What does VACUUM do?", "Once upon a time", "A list of three fruits:", "To make bread, first", "The sea")
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
VARIABLES = {
    "RAY_AUTH_MODE": "token",
    LOOPBACK_ONLY: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
_CLONE_NEWNET = 0x40000000
NOBODY = "02:00:00:00:00:01"
"""Address of no network card."""


class Networks:
    """A network for each of several machines that are none: namespaces that one bridge joins (Linux, root)."""

    def __init__(self, num_networks: int) -> None:
        self._names = [f"cl-ray-{os.getpid()}-{index}" for index in range(num_networks)]
        self._bridge = f"clr{os.getpid()}"
        self.own_address = _address(0)
        _ip(f"link add {self._bridge} type bridge")
        try:
            _ip(f"addr add {self.own_address}/24 dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            for index, name in enumerate(self._names):
                self._add(index, name)
        except BaseException:
            self.close()
            raise

    def _add(self, index: int, name: str) -> None:
        near, far = f"{self._bridge}v{index}", f"{self._bridge}w{index}"
        _ip(f"netns add {name}")
        _ip(f"link add {near} type veth peer name {far} netns {name}")
        _ip(f"link set {near} master {self._bridge} up")
        for command in (f"addr add {self.address(index)}/24 dev {far}", f"link set {far} up", "link set lo up"):
            _ip(f"-n {name} {command}")

    def address(self, index: int) -> str:
        """Returns the address of a machine."""
        return _address(1 + index)

    @contextlib.contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """Moves this thread into a network; what it starts stays there."""
        with open("/proc/thread-self/ns/net") as before, open(f"/var/run/netns/{self._names[index]}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    @contextlib.contextmanager
    def cut_off(self, index: int) -> Iterator[None]:
        """Takes the network from a machine for a time: nothing arrives, and nothing is reset."""
        _ip(f"link set {self._bridge}v{index} down")
        try:
            yield
        finally:
            _ip(f"link set {self._bridge}v{index} up")

    @contextlib.contextmanager
    def drop(self, source: int | None, targets: Iterable[int | None]) -> Iterator[None]:
        """Drops what one machine sends to others for a time, and says nothing: its frames go to a neighbour that nobody is.

        Args:
            source: its network; None for this process's own.
        """
        where, device = ("", self._bridge) if source is None else (f"-n {self._names[source]} ", f"{self._bridge}w{source}")
        addresses = [self.own_address if target is None else self.address(target) for target in targets]
        for address in addresses:
            _ip(f"{where}neigh replace {address} lladdr {NOBODY} dev {device} nud permanent")
        try:
            yield
        finally:
            for address in addresses:
                _ip(f"{where}neigh del {address} dev {device}")

    def close(self) -> None:
        """Removes the networks."""
        for command in (*(f"netns delete {name}" for name in self._names), f"link delete {self._bridge}"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(command)


def _address(number: int) -> str:
    return f"10.247.{os.getpid() % 256}.{1 + number}"


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class LocalRay:
    """A Ray cluster of several raylets on this machine, on loopback.

    Args:
        num_raylets: with that of the head.
        apart: the head and each raylet have a network of their own. Then one more, without CPUs, is in the network of this
            process, for the front to join, and the head has no CPUs either.

    Attributes:
        address: where drivers join it.
        raylets: first the head's.
        front: number of the raylet beside the front.
    """

    def __init__(self, num_raylets: int, *, apart: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="cl-ray-", dir="/tmp")
        self._networks = Networks(num_raylets) if apart else None
        self._places: list[int | None] = [0, None, *range(1, num_raylets)] if apart else [None] * num_raylets
        self.front = 1 if apart else 0
        variables = {name: value for name, value in VARIABLES.items() if not (apart and name == LOOPBACK_ONLY)}
        os.environ.update(variables, RAY_TMPDIR=self._folder)  # before Ray is imported
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once in a process
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        self._cluster = Cluster()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self, port: int = 0) -> None:
        self.raylets: list[Any] = []
        for number, place in enumerate(self._places):
            with contextlib.ExitStack() as where:
                address = "127.0.0.1"
                if self._networks is not None:
                    address = self._networks.own_address if place is None else self._networks.address(place)
                    where.enter_context(contextlib.nullcontext() if place is None else self._networks.inside(place))
                takes_none = self._networks is not None and number <= self.front
                flags = {"num_cpus": 0 if takes_none else NUM_CPUS, "object_store_memory": 80 * 2**20}
                head = {} if number else {"include_dashboard": False, "no_monitor": True, "gcs_server_port": port}
                self.raylets.append(self._cluster.add_node(node_ip_address=address, **head, **flags))
        self.address: str = self._cluster.address

    def cut_off(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Takes the network from a raylet that has one of its own, for a time."""
        assert self._networks is not None
        place = self._places[index]
        assert place is not None
        return self._networks.cut_off(place)

    @contextlib.contextmanager
    def drop(self, sources: Iterable[int], targets: Iterable[int]) -> Iterator[None]:
        """Drops what some raylets' machines send to those of others for a time."""
        assert self._networks is not None
        places = [self._places[target] for target in targets]
        with contextlib.ExitStack() as dropping:
            for source in sources:
                dropping.enter_context(self._networks.drop(self._places[source], places))
            yield

    def raylet_of(self, replica: int) -> int:
        """Returns the raylet that has a replica of the one driver."""
        tables = self._cluster.global_state.placement_group_table().values()
        [group] = [table for table in tables if table["state"] == "CREATED"]
        node = group["bundles_to_node_id"][replica]
        return next(number for number, raylet in enumerate(self.raylets) if raylet.node_id == node)

    def raylet_pid(self, index: int) -> int:
        """Returns the process of a raylet; 0 is that of the head."""
        pid: int = self.raylets[index].all_processes["raylet"][0].process.pid
        return pid

    def num_hosts(self, index: int) -> int:
        """Counts the engine hosts below a raylet."""
        return sum(b"cloister.cluster.remote.host" in _command(pid) for pid in descendants(self.raylet_pid(index)))

    @property
    def busiest(self) -> int:
        """The raylet with the most replicas, without that of the head, to which the front is joined."""
        return max(range(1, len(self.raylets)), key=self.num_hosts)

    def actor_pids(self) -> list[int]:
        """Returns the processes of Ray that hold an engine host each."""
        found = [pid for index in range(len(self.raylets)) for pid in descendants(self.raylet_pid(index))]
        return [pid for pid in found if _command(pid).startswith(b"ray::HostActor")]

    def head_pids(self) -> list[int]:
        """Returns the processes of the head: the one that knows the cluster (GCS), and its raylet."""
        return [self.raylets[0].all_processes[name][0].process.pid for name in ("gcs_server", "raylet")]

    def kill_head(self) -> None:
        """SIGKILL to the head."""
        for pid in self.head_pids():
            os.kill(pid, signal.SIGKILL)

    def start_again(self) -> None:
        """Ends what is left of it, and starts another cluster at the same address, as an operator does whose head died."""
        from ray.cluster_utils import Cluster

        port = int(self.address.rpartition(":")[2])
        self._end_processes()
        self._cluster = Cluster(shutdown_at_exit=False)  # that would set signal handlers, which only a main thread can
        self._start(port)

    def _end_processes(self) -> None:
        """Ends its raylets and its head, and with them their actors; not what others have started on it."""
        with contextlib.suppress(Exception):  # a raylet that was killed is no reason to leave the others
            self._cluster.shutdown()

    def close(self) -> None:
        """Ends it, and removes its files."""
        self._end_processes()
        for pid in descendants(os.getpid()):
            if b"/ray/" in _command(pid) or _command(pid).startswith(b"ray::"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        give_up_s = time.monotonic() + CLEAN_UP_S
        while os.path.exists(self._folder) and time.monotonic() < give_up_s:  # what ends may still write there
            shutil.rmtree(self._folder, ignore_errors=True)
            time.sleep(0.1)
        if self._networks is not None:
            self._networks.close()


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return b""


@contextlib.contextmanager
def local_ray(num_raylets: int, *, apart: bool = False) -> Iterator[LocalRay]:
    """Runs a Ray, and ends it whatever happens."""
    ray = LocalRay(num_raylets, apart=apart)
    try:
        yield ray
    finally:
        ray.close()


def make_bodies(num_requests: int, max_tokens: int) -> list[dict[str, Any]]:
    """Returns requests: greedy ones, and sampled ones with a seed."""
    return [
        {
            "model": "cloister-5m", "prompt": f"{PROMPTS[n % len(PROMPTS)]} {n}", "max_tokens": max_tokens, "stream": True,
            "ignore_eos": True, **({"temperature": 0} if n % 2 else {"temperature": 0.8, "seed": n}),
        }
        for n in range(num_requests)
    ]  # fmt: skip


@dataclass
class Answer:
    """What a client saw of one answer.

    Attributes:
        times_s: when each piece of text came.
        fingerprints: every `system_fingerprint` that its pieces had.
    """

    text: str = ""
    finish_reason: str | None = None
    fingerprints: set[str] = field(default_factory=set)
    error: str | None = None
    times_s: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    """Streams one answer."""
    answer = Answer()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                answer.error = f"{reply.status_code}: {(await reply.aread())[:200]!r}"
                return answer
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    answer.error = piece["error"]["message"]
                    return answer
                answer.fingerprints.add(piece["system_fingerprint"])
                for choice in piece["choices"]:
                    answer.text += choice["text"]
                    answer.times_s.append(time.monotonic())
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


async def ask_all(
    url: str, bodies: Iterable[dict[str, Any]], num_at_once: int, answers: list[Answer | None] | dict[int, Answer]
) -> None:
    """Streams all answers, so many at once, into `answers`, by the place of their bodies."""
    waiting = iter(enumerate(bodies))

    async def work(client: httpx.AsyncClient) -> None:
        for index, body in waiting:
            answers[index] = await ask(client, url, body)

    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(work(client) for _ in range(num_at_once)))


def replicas_up(server: ServeProcess) -> int:
    """Counts the replicas that accept requests."""
    return round(server.metric("replica_up"))


@dataclass
class Outcome:
    """What the client saw, and when all replicas were there again.

    Attributes:
        num_killed: replicas of the raylet that was killed.
        first_loss_s: from the kill until a replica was seen to be gone.
        recovered_s: from the kill until all replicas accepted requests again; None: not in time.
        num_resumes: answers that went on in another replica.
        log: what the server printed.
    """

    answers: list[Answer]
    expected: list[Answer]
    start_s: float
    num_killed: int
    load_s: float
    killed_at_s: float
    first_loss_s: float | None
    recovered_s: float | None
    num_resumes: int
    log: str

    @property
    def num_answered(self) -> int:
        return sum(answer.error is None and answer.finish_reason is not None for answer in self.answers)

    @property
    def num_identical(self) -> int:
        return sum(
            (a.text, a.finish_reason, a.error) == (e.text, e.finish_reason, None)
            for a, e in zip(self.answers, itertools.cycle(self.expected), strict=False)
        )


async def kill_under_load(
    server: ServeProcess, ray: LocalRay, bodies: list[dict[str, Any]], num_at_once: int
) -> dict[str, Any]:
    """Loads a server, and kills the raylet with the most replicas (not the head, to which the front is joined)."""
    answers: dict[int, Answer] = {}
    num_replicas = replicas_up(server)
    begun_s = time.monotonic()
    is_over = False

    def list_bodies() -> Iterator[dict[str, Any]]:
        """Yields the bodies, and again from the first: Ray may notice the kill later than a short load takes."""
        yield from bodies
        for body in itertools.cycle(bodies):
            if is_over:
                return
            yield body

    loading = asyncio.create_task(ask_all(server.url, list_bodies(), num_at_once, answers))
    while len(answers) < len(bodies) // 4:
        await asyncio.sleep(0.02)
    victim = ray.busiest
    num_killed = ray.num_hosts(victim)
    killed_s = time.monotonic()
    os.kill(ray.raylet_pid(victim), signal.SIGKILL)
    first_loss_s = await _seconds_until(lambda: replicas_up(server) < num_replicas, killed_s, LOSS_S)
    await _seconds_until(lambda: server.metric("num_resumes_total") > 0, killed_s, LOSS_S)
    is_over = True
    recovering = asyncio.create_task(_seconds_until(lambda: replicas_up(server) == num_replicas, killed_s, TIMEOUT_S))
    await loading
    load_s = time.monotonic() - begun_s
    recovered_s = await recovering
    return {
        "answers": [answers[index] for index in sorted(answers)], "num_killed": num_killed, "load_s": load_s,
        "killed_at_s": killed_s, "first_loss_s": first_loss_s, "recovered_s": recovered_s,
        "num_resumes": round(server.metric("num_resumes_total")),
    }  # fmt: skip


async def _seconds_until(condition: Any, begun_s: float, limit_s: float) -> float | None:
    while time.monotonic() - begun_s < limit_s:
        if await asyncio.to_thread(condition):
            return time.monotonic() - begun_s
        await asyncio.sleep(0.05)
    return None


@contextlib.asynccontextmanager
async def serving(*flags: str, log: Path | None = None) -> AsyncIterator[tuple[ServeProcess, float]]:
    """Runs `cloister serve`, and says how long its start took. What it prints goes to `log`, if that is given."""
    begun_s = time.monotonic()
    server = await asyncio.to_thread(ServeProcess, *flags, log=log, timeout_s=START_S)
    try:
        yield server, time.monotonic() - begun_s
    finally:
        try:
            await asyncio.to_thread(server.stop)
        finally:
            with contextlib.suppress(OSError):
                server.kill()


async def run(num_raylets: int, num_replicas: int, num_requests: int, num_at_once: int, max_tokens: int) -> Outcome:
    """Runs everything; returns what was seen."""
    bodies = make_bodies(num_requests, max_tokens)
    expected: list[Answer | None] = [None] * num_requests
    async with serving("--num-threads", "1") as (alone, _):
        await ask_all(alone.url, bodies, num_at_once, expected)
    with local_ray(num_raylets) as ray:
        flags = ("--replicas", str(num_replicas), "--on", "ray", "--ray-address", ray.address, "--num-threads", "1",
                 "--kv-memory-mb", "64")  # fmt: skip
        async with serving(*flags) as (server, start_s):
            seen = await kill_under_load(server, ray, bodies, num_at_once)
            log = server.printed
    return Outcome(expected=[answer or Answer(error="never sent") for answer in expected], start_s=start_s, log=log, **seen)


def describe(outcome: Outcome) -> Iterator[str]:
    """Yields what the client saw."""
    total = len(outcome.answers)
    struck = [a for a in outcome.answers if a.times_s and a.times_s[0] < outcome.killed_at_s < a.times_s[-1]]
    gaps = sorted(answer.longest_gap_s for answer in struck)
    yield f"Ray, and replicas on it, were ready after {outcome.start_s:.1f} s"
    yield f"a raylet with {outcome.num_killed} replicas got SIGKILL while {len(struck)} answers were streaming"
    lost = "not seen" if outcome.first_loss_s is None else f"{outcome.first_loss_s:.2f} s"
    yield f"  first replica seen to be gone after {lost}; {outcome.num_resumes} answers went on in another one"
    if outcome.num_resumes == 0:
        yield f"  NO ANSWER MOVED within {LOSS_S:.0f} s of the kill, so this run shows nothing; try again with more --streams"
    if gaps:
        yield f"  longest gap in each of these streams: median {gaps[len(gaps) // 2]:.2f} s, at most {gaps[-1]:.2f} s"
    back = "not in time" if outcome.recovered_s is None else f"{outcome.recovered_s:.1f} s"
    yield f"  all replicas were there again after {back}"
    counts = (
        f"{outcome.num_answered} answered, {outcome.num_identical} as one engine alone, {total - outcome.num_answered} lost"
    )
    yield f"{total} requests in {outcome.load_s:.1f} s: {counts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raylets", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends, too
    outcome = asyncio.run(run(given.raylets, given.replicas, given.requests, given.streams, given.max_tokens))
    for line in describe(outcome):
        print(line)
    is_well = outcome.num_identical == len(outcome.answers) and outcome.recovered_s is not None and outcome.num_resumes > 0
    if not is_well:
        for answer in outcome.answers:
            if answer.error is not None:
                print(answer.error)
        print(outcome.log)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
