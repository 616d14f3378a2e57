"""Answers of clusters of real processes, while something is done to them: `python -m benchmarks.cluster_faults`.

One engine alone answers all prompts first: greedy and seeded ones, a quarter with a grammar and a quarter with an adapter. Then
each layout of replicas answers the same, several at once, without a fault and with each fault. Prints what the client saw:
answers that came, that are the same to the letter, requests that were refused because no engine ran (503) and were not sent
again, those that were lost after they were accepted, the longest gap in a stream, and how long a replica was seen to be gone.

With `--on ray` they are on a Ray of three raylets on this machine, and faults are of Ray's processes too. With `--apart` each
raylet has a network of its own (which takes root), so that KV goes over TLS, and networks fail too: `cut off raylet`, and
what is sent in one direction is dropped without a word (`to first's machine 3 s` and so on: of the first replica, which
prefills where there are roles, of the last one, of Ray's head, and of the front).

Layouts of `DISK_LAYOUTS` run only if they are named: their KV tier, their log and their temporary files are on a small disk of
their own (which takes root), and `disk full` takes the rest of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import httpx
from rich.table import Table

from benchmarks.cluster_demo import PROMPTS, TIMEOUT_S, Answer, LocalRay, ask, ask_all, local_ray, replicas_up, serving
from benchmarks.foreign_sockets import KVConnection, deaf, deafen, ends_at, ends_to, strike_transfer
from benchmarks.harness import console
from cloister.models import locate
from tests.adapter_factory import write_adapter
from tests.serving import ServeProcess, descendants, find_processes

RECOVER_S: Final = 120.0
SHAPE: Final = r"[a-z]{2,8}( [a-z]{2,8}){40,60}\."
LAYOUTS: Final = {
    "2 mixed": ("--replicas", "2"),
    "2 mixed, KV moves": ("--replicas", "2", "--kv-transfer", "KV", "--rebalance"),
    "4 mixed, prefix_aware, --rebalance": ("--replicas", "4", "--router", "prefix_aware", "--rebalance"),
    "1 prefill, 1 decode": ("--replicas", "2", "--kv-transfer", "KV", "--prefill", "1", "--decode", "1"),
    "2 prefill, 2 decode": ("--replicas", "4", "--kv-transfer", "KV", "--prefill", "2", "--decode", "2"),
    "2 prefill, 2 decode, conductor": (
        "--replicas", "4", "--kv-transfer", "KV", "--prefill", "2", "--decode", "2", "--router", "conductor",
    ),
}  # fmt: skip
DISK_LAYOUTS: Final = {
    "2 mixed, KV tier on a small disk": (
        "--replicas", "2", "--kv-memory-mb", "4", "--max-model-len", "2048", "--kv-tier", "disk:DISK,1G", "--log-requests",
        "--cache-scopes", "0",
    ),
}  # fmt: skip
ALL_LAYOUTS: Final = LAYOUTS | DISK_LAYOUTS
DISK_MIB: Final = 24
KV: Final = {"local": "shm", "ray": "shm,tls"}
NUM_RAYLETS: Final = 3
HEAD_AWAY_S: Final = 15.0
STARVED_S: Final = 5.0
TRANSFER_S: Final = 40.0
"""Longest wait for a transfer of KV."""
STRIKE_PAUSE_S: Final = 1.0
REFUSED_PAUSE_S: Final = 1.0
"""Pause of a client that was refused, while requests are asked again and again."""


@dataclass(frozen=True)
class Cluster:
    """What a fault is done to.

    Attributes:
        ray: on which its replicas are; None: they are children of the server.
        disk: a small one of its own.
    """

    server: ServeProcess
    ray: LocalRay | None = None
    disk: Path | None = None

    def engine_pids(self) -> list[int]:
        """Returns the engines' processes, in the order of their start."""
        return find_processes(os.getpid(), "engine")

    @property
    def pids(self) -> list[int]:
        """All processes of the server."""
        return [self.server.process.pid, *descendants(self.server.process.pid)]

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.server.url.rpartition(":")[2])

    @property
    def known_ray(self) -> LocalRay:
        """Its Ray, of which there is one."""
        assert self.ray is not None
        return self.ray


Fault = Callable[[Cluster], Awaitable[None]]
Way = Literal["to", "from"]
Whose = Literal["first", "last", "head", "front"]


def make_bodies(num_requests: int, max_tokens: int, model: str, repeats: int = 1) -> list[dict[str, Any]]:
    """Returns requests: greedy and seeded ones, and among them some with a grammar and some with the adapter `ann`.

    Args:
        repeats: how often each prompt, of some hundred tokens at most, repeats itself.
    """
    bodies = []
    for number in range(num_requests):
        body: dict[str, Any] = {
            "model": model, "prompt": f"{PROMPTS[number % len(PROMPTS)]} {number}" + " and so on" * (number % 30 * repeats),
            "max_tokens": max_tokens, "stream": True,
        }  # fmt: skip
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        body |= {"guided_regex": SHAPE} if number % 4 == 2 else {"ignore_eos": True}
        if number % 4 == 3:
            body["model"] = "ann"
        bodies.append(body)
    return bodies


async def nothing(cluster: Cluster) -> None:
    """No fault."""


async def kill_first(cluster: Cluster) -> None:
    """SIGKILL to the first engine, which computes prompts where there are roles."""
    os.kill(cluster.engine_pids()[0], signal.SIGKILL)


async def kill_last(cluster: Cluster) -> None:
    """SIGKILL to the last engine, which goes on with answers where there are roles."""
    os.kill(cluster.engine_pids()[-1], signal.SIGKILL)


async def kill_all(cluster: Cluster) -> None:
    """SIGKILL to every engine at once."""
    for pid in cluster.engine_pids():
        os.kill(pid, signal.SIGKILL)


async def stop_first(cluster: Cluster) -> None:
    """SIGSTOP to the first engine, which hangs then."""
    os.kill(cluster.engine_pids()[0], signal.SIGSTOP)


async def stop_one(cluster: Cluster) -> None:
    """SIGSTOP to the last engine, which hangs then."""
    os.kill(cluster.engine_pids()[-1], signal.SIGSTOP)


def pause(find: Callable[[Cluster], list[int]], lasts_s: float) -> Fault:
    """Makes a fault: SIGSTOP to processes, and SIGCONT some time later."""

    async def pause_some(cluster: Cluster) -> None:
        pids = find(cluster)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(lasts_s if number == signal.SIGSTOP else 0.0)

    return pause_some


def front_pids(cluster: Cluster) -> list[int]:
    """The front's process alone."""
    return [cluster.server.process.pid]


def head_pids(cluster: Cluster) -> list[int]:
    """Ray's head: the process that knows the cluster (GCS), and its raylet."""
    return cluster.known_ray.head_pids()


def raylet_pids(cluster: Cluster) -> list[int]:
    """The raylet with the most replicas, without what runs on it."""
    return [cluster.known_ray.raylet_pid(cluster.known_ray.busiest)]


def worker_pids(cluster: Cluster) -> list[int]:
    """The raylet with the most replicas, and all that runs on it."""
    [raylet] = raylet_pids(cluster)
    return [raylet, *descendants(raylet)]


def starve(find: Callable[[Cluster], list[int]]) -> Fault:
    """Makes a fault: processes get a tenth of a processor together for five seconds, in a control group of their own."""

    async def starve_some(cluster: Cluster) -> None:
        with a_tenth_of_a_cpu(find(cluster)):
            await asyncio.sleep(STARVED_S)

    return starve_some


@contextlib.contextmanager
def a_tenth_of_a_cpu(pids: list[int]) -> Iterator[None]:
    """Limits processes to 10 of every 100 ms together (cgroups(7), of either version; takes root)."""
    is_first_version = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists() or Path("/sys/fs/cgroup/cpu/cgroup.procs").exists()
    root = Path("/sys/fs/cgroup/cpu" if is_first_version else "/sys/fs/cgroup")
    group = root / f"cloister-faults-{os.getpid()}"
    group.mkdir()
    try:
        if is_first_version:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            (group / "cpu.max").write_text("10000 100000")
        _put_into(group, pids)
        yield
    finally:
        _put_into(root, map(int, (group / "cgroup.procs").read_text().split()))
        group.rmdir()


def _put_into(group: Path, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def fail_front(way: Way, lasts_s: float) -> Fault:
    """Makes a fault: what the front's clients send it, or what it sends them, is dropped; no side is told."""

    async def drop_one_way(cluster: Cluster) -> None:
        find = partial(ends_at, cluster.port, cluster.pids) if way == "to" else partial(ends_to, cluster.port, [os.getpid()])
        ends_s = time.monotonic() + lasts_s
        with deaf(find) as look:
            while time.monotonic() < ends_s:
                await asyncio.sleep(0.05)
                look()

    return drop_one_way


def strike_transfers(act: Callable[[KVConnection], None], num_strikes: int) -> Fault:
    """Makes a fault: something is done to transfers of KV, each time while bytes flow. Where no roles have them, replicas are
    drained meanwhile, so that running requests move."""

    async def strike_some(cluster: Cluster) -> None:
        draining = None if "--prefill" in cluster.server.command else asyncio.create_task(drain_for_ever(cluster))
        over_tls = any("tls" in flag for flag in cluster.server.command)
        struck = []
        for _ in range(num_strikes):
            found = await asyncio.to_thread(strike_transfer, cluster.engine_pids, over_tls, act, TRANSFER_S)
            if found is not None:
                struck.append(found)
                await asyncio.sleep(STRIKE_PAUSE_S)
        if draining is not None:
            draining.cancel()
            await asyncio.wait([draining])
            await return_all(cluster)
        console.print(f"  {len(struck)} transfers were struck; bytes that had arrived (Unix: on their way): {struck}")
        if not struck:
            raise RuntimeError("no KV flowed in time, so nothing was done to it; ask for longer prompts (--prompt-repeats)")

    return strike_some


async def cut_transfers(cluster: Cluster) -> None:
    """Each engine in turn is stopped, so that KV on its way to others stops too, and killed while they wait for the rest."""
    for pid in cluster.engine_pids():
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(5.0)  # there is another one by then


async def drain_for_ever(cluster: Cluster) -> None:
    """Drains and returns one replica after the other until it is cancelled."""
    while True:
        await drain_each(cluster)


async def return_all(cluster: Cluster) -> None:
    """Returns every replica."""
    async with httpx.AsyncClient(base_url=cluster.server.url, timeout=60.0) as client:
        for index in range(int(cluster.server.command[cluster.server.command.index("--replicas") + 1])):
            await client.post(f"/v1/replicas/{index}/return")


def lose_to_asker(found: KVConnection) -> None:
    """What the source sends is dropped from now on; what the asker sends arrives."""
    if found.asker_end is not None:
        deafen(found.asker_end)


def lose_to_source(found: KVConnection) -> None:
    """What the asker sends is dropped from now on, acknowledgements too; what the source sends arrives."""
    deafen(found.source_end)


async def drain_each(cluster: Cluster) -> None:
    """Each replica in turn is drained and returned, so that its requests move."""
    async with httpx.AsyncClient(base_url=cluster.server.url, timeout=60.0) as client:
        for index in range(replicas_up(cluster.server)):
            for verb in ("drain", "return"):
                reply = await client.post(f"/v1/replicas/{index}/{verb}")
                if reply.status_code != 200:
                    console.print(f"{verb} of replica {index}: {reply.text}")


async def kill_actor(cluster: Cluster) -> None:
    """SIGKILL to the process of Ray that holds an engine's host."""
    os.kill(cluster.known_ray.actor_pids()[-1], signal.SIGKILL)


async def stop_actor(cluster: Cluster) -> None:
    """SIGSTOP to the process of Ray that holds an engine's host."""
    os.kill(cluster.known_ray.actor_pids()[-1], signal.SIGSTOP)


async def kill_raylet(cluster: Cluster) -> None:
    """SIGKILL to the raylet with the most replicas."""
    ray = cluster.known_ray
    os.kill(ray.raylet_pid(ray.busiest), signal.SIGKILL)


async def cut_off_raylet(cluster: Cluster) -> None:
    """The raylet with the most replicas loses its network for ten seconds."""
    ray = cluster.known_ray
    with ray.cut_off(ray.busiest):
        await asyncio.sleep(10.0)


def drop(way: Way, whose: Whose, lasts_s: float) -> Fault:
    """Makes a fault: what all others send to a machine is dropped, or what it sends to them, so that connections stay half
    open."""

    async def drop_one_way(cluster: Cluster) -> None:
        ray = cluster.known_ray
        one = find_machine(cluster, whose)
        others = [number for number in range(len(ray.raylets)) if number != one]
        sources, targets = ([one], others) if way == "from" else (others, [one])
        with ray.drop(sources, targets):
            await asyncio.sleep(lasts_s)

    return drop_one_way


def drop_between(lasts_s: float) -> Fault:
    """Makes a fault: what the first replica's machine sends to the last one's is dropped, such as KV; others reach both."""

    async def drop_one_way(cluster: Cluster) -> None:
        with cluster.known_ray.drop([find_machine(cluster, "first")], [find_machine(cluster, "last")]):
            await asyncio.sleep(lasts_s)

    return drop_one_way


def find_machine(cluster: Cluster, whose: Whose) -> int:
    """Returns the number of a raylet: of the first or last replica, of the head, or that beside the front."""
    ray, num_replicas = cluster.known_ray, replicas_up(cluster.server)
    match whose:
        case "first":
            return ray.raylet_of(0)
        case "last":
            return ray.raylet_of(num_replicas - 1)
        case "head":
            return 0
        case "front":
            return ray.front


async def fill_disk(cluster: Cluster) -> None:
    """Something else takes all that is left of the disk, and what is deleted there."""
    assert cluster.disk is not None
    with (cluster.disk / "something else").open("wb", buffering=0) as file:
        for _ in range(50):
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            await asyncio.sleep(0.1)
    console.print(f"  {shutil.disk_usage(cluster.disk)}")


async def kill_head(cluster: Cluster) -> None:
    """SIGKILL to the head of Ray, which stays away."""
    cluster.known_ray.kill_head()


async def replace_head(cluster: Cluster) -> None:
    """SIGKILL to the head of Ray; all of Ray is started again at its address some time later."""
    cluster.known_ray.kill_head()
    await asyncio.sleep(HEAD_AWAY_S)
    await asyncio.to_thread(cluster.known_ray.start_again)


async def kill_own_head(cluster: Cluster) -> None:
    """SIGKILL to the head (GCS) of the server's own Ray."""
    kill_below(cluster.server, b"gcs_server")


async def kill_own_raylet(cluster: Cluster) -> None:
    """SIGKILL to the raylet of the server's own Ray."""
    kill_below(cluster.server, b"/raylet/raylet")


async def kill_driver(cluster: Cluster) -> None:
    """SIGKILL to the process that speaks to Ray for the front."""
    kill_below(cluster.server, b"cluster.backend.ray")


def kill_below(server: ServeProcess, part: bytes) -> None:
    """SIGKILL to the first process below a server whose command has such a part."""
    pid = next(pid for pid in descendants(server.process.pid) if part in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(pid, signal.SIGKILL)


LOST_S: Final = (3.0, 15.0)
"""For how long packets are dropped: less and more than what a link waits for an acknowledgement."""
STARVED: Final[dict[str, Fault]] = {
    "a tenth of a CPU, first": starve(lambda cluster: cluster.engine_pids()[:1]),
    "a tenth of a CPU, last": starve(lambda cluster: cluster.engine_pids()[-1:]),
    "a tenth of a CPU, front": starve(front_pids),
}
RAY_STARVED: Final[dict[str, Fault]] = {
    "a tenth of a CPU, head": starve(head_pids), "a tenth of a CPU, worker": starve(worker_pids),
}  # fmt: skip
PAUSED_S: Final = 15.0
RAY_PAUSED: Final[dict[str, Fault]] = {
    "SIGSTOP head 15 s": pause(head_pids, PAUSED_S), "SIGSTOP raylet 15 s": pause(raylet_pids, PAUSED_S),
    "SIGSTOP worker 15 s": pause(worker_pids, PAUSED_S),
}  # fmt: skip
STOPPED: Final[dict[str, Fault]] = {
    "SIGSTOP first": stop_first, "SIGSTOP one": stop_one, "SIGSTOP front 10 s": pause(front_pids, 10.0),
}  # fmt: skip
FRONT_FAULTS: Final[dict[str, Fault]] = {
    f"{way} front {lasts_s:.0f} s": fail_front(way, lasts_s) for way in get_args(Way) for lasts_s in LOST_S
}
TRANSFER_FAULTS: Final[dict[str, Fault]] = {
    "KV flows, kill -9 of its source": strike_transfers(lambda found: os.kill(found.source, signal.SIGKILL), 2),
    "KV flows, kill -9 of its target": strike_transfers(lambda found: os.kill(found.asker, signal.SIGKILL), 2),
    "KV flows, SIGSTOP of its source": strike_transfers(lambda found: os.kill(found.source, signal.SIGSTOP), 1),
    "KV flows, SIGSTOP of its target": strike_transfers(lambda found: os.kill(found.asker, signal.SIGSTOP), 1),
    "KV flows, its connection is cut": strike_transfers(KVConnection.cut, 6),
}
TLS_FAULTS: Final[dict[str, Fault]] = {
    "KV flows, what its source sends is dropped": strike_transfers(lose_to_asker, 4),
    "KV flows, what its target sends is dropped": strike_transfers(lose_to_source, 4),
}
FAULTS: Final[dict[str, Fault]] = {
    "none": nothing, "kill -9 first": kill_first, "kill -9 last": kill_last, "kill -9 all": kill_all, **STOPPED,
    "drain each": drain_each, **STARVED, **FRONT_FAULTS,
}  # fmt: skip
RAY_FAULTS: Final[dict[str, Fault]] = {
    "none": nothing, "kill -9 first": kill_first, "kill -9 last": kill_last, "kill -9 actor": kill_actor,
    "SIGSTOP actor": stop_actor, "drain each": drain_each, "cut transfers": cut_transfers,
    **STOPPED, **STARVED, **RAY_PAUSED, **RAY_STARVED,
    "kill -9 raylet": kill_raylet, "kill -9 driver": kill_driver, "kill -9 head": kill_head, "replace head": replace_head,
    "cut off raylet": cut_off_raylet,
}  # fmt: skip
NETWORK_FAULTS: Final[dict[str, Fault]] = {
    f"{way} {whose}'s machine {lasts_s:.0f} s": drop(way, whose, lasts_s)
    for whose, way, lasts_s in itertools.product(get_args(Whose), get_args(Way), LOST_S)
} | {f"first's to last's machine {lasts_s:.0f} s": drop_between(lasts_s) for lasts_s in LOST_S}
DISK_FAULTS: Final[dict[str, Fault]] = {"none": nothing, "disk full": fill_disk, "kill -9 first": kill_first}
OWN_RAY_FAULTS: Final[dict[str, Fault]] = {
    "none": nothing, "kill -9 first": kill_first, "kill -9 last": kill_last, "kill -9 driver": kill_driver,
    "kill -9 own head": kill_own_head, "kill -9 own raylet": kill_own_raylet,
}  # fmt: skip
ALL_FAULTS: Final = FAULTS | TRANSFER_FAULTS | TLS_FAULTS | RAY_FAULTS | NETWORK_FAULTS | OWN_RAY_FAULTS | DISK_FAULTS
ENDS_RAYLETS: Final = ("kill -9 raylet", "kill -9 head", "replace head", "cut off raylet")
"""Other faults leave a Ray that can be used again."""


@dataclass(frozen=True)
class Outcome:
    """What a client saw of a layout under a fault.

    Attributes:
        num_refused: requests that got a 503, or whose body did not arrive (408).
        num_lost: requests that were accepted and not answered.
        gone_s: from when a replica was first seen to accept nothing until all accepted requests; None if none was.
        is_whole: all replicas accepted requests in the end.
        num_kv_loads: how often KV came from another replica.
    """

    num_answered: int
    num_identical: int
    num_refused: int
    num_lost: int
    longest_gap_s: float
    load_s: float
    gone_s: float | None
    is_whole: bool
    num_resumes: int
    num_moves: int
    num_kv_loads: int


async def strike(
    cluster: Cluster, bodies: list[dict[str, Any]], expected: list[Answer | None], fault: Fault, given: argparse.Namespace
) -> Outcome:
    """Loads a server and does something to it once a fifth of the answers have come."""
    server = cluster.server
    answers: dict[int, Answer] = {}
    num_replicas = replicas_up(server)
    begun_s = time.monotonic()
    struck: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()
    loading = asyncio.create_task(load(server.url, bodies, given, answers, struck, over))
    while len(answers) < len(bodies) // 5:
        await asyncio.sleep(0.02)
    struck.set_result(time.monotonic())
    watching = asyncio.create_task(watch_replicas(server, num_replicas, loading))
    await fault(cluster)
    over.set()
    await loading
    load_s = time.monotonic() - begun_s
    gone_s, is_whole = await watching
    seen = [answers[number] for number in sorted(answers)]
    pairs = [(answer, expected[number % len(bodies)] or Answer()) for number, answer in sorted(answers.items())]
    num_answered = sum(a.error is None and a.finish_reason is not None for a in seen)
    for error in sorted({a.error for a in seen if a.error}):
        console.print(f"  {error}")
    return Outcome(
        num_answered,
        sum((a.text, a.finish_reason, a.error) == (e.text, e.finish_reason, None) for a, e in pairs),
        sum(_is_refused(answer) for answer in seen),
        sum(not _is_refused(answer) for answer in seen) - num_answered,
        max(answer.longest_gap_s for answer in seen),
        load_s,
        gone_s,
        is_whole,
        round(server.metric("num_resumes_total")),
        round(server.metric("replica_migrated_total")),
        round(server.metric("replica_kv_loads_total")),
    )


async def load(
    url: str,
    bodies: list[dict[str, Any]],
    given: argparse.Namespace,
    answers: dict[int, Answer],
    struck: asyncio.Future[float],
    over: asyncio.Event,
) -> None:
    """Streams all answers, several at once, and all of them again until the fault is over and `given.load_s` have passed since
    it began."""
    numbers = itertools.count()

    def goes_on() -> bool:
        return given.load_s > 0 and not (over.is_set() and time.monotonic() - struck.result() > given.load_s)

    async def work(client: httpx.AsyncClient) -> None:
        while (number := next(numbers)) < len(bodies) or goes_on():
            again, which = divmod(number, len(bodies))
            answers[number] = await ask(client, url, bodies[which] | {"cache_salt": str(again)})  # so that KV moves again
            if given.load_s and _is_refused(answers[number]):
                await asyncio.sleep(REFUSED_PAUSE_S)

    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(work(client) for _ in range(given.streams)))


async def watch_replicas(server: ServeProcess, num_replicas: int, loading: asyncio.Task[None]) -> tuple[float | None, bool]:
    """Returns `Outcome.gone_s` and `Outcome.is_whole`, some time after the load at most."""
    first_s: float | None = None
    gone_s: float | None = None
    give_up_s = math.inf
    while time.monotonic() < give_up_s:
        try:
            is_whole = await asyncio.to_thread(replicas_up, server) == num_replicas
        except httpx.TransportError:  # the front itself cannot be reached
            is_whole = False
        if not is_whole and first_s is None:
            first_s = time.monotonic()
        if is_whole and first_s is not None:
            gone_s = gone_s or time.monotonic() - first_s
        if loading.done():
            if is_whole:
                return gone_s, True
            give_up_s = min(give_up_s, time.monotonic() + RECOVER_S)
        await asyncio.sleep(0.02)
    return gone_s, False


def _is_refused(answer: Answer) -> bool:
    """Whether a request was never accepted: no engine ran (503), or its body did not arrive in time (408)."""
    return answer.error is not None and answer.error.startswith(("503", "408")) and not answer.times_s


def choose_faults(given: argparse.Namespace, layout: str) -> list[str]:
    """Returns all faults of a cluster like this one."""
    if layout in DISK_LAYOUTS:
        return list(DISK_FAULTS)
    if given.on == "local":
        moves_kv, over_tls = "--kv-transfer" in ALL_LAYOUTS[layout], "tls" in (given.kv or "")
        return [*FAULTS, *(TRANSFER_FAULTS if moves_kv else ()), *(TLS_FAULTS if moves_kv and over_tls else ())]
    if given.own:
        return list(OWN_RAY_FAULTS)
    return [*RAY_FAULTS, *NETWORK_FAULTS] if given.apart else [name for name in RAY_FAULTS if name != "cut off raylet"]


@contextlib.contextmanager
def small_disk(layout: str) -> Iterator[Path | None]:
    """Mounts a disk for a layout that has one, on which temporary files of what starts meanwhile are."""
    if layout not in DISK_LAYOUTS:
        yield None
        return
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", folder], check=True)
        os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("TMPDIR")
            os.environ |= {} if before is None else {"TMPDIR": before}
            subprocess.run(["umount", folder], check=True)


async def run(given: argparse.Namespace) -> list[tuple[str, str, Outcome]]:
    """Runs every layout with every fault."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        adapter = write_adapter(Path(folder) / "ann", locate(given.model), size=0.05)
        flags = ("--model", given.model, "--num-threads", "1", "--kv-memory-mb", "64", "--stall-timeout-s", "2",
                 "--lora", f"ann={adapter}", *given.flags.split())  # fmt: skip
        bodies = make_bodies(given.requests, given.max_tokens, given.model, given.prompt_repeats)
        expected: list[Answer | None] = [None] * len(bodies)
        async with serving(*flags) as (alone, _):
            await ask_all(alone.url, bodies, given.streams, expected)
        num_texts = len({answer.text for answer in expected if answer})
        console.print(
            f"one engine alone: {sum(a is not None and a.error is None for a in expected)} answers, {num_texts} texts"
        )
        with contextlib.ExitStack() as rays:
            ray = None
            runs = [
                (layout, name) for layout in given.layouts or LAYOUTS for name in given.faults or choose_faults(given, layout)
            ]
            for layout, name in runs:
                if given.on == "ray" and not given.own and ray is None:
                    ray = rays.enter_context(local_ray(NUM_RAYLETS, apart=given.apart))
                where = ("--on", given.on, *(() if ray is None else ("--ray-address", ray.address)))
                with small_disk(layout) as disk:
                    words = {"KV": given.kv or KV[given.on], "disk:DISK,1G": f"disk:{disk},1G"}
                    layout_flags = [words.get(flag, flag) for flag in ALL_LAYOUTS[layout]]
                    log = None if disk is None else disk / "log"
                    async with serving(*flags, *layout_flags, *where, log=log) as (server, _):
                        outcome = await strike(Cluster(server, ray, disk), bodies, expected, ALL_FAULTS[name], given)
                        if given.log:
                            Path(given.log).write_text(server.printed)
                if name in ENDS_RAYLETS or not outcome.is_whole:
                    rays.close()
                    ray = None
                console.print(f"{layout}; {name}: {outcome}")
                outcomes.append((layout, name, outcome))
    return outcomes


def show(outcomes: list[tuple[str, str, Outcome]]) -> None:
    """Prints a table."""
    columns = ("layout", "fault", "answered", "identical", "refused", "lost", "longest gap, s", "gone, s", "resumed", "moved",
               "KV loads")  # fmt: skip
    table = Table(*columns)
    for layout, name, seen in outcomes:
        gone = "not seen" if seen.gone_s is None else f"{seen.gone_s:.2f}"
        gone = gone if seen.is_whole else "for good"
        counts = (seen.num_answered, seen.num_identical, seen.num_refused, seen.num_lost)
        table.add_row(
            layout,
            name,
            *map(str, counts),
            f"{seen.longest_gap_s:.2f}",
            gone,
            str(seen.num_resumes),
            str(seen.num_moves),
            str(seen.num_kv_loads),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--on", default="local", choices=list(KV))
    parser.add_argument("--apart", action="store_true", help="with --on ray: a network namespace for each raylet")
    parser.add_argument("--kv", help="how KV passes (shm; on Ray shm,tls), such as unix or tls://127.0.0.1:0")
    parser.add_argument("--layouts", nargs="*", choices=list(ALL_LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--faults", nargs="*", choices=list(ALL_FAULTS), metavar="FAULT")
    parser.add_argument("--own", action="store_true", help="with --on ray: the server starts a Ray of its own")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--load-s", type=float, default=0.0, help="ask all again until so many seconds after the fault")
    parser.add_argument(
        "--prompt-repeats", type=int, default=1, help="longer prompts, which replicas that decode leave to those that prefill"
    )
    parser.add_argument("--flags", default="", help="further flags of cloister serve")
    parser.add_argument("--log", help="file for what the server printed last")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends, too
    outcomes = asyncio.run(run(given))
    show(outcomes)
    is_well = all(
        seen.num_identical == seen.num_answered >= given.requests - seen.num_refused and not seen.num_lost and seen.is_whole
        for *_, seen in outcomes
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
