"""What steps, messages and transfers take in a cluster of two processes, for predictions in virtual time.

    python -m benchmarks.cluster_costs --model cloister-5m --num-threads 1 --output profile.json

The file is a profile for `cloister plan placement`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.models import open_checkpoint
from cloister.bench.drive import drive_client, make_requests
from cloister.bench.report import fit_costs, fit_relative_costs
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.cluster import ReplicaSet
from cloister.cluster.virtual.engine_shape import EngineShape, interpolate
from cloister.cluster.virtual.kv_links import LinkCosts
from cloister.cluster.virtual.placement import StepProfile
from cloister.cluster.virtual.prediction import ClusterShape
from cloister.cluster.virtual.processors import FrontCosts
from cloister.engine.replica_snapshot import Role
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.types.events import Arrived, Event, KVLoaded, Progressed, Stepped

VOCAB: Final = 256
"""Prompts are of bytes, which the virtual engine has as tokens."""
BLOCK_SIZE: Final = 16
MAX_LEN: Final = 2048
NUM_OUTPUT: Final = 64
BATCH: Final = 2
"""Sequences that are assumed to share a step, to choose a rate."""
PROMPT_LENGTHS: Final = (2, 3, 5, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
KEYS: Final = (1, 2, 4)
"""Of prompts of one length."""
MOVED_LENGTHS: Final = (32, 64, 128, 256, 512, 1024)
NUM_MOVED: Final = 8
"""Prompts of one length at once: links work beside others there, as they do under load."""
TAIL_LENGTHS: Final = (16, 32, 64, 128, 256, 512)
STREAMS: Final = (*product((1, 2, 4, 8, 16), (16, 256)), (1, 1024), (2, 1024), (4, 1024))
"""Answers at once, and the length of the prompts before them: long ones too, else what keys take would be a guess there."""
POINTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens of a step between which its time is on a line."""
SPREAD_S: Final = 0.5
"""How long requests of one size come, about."""
MIXED: Final = "2 mixed"
LAYOUTS: Final[dict[str, tuple[Role, ...]]] = {
    MIXED: ("mixed", "mixed"), "1 prefill, 1 decode": ("prefill", "decode"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, its time with what the engine does before and after it, and how many requests came with it."""

    step: Stepped
    elapsed_s: float
    num_arrivals: int = 0

    @property
    def is_answers(self) -> bool:
        """Whether it computed answers only."""
        return self.step.num_tokens == self.step.num_samples


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step, as of `EngineShape`: on a curve of its tokens, and more for each sample, for each key that a prompt's
    token attends to, for each key that an answer's reads, and for each request that came.
    """

    curve: tuple[tuple[int, float], ...]
    sample_s: float
    key_s: float
    read_s: float
    arrival_s: float

    @classmethod
    def fit(cls, steps: Sequence[TimedStep]) -> StepTimes:
        """Fits steps, in which either prompts or answers are computed, with relative errors."""
        idle = [timed.elapsed_s for timed in steps if not timed.step.num_tokens]
        empty_s = statistics.median(idle) if idle else 0.0
        busy = [timed for timed in steps if timed.step.num_tokens]
        most = max(timed.step.num_tokens for timed in busy)
        points = [num for num in POINTS if num == 1 or num < 2 * most]  # beyond what was measured nothing is known
        rows = []
        for timed in busy:
            step = timed.step
            keys = (0.0, step.num_attended) if timed.is_answers else (step.num_attended, 0.0)
            rows.append((*_climb(points, step.num_tokens), step.num_samples, *keys, timed.num_arrivals))
        elapsed_s = np.array([timed.elapsed_s for timed in busy])
        fitted = fit_relative_costs(np.array(rows, dtype=np.float64), elapsed_s)
        curve = tuple(zip(points, (float(each_s) for each_s in np.cumsum(fitted[: len(points)])), strict=True))
        return cls(((0, empty_s), *curve), *fitted[len(points) :])

    def work_s(self, item: WorkItem) -> float:
        """Returns the time of a replica that a request takes, without a prefix hit."""
        num_in, num_out = item.num_input_tokens, item.num_output_tokens
        token_s = interpolate(self.curve, BATCH) / BATCH + self.sample_s + self.read_s * (num_in + num_out / 2)
        return self.arrival_s + interpolate(self.curve, num_in) + self.key_s * num_in**2 / 2 + num_out * token_s


def _climb(points: Sequence[int], num_tokens: int) -> list[float]:
    """Returns how much of the way from each point to the next is below so many tokens: the multiples of a curve that rises."""
    ways = [(num_tokens - before) / (after - before) for before, after in pairwise(points)]
    return [1.0, *(min(1.0, max(0.0, way)) for way in ways)]


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured on real processes.

    Attributes:
        steps: of an engine that computes while the other one does not.
        company: processor time of steps while both engines and the front compute, over that of one engine's.
        delay_s: of a message between front and engine, without the processor time that it takes.
        late_s: by how much a timer of the client runs out late.
        load_s: time of a step for a block of KV that comes from the other engine.
        links: what links between engines take beside steps.
        entry_bytes: size of the KV of a block.
        num_blocks: of each replica.
        front: processor time of the front and its clients, which are one process here.
    """

    steps: StepTimes
    company: float
    delay_s: float
    late_s: float
    load_s: float
    links: LinkCosts
    entry_bytes: float
    num_blocks: int
    front: FrontCosts

    def shape(self, router: str, layout: str, num_cores: int | None = None) -> ClusterShape:
        """Returns the virtual cluster.

        Args:
            num_cores: that all share; None: each has its own.
        """
        engine = EngineShape(
            num_blocks=self.num_blocks, block_size=BLOCK_SIZE, max_num_seqs=64, max_waiting=1024, max_model_len=2 * MAX_LEN,
            max_batched_tokens=1024, stall_floor_s=0.045, step_s=0.0, token_s=0.0, load_s=self.load_s, links=self.links,
            **asdict(self.steps),
        )  # fmt: skip
        return ClusterShape(
            engine, router, LAYOUTS[layout], self.delay_s, moves_kv=layout != MIXED,
            part_entries=max(1, int(MAX_STEP_BYTES / self.entry_bytes)), num_cores=num_cores, company=max(1.0, self.company),
            front=self.front,
        )  # fmt: skip


@asynccontextmanager
async def local_cluster(
    options: argparse.Namespace, model: str, router: str, layout: str, num_threads: int = 1
) -> AsyncIterator[ReplicaSet]:
    """Runs engines in processes, with an empty cache.

    Args:
        model: its name, and the format of its matrices after a colon.
        num_threads: of each.
    """
    name, _, quant = model.partition(":")
    settings: dict[str, Any] = {
        "model": str(open_checkpoint(name)), "quant": quant or "none", "profile": "open", "replicas": 2,
        "num_threads": num_threads, "block_size": BLOCK_SIZE, "router": router, "prefix_cache": True,
        "cache_scopes": 0, "kv_memory_mb": options.kv_memory_mb, "max_model_len": 2 * MAX_LEN,
    }  # fmt: skip
    if layout != MIXED:
        settings |= {"kv_transfer": "shm", "prefill": 1, "decode": 1}
    resolved = resolve_settings(settings)
    cluster = make_engine(resolved.engine.config, resolved.server.config)
    assert isinstance(cluster, ReplicaSet)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.drain(0.0)


class Stopwatches:
    """Listens to a cluster.

    Attributes:
        steps: of each replica, with their times, in order. What the engine does between two steps is in the time of the second
            one. Of a step behind a pause only that is known what came after its requests had come; the rest is taken to be as
            long as it is for steps of one answer.
        delays_s: from the end of a step until its outputs were here.
        loads: of KV, from the other replica.
    """

    def __init__(self, cluster: ReplicaSet) -> None:
        self.delays_s: list[float] = []
        self.loads: list[KVLoaded] = []
        self._steps: list[list[tuple[Stepped, list[Arrived]]]] = [[] for _ in cluster._replicas]
        self._arrived: list[list[Arrived]] = [[] for _ in cluster._replicas]
        for index, replica in enumerate(cluster._replicas):
            replica.subscribe(partial(self._note, index))

    def _note(self, index: int, event: Event) -> None:
        match event:
            case Stepped():
                self._steps[index].append((event, self._arrived[index]))
                self._arrived[index] = []
            case Arrived():
                self._arrived[index].append(event)
            case Progressed():
                self.delays_s.append(asyncio.get_running_loop().time() - event.now_s)
            case KVLoaded(complete=True) if event.num_bytes:
                self.loads.append(event)
            case _:
                pass

    @property
    def num_steps(self) -> int:
        """Of all replicas."""
        return sum(map(len, self._steps))

    @property
    def steps(self) -> list[TimedStep]:
        return self.steps_of(*range(len(self._steps)))

    def steps_of(self, *replicas: int) -> list[TimedStep]:
        """Returns the steps of some replicas."""
        pairs = [(before, *now) for index in replicas for (before, _), now in pairwise(self._steps[index])]
        busy = [TimedStep(step, step.now_s - before.now_s, len(came)) for before, step, came in pairs if before.num_running]
        between_s = [
            timed.elapsed_s - timed.step.elapsed_s for timed in busy if timed.is_answers and timed.step.num_tokens == 1
        ]
        rest_s = statistics.median(between_s) if between_s else 0.0
        late = [
            TimedStep(step, (step.now_s - came[0].now_s if came else step.elapsed_s) + rest_s, len(came))
            for before, step, came in pairs
            if not before.num_running
        ]
        return busy + late


def make_prompts(key: int, num: int, num_output: int) -> list[WorkItem]:
    """Returns requests of many lengths, due at once."""
    lengths = [int(16 * (MAX_LEN / 32) ** (n / (num - 1))) for n in range(num)]
    return [make_item((key, n), length, num_output) for n, length in enumerate(lengths)]


def make_item(key: tuple[int, ...], num_input: int, num_output: int, at_s: float = 0.0) -> WorkItem:
    return WorkItem(at_s, make_tokens((8, *key), num_input, VOCAB), num_input, num_output)


class Calibration:
    """Measures a cluster of two mixed replicas with loads that are no traces.

    Attributes:
        front: (requests, messages, tokens) of each load, and what the process of front and client took for it.
    """

    def __init__(self, cluster: ReplicaSet) -> None:
        self.front: list[tuple[tuple[int, int, int], float]] = []
        self._cluster = cluster
        self._watch = Stopwatches(cluster)
        self._num_loads = 0

    async def run(self, items: Sequence[WorkItem]) -> None:
        """Runs one load."""
        self._num_loads += 1
        num_steps, before_s = self._watch.num_steps, time.process_time()
        await drive_client(self._cluster, make_requests(items, f"load {self._num_loads}"))
        spent_s = time.process_time() - before_s
        num_tokens = sum(item.num_output_tokens for item in items)
        self.front.append(((len(items), self._watch.num_steps - num_steps, num_tokens), spent_s))

    async def run_streams(self, num_replicas: int) -> float:
        """Runs answers at once, as many on each replica, behind short and long prompts; returns what the engines computed."""
        before_s = engine_cpu_s(self._cluster)
        for num, length in STREAMS:
            key = (num_replicas, num, length)
            await self.run([make_item((*key, n), length, NUM_OUTPUT) for n in range(num * num_replicas)])
        return engine_cpu_s(self._cluster) - before_s

    async def run_spread(self, steps: StepTimes, gap: float) -> None:
        """Runs requests that come one by one, so that prompts meet answers, and the front sleeps and wakes.

        Args:
            steps: their times.
            gap: between two of the same size, in multiples of the time that a replica needs for one.
        """
        for num_output, length in product((4, 16, 64), (24, 64, 256)):
            gap_s = gap * steps.work_s(make_item((), length, num_output))
            num = max(3, min(40, int(SPREAD_S / gap_s)))
            key = (int(1e3 * gap), num_output, length)
            await self.run([make_item((*key, n), length, num_output, at_s=n * gap_s) for n in range(num)])


def engine_cpu_s(cluster: ReplicaSet) -> float:
    """Returns the processor time that the engines have had."""
    return sum(engine_cpus_s(cluster))


def engine_cpus_s(cluster: ReplicaSet) -> list[float]:
    """Returns the processor time that each engine has had; 0 for those that are no process of this machine."""
    return [0.0 if snapshot.pid is None else read_cpu_s(snapshot.pid) for snapshot in cluster.snapshots()]


def read_cpu_s(pid: int) -> float:
    """Returns the processor time of a process, that of threads that have ended included (Linux)."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) composes the clock


class OtherPrograms:
    """Measures how much of this machine's cores programs other than this one and its engines take, from now on (Linux)."""

    def __init__(self, cluster: ReplicaSet) -> None:
        self._cluster = cluster
        self._begun = self._read()

    def share(self) -> float:
        """Returns their share of all cores."""
        now_s, busy_s, own_s = (now - begun for now, begun in zip(self._read(), self._begun, strict=True))
        return max(0.0, busy_s - own_s) / (now_s * (os.cpu_count() or 1))

    def _read(self) -> tuple[float, float, float]:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s, time.process_time() + engine_cpu_s(self._cluster)


async def measure_lateness() -> float:
    """Returns by how much a timer of an event loop with nothing else to do runs out late, on average."""
    loop = asyncio.get_running_loop()
    late_s = []
    for n in range(50):
        due_s = loop.time() + 0.001 + 0.00137 * (n % 7)
        await asyncio.sleep(due_s - loop.time())
        late_s.append(loop.time() - due_s)
    return statistics.mean(late_s)


async def run_prompts(cluster: ReplicaSet) -> None:
    """Runs prompts of `PROMPT_LENGTHS`, one after another."""
    for number, (key, length) in enumerate(product(KEYS, PROMPT_LENGTHS)):
        await drive_client(cluster, make_requests([make_item((key, length), length, 1)], f"alone {number}"))


async def run_moved(cluster: ReplicaSet, num_output: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Runs prompts of `MOVED_LENGTHS`, some of each at once; returns the processor time of each of them [load, engine, thread]:
    of the thread that makes the steps, and of all others."""
    pids = [snapshot.pid for snapshot in cluster.snapshots() if snapshot.pid is not None]
    spent_s = []
    for number, (key, length) in enumerate(product(KEYS, MOVED_LENGTHS)):
        items = [make_item((9, key, length, n), length, num_output) for n in range(NUM_MOVED)]
        before_s = np.array([_read_threads_s(pid) for pid in pids])
        await drive_client(cluster, make_requests(items, f"moved {number}"))
        spent_s.append((np.array([_read_threads_s(pid) for pid in pids]) - before_s) / NUM_MOVED)
    return np.array(spent_s)


def _read_threads_s(pid: int) -> tuple[float, float]:
    """Returns the processor time of a process's first thread, and of all others, those that have ended included (Linux)."""
    first_s = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    return first_s, read_cpu_s(pid) - first_s


async def run_tails(cluster: ReplicaSet) -> None:
    """Runs prompts whose beginning is cached, one after another: they attend to more keys than others with as many tokens."""
    beginning = make_tokens((8, 3), PROMPT_LENGTHS[-1], VOCAB)
    for number, length in enumerate((0, *TAIL_LENGTHS, *TAIL_LENGTHS)):
        prompt = [*beginning, *make_tokens((8, 3, number), length, VOCAB)]
        await drive_client(cluster, make_requests([WorkItem(0.0, prompt, len(prompt), 1)], f"tail {number}"))


async def calibrate(options: argparse.Namespace, model: str, num_threads: int = 1) -> Costs:
    """Measures prompts of many lengths, one after another; answers of many streams at once; and transfers.

    One of two replicas does what step times are fitted to, so that the front has another core: sharing is not part of them.
    What the front takes, and how much longer steps take in its company and that of the other engine, is measured with both.
    What links take is how much more processor time threads beside the steps have if another replica goes on with the same
    prompts.
    """
    async with local_cluster(options, model, "round_robin", MIXED, num_threads) as cluster:
        await drive_client(cluster, make_requests(make_prompts(0, 4, 8), "warm-up"))
        late_s = await measure_lateness()
        await cluster.drain_replica(1)
        alone = Stopwatches(cluster)
        await run_prompts(cluster)
        await run_tails(cluster)
        delay_s = statistics.median(alone.delays_s)
        stay_s = await run_moved(cluster, 1)
        streams_s = await Calibration(cluster).run_streams(1)
        await Calibration(cluster).run_spread(StepTimes.fit(alone.steps), gap=1.4)
        steps = StepTimes.fit(alone.steps)
        cluster.return_replica(1)
        both = Calibration(cluster)
        both_s = await both.run_streams(2)
        await both.run_spread(steps, gap=0.9)
        num_blocks = cluster.snapshots()[0].num_total_blocks
    async with local_cluster(options, model, "capacity_random", "1 prefill, 1 decode", num_threads) as cluster:
        await drive_client(cluster, make_requests(make_prompts(40, 4, 8), "warm-up"))
        moving = Stopwatches(cluster)
        moved_s = await run_moved(cluster, 2)
    blocks = np.array([(1, length // BLOCK_SIZE) for _, length in product(KEYS, MOVED_LENGTHS)], dtype=np.float64)
    serve_s, export_s = fit_costs(blocks, moved_s[:, 0, 1] - stay_s[:, 0, 1])
    pull_s, receive_s = fit_costs(blocks, moved_s[:, 1, 1])
    _, load_s = fit_costs(blocks, moved_s[:, 1, 0])  # the rest is the step behind it
    counts, spent_s = np.array([row for row, _ in both.front], dtype=np.float64), np.array([spent for _, spent in both.front])
    front = FrontCosts(*fit_relative_costs(counts, spent_s))
    return Costs(
        steps=steps,
        company=both_s / (2 * streams_s),
        delay_s=max(0.0, delay_s - front.message_s - front.token_s),
        late_s=late_s,
        load_s=load_s,
        links=LinkCosts(serve_s, export_s, pull_s, receive_s),
        entry_bytes=max(load.num_bytes / (load.num_tokens / BLOCK_SIZE) for load in moving.loads),
        num_blocks=num_blocks,
        front=front,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--model", default="cloister-5m", help="its name, and the format of its matrices after a colon")
    parser.add_argument("--num-threads", type=int, default=1, help="threads of each of the two replicas")
    parser.add_argument("--kv-memory-mb", type=float, default=128.0, help="KV cache of each")
    parser.add_argument("--output", type=Path, required=True, help="where the profile goes")
    options = parser.parse_args()
    costs = asyncio.run(calibrate(options, options.model, options.num_threads))
    profile = StepProfile(
        num_threads=options.num_threads, num_blocks=costs.num_blocks, block_size=BLOCK_SIZE, max_model_len=2 * MAX_LEN,
        max_num_seqs=64, step_s=0.0, token_s=0.0, delay_s=costs.delay_s, entry_s=0.0, entry_bytes=costs.entry_bytes,
        load_s=costs.load_s, model=options.model, **asdict(costs.links), **asdict(costs.steps),
    )  # fmt: skip
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
