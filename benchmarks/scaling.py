"""Replicas that come and go with the load: `python -m benchmarks.scaling burst` and `... trace FILE`.

`burst`: one engine answers all requests first: greedy and seeded ones, a quarter with a grammar and a quarter with an adapter.
Then a server of `--min-replicas 1` gets them twice, all at once, with a rest between. Prints how many answers are those of the
one engine, how long it took until another replica ran, and the memory of all processes before, at the most, and after the rest.

`trace`: the requests of a trace at its times, in virtual time (`cluster.virtual`): fixed numbers of replicas beside replicas
that come and go. Prints the time that replicas ran, and the time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.table import Table

from benchmarks.clones import pss_bytes
from benchmarks.cluster_demo import TIMEOUT_S, Answer, ask_all, local_ray, serving
from benchmarks.cluster_faults import make_bodies
from benchmarks.harness import console
from benchmarks.length_routing import Client
from cloister.bench.traces import read_trace
from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.replica_states import ScalingConfig
from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import run_virtually
from cloister.cluster.virtual.prediction import ClusterShape, running_cluster
from cloister.engine.replica_snapshot import Role
from cloister.models import locate
from cloister.types.request import Request, SamplingParams
from tests.adapter_factory import write_adapter
from tests.serving import descendants

LOOK_EVERY_S: Final = 0.02
REST_TIMEOUT_S: Final = 90.0
MEBIBYTE: Final = 2**20


# Processes


@dataclass
class Fleet:
    """What is seen of a server's replicas while it runs.

    Attributes:
        pid: all processes under this one count: of the front, or of this program, whose raylets have the engines.
        changes: (time, number of replicas with engines) whenever that changed.
        most_bytes: greatest memory of all its processes.
    """

    url: str
    pid: int
    changes: list[tuple[float, int]] = field(default_factory=list)
    most_bytes: int = 0

    @property
    def num_replicas(self) -> int:
        """Replicas with engines now."""
        return self.changes[-1][1] if self.changes else 0

    def memory(self) -> int:
        """Returns the memory of engines, their template, or Ray."""
        total = 0
        for pid in descendants(self.pid):
            try:
                total += pss_bytes(pid)
            except OSError:
                continue  # it has just ended
        self.most_bytes = max(self.most_bytes, total)
        return total

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while True:
                replicas = (await client.get(f"{self.url}/v1/replicas")).json()["data"]
                number = sum(each["state"] not in ("stopped", "starting") for each in replicas)
                if number != self.num_replicas:
                    self.changes.append((time.monotonic(), number))
                self.memory()
                await asyncio.sleep(LOOK_EVERY_S)

    async def wait_for(self, condition: Callable[[int], bool]) -> bool:
        """Waits until so many replicas have engines; False: not in time."""
        ends_s = time.monotonic() + REST_TIMEOUT_S
        while not condition(self.num_replicas):
            if time.monotonic() > ends_s:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        return True


async def measure_bursts(given: argparse.Namespace, folder: Path) -> bool:
    """Runs everything; returns whether all answers were those of one engine and the replicas went again."""
    model = locate(given.model)
    adapter = write_adapter(folder / "ann", model, size=0.05)
    flags = ("--model", str(model), "--served-model-name", given.model, "--num-threads", "1", "--kv-memory-mb", "64",
             "--max-num-seqs", str(given.slots), "--request-timeout-s", "240", "--lora", f"ann={adapter}")  # fmt: skip
    bodies = make_bodies(given.requests, given.max_tokens, given.model)
    expected: list[Answer | None] = [None] * len(bodies)
    async with serving(*flags) as (server, _):
        await ask_all(server.url, bodies, given.streams, expected)
    scaling = ("--min-replicas", "1", "--max-replicas", str(given.max_replicas), "--upscale-delay-s", str(given.up),
               "--downscale-delay-s", str(given.down), *given.flags.split())  # fmt: skip
    if given.on == "ray":
        with local_ray(given.max_replicas) as ray:
            return await _burst(given, bodies, expected, (*flags, *scaling, "--on", "ray", "--ray-address", ray.address))
    return await _burst(given, bodies, expected, (*flags, *scaling))


async def _burst(
    given: argparse.Namespace, bodies: list[dict[str, Any]], expected: list[Answer | None], flags: tuple[str, ...]
) -> bool:
    is_right = True
    async with serving(*flags) as (server, start_s):
        fleet = Fleet(server.url, server.process.pid if given.on == "local" else os.getpid())
        watching = asyncio.create_task(fleet.watch())
        console.print(f"the server was ready after {start_s:.1f} s")
        for number in range(2):
            await fleet.wait_for(lambda count: count == 1)
            before, fleet.most_bytes, seen_before = fleet.memory(), 0, len(fleet.changes)
            seen: list[Answer | None] = [None] * len(bodies)
            begun_s = time.monotonic()
            await ask_all(server.url, bodies, given.streams, seen)
            took_s = time.monotonic() - begun_s
            added = [(at_s - begun_s, count) for at_s, count in fleet.changes[seen_before:]]
            has_gone = await fleet.wait_for(lambda count: count == 1)
            gone_s = time.monotonic() - begun_s - took_s
            await asyncio.sleep(1.0)
            same = sum(_is_same(a, b) for a, b in zip(seen, expected, strict=True))
            lost = sum(answer is None or answer.error is not None or answer.finish_reason is None for answer in seen)
            steps = ", ".join(f"{count} after {at_s:.2f} s" for at_s, count in added)
            sizes = " / ".join(f"{size / MEBIBYTE:.0f}" for size in (before, fleet.most_bytes, fleet.memory()))
            console.print(
                f"burst {number}: {len(seen)} requests in {took_s:.1f} s, {lost} lost, {same} as by one engine; "
                f"replicas: {steps}; one again {gone_s:.1f} s after the last answer; memory before, most, after: {sizes} MiB"
            )
            is_right = is_right and has_gone and bool(added) and not lost and same == len(seen)
        watching.cancel()
        for line in server.printed.splitlines():
            if "runs after" in line:
                console.print(line)
    return is_right


def _is_same(seen: Answer | None, expected: Answer | None) -> bool:
    return (
        seen is not None and expected is not None and (seen.text, seen.finish_reason) == (expected.text, expected.finish_reason)
    )


# Virtual time


@dataclass
class Usage:
    """What a cluster took and gave.

    Attributes:
        replica_s: sum of the times that replicas had engines.
        whole_s: how long it all took.
    """

    replica_s: float = 0.0
    whole_s: float = 0.0
    actions: dict[str, int] = field(default_factory=dict)


def make_clients(path: Path, count: int, max_model_len: int) -> list[Client]:
    """Returns clients that send the requests of a trace at its times. Prompts are a sixteenth as long."""
    clients, draw = [], random.Random(1)
    for number, row in enumerate(read_trace(path, count).rows):
        assert row.arrival_s is not None
        num_output = max(1, min(row.num_output_tokens, max_model_len // 2))
        num_input = max(1, min(row.num_input_tokens // 16, max_model_len - num_output))
        request = Request(
            request_id=f"r{number}",
            token_ids=[draw.randrange(256) for _ in range(num_input)],
            sampling=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
            timeout_s=1e5,
        )
        clients.append(Client(request, row.arrival_s))
    return clients


def run_trace(clients: list[Client], num_replicas: int, start_s: float, scaling: ScalingConfig | None) -> Usage:
    """Runs the requests in virtual time."""
    engine = EngineShape(
        num_blocks=4096, max_num_seqs=8, max_waiting=100_000, max_model_len=1024, step_s=0.02, token_s=0.001, start_s=start_s
    )
    roles: tuple[Role, ...] = tuple("mixed" for _ in range(num_replicas))
    shape = ClusterShape(engine, "least_load", roles, delay_s=0.0002, scaling=scaling)
    usage = Usage()

    async def watch(front: ReplicaSet) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            await asyncio.sleep(0.1)
            count = sum(each.state != "stopped" for each in front.snapshots())
            usage.replica_s += count * (loop.time() - begun_s)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with running_cluster(shape, open_tokenizer(), 1) as front:
            begun_s, watching = loop.time(), asyncio.create_task(watch(front))
            await asyncio.gather(*(client.run(front) for client in clients))
            watching.cancel()
            usage.whole_s, usage.actions = loop.time() - begun_s, dict(front.action_counts())

    run_virtually(main())
    return usage


def report_trace(given: argparse.Namespace) -> None:
    """Prints a row for each fixed number of replicas, and for those that come and go."""
    table = Table("replicas", "start", "replica seconds", "TTFT P50", "TTFT P99", "added", "removed")
    runs: list[tuple[str, int, float, ScalingConfig | None]] = [
        (str(number), number, given.starts[0], None) for number in range(1, given.max_replicas + 1)
    ]
    for start_s in given.starts:
        delays = ScalingConfig(1, up_after_s=given.up, down_after_s=given.down)
        runs.append((f"1 to {given.max_replicas}", given.max_replicas, start_s, delays))
    for name, number, start_s, scaling in runs:
        clients = make_clients(given.trace, given.requests, 1024)
        usage = run_trace(clients, number, start_s, scaling)
        ttft_s = sorted(client.ttft_s for client in clients)
        counts = [str(usage.actions[name]) if scaling else "-" for name in ("add", "remove")]
        start = f"{start_s:g} s" if scaling else "-"
        times = [f"{ttft_s[int(share * len(ttft_s))]:.2f} s" for share in (0.5, 0.99)]
        table.add_row(name, start, f"{usage.replica_s:,.0f}", *times, *counts)
        console.print(f"{name}: {usage.replica_s:,.0f} replica seconds in {usage.whole_s:,.0f} s, TTFT {', '.join(times)}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    burst = verbs.add_parser("burst")
    burst.add_argument("--model", default="cloister-5m")
    burst.add_argument("--on", default="local", choices=("local", "ray"))
    burst.add_argument("--max-replicas", type=int, default=2)
    burst.add_argument("--slots", type=int, default=4)
    burst.add_argument("--requests", type=int, default=64)
    burst.add_argument("--max-tokens", type=int, default=200)
    burst.add_argument("--streams", type=int, default=32)
    burst.add_argument("--up", type=float, default=1.0)
    burst.add_argument("--down", type=float, default=5.0)
    burst.add_argument("--flags", default="", help="more flags of `cloister serve`")
    trace = verbs.add_parser("trace")
    trace.add_argument("trace", type=Path)
    trace.add_argument("--requests", type=int, default=4000)
    trace.add_argument("--max-replicas", type=int, default=4)
    trace.add_argument("--up", type=float, default=1.0)
    trace.add_argument("--down", type=float, default=30.0)
    trace.add_argument("--starts", type=float, nargs="+", default=(0.1, 5.0), help="start of an engine, up to 5 s")
    given = parser.parse_args()
    if given.verb == "trace":
        report_trace(given)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return int(not asyncio.run(measure_bursts(given, Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
