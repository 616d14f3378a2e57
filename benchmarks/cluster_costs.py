"""What steps, messages and transfers take in a cluster of two processes, for predictions in virtual time.

    python -m benchmarks.cluster_costs --model cloister-5m --num-threads 1 --output profile.json

The file is a profile for `cloister plan placement`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.models import open_checkpoint
from cloister.bench.drive import drive_client, make_requests
from cloister.bench.report import fit_relative_costs
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.cluster import ReplicaSet
from cloister.cluster.virtual.engine import EngineShape
from cloister.cluster.virtual.placement import StepProfile
from cloister.cluster.virtual.prediction import ClusterShape
from cloister.cluster.virtual.processors import FrontCosts
from cloister.engine.replica_snapshot import Role
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.scheduler.kv_loads import MAX_STEP_BYTES
from cloister.types.events import Event, KVLoaded, Progressed, Stepped

VOCAB: Final = 256
"""Prompts are of bytes, which the virtual engine has as tokens."""
BLOCK_SIZE: Final = 16
MAX_LEN: Final = 2048
NUM_OUTPUT: Final = 24
BATCH: Final = 2
"""Sequences that are assumed to share a step, to choose a rate."""
MIXED: Final = "2 mixed"
LAYOUTS: Final[dict[str, tuple[Role, ...]]] = {
    MIXED: ("mixed", "mixed"), "1 prefill, 1 decode": ("prefill", "decode"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, of each token and sample, of each key that a prompt's token attends to, and that an answer's reads."""

    step_s: float
    token_s: float
    sample_s: float
    key_s: float
    read_s: float

    @classmethod
    def fit(cls, steps: Sequence[tuple[Stepped, float]]) -> StepTimes:
        """Fits steps and their times, in which either prompts or answers are computed, with relative errors."""
        rows = []
        for step, _ in steps:
            is_answers = step.num_tokens == step.num_samples
            keys = (0.0, step.num_attended) if is_answers else (step.num_attended, 0.0)
            rows.append((1.0, step.num_tokens, step.num_samples, *keys))
        elapsed_s = np.array([elapsed_s for _, elapsed_s in steps])
        return cls(*fit_relative_costs(np.array(rows, dtype=np.float64), elapsed_s))


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured on real processes.

    Attributes:
        delay_s: from the end of a step until the front has its outputs.
        entry_s, entry_bytes: time and size of the KV of a block that moves.
        num_blocks: of each replica.
        front: processor time of the front and its clients, which are one process here.
    """

    steps: StepTimes
    delay_s: float
    entry_s: float
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
            max_batched_tokens=1024, stall_floor_s=0.045, **asdict(self.steps),
        )  # fmt: skip
        return ClusterShape(
            engine, router, LAYOUTS[layout], self.delay_s, moves_kv=layout != MIXED, entry_s=self.entry_s,
            part_entries=max(1, int(MAX_STEP_BYTES / self.entry_bytes)), num_cores=num_cores, front=self.front,
        )  # fmt: skip

    def work_s(self, item: WorkItem) -> float:
        """Returns the time of a replica that a request takes, without a prefix hit."""
        num_in, num_out, steps = item.num_input_tokens, item.num_output_tokens, self.steps
        token_s = steps.step_s / BATCH + steps.token_s + steps.sample_s + steps.read_s * (num_in + num_out / 2)
        return steps.token_s * num_in + steps.key_s * num_in**2 / 2 + num_out * token_s


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
        steps: of each replica.
        delays_s: from a step until its outputs were here.
        loads: of KV, from the other replica.
    """

    def __init__(self, cluster: ReplicaSet) -> None:
        self.steps: list[list[Stepped]] = [[] for _ in cluster._replicas]
        self.delays_s: list[float] = []
        self.loads: list[KVLoaded] = []
        for index, replica in enumerate(cluster._replicas):
            replica.subscribe(partial(self._note, index))

    def _note(self, index: int, event: Event) -> None:
        match event:
            case Stepped():
                self.steps[index].append(event)
            case Progressed():
                self.delays_s.append(asyncio.get_running_loop().time() - event.now_s)
            case KVLoaded(complete=True) if event.num_bytes:
                self.loads.append(event)
            case _:
                pass

    def timed(self) -> list[tuple[Stepped, float]]:
        """Returns steps with their times, from one to the next: so what the engine does between two of them is in it too."""
        pairs = [(a, b) for own in self.steps for a, b in pairwise(own)]
        busy = [(b, b.now_s - a.now_s) for a, b in pairs if a.num_running]
        between_s = statistics.median(period_s - step.elapsed_s for step, period_s in busy)
        return busy + [(b, b.elapsed_s + between_s) for a, b in pairs if not a.num_running]


def make_prompts(key: int, num: int, num_output: int) -> list[WorkItem]:
    """Returns requests of many lengths, due at once."""
    lengths = [int(16 * (MAX_LEN / 32) ** (n / (num - 1))) for n in range(num)]
    return [WorkItem(0.0, make_tokens((8, key, n), length, VOCAB), length, num_output) for n, length in enumerate(lengths)]


async def calibrate(options: argparse.Namespace, model: str, num_threads: int = 1) -> Costs:
    """Measures prompts of many lengths, one after another; answers of many streams at once; and transfers.

    One of two replicas does all but the transfers, so that the front has another core: sharing is not part of a step's time.
    """
    front: list[tuple[tuple[float, float, float], float]] = []
    async with local_cluster(options, model, "round_robin", MIXED, num_threads) as cluster:
        await drive_client(cluster, make_requests(make_prompts(0, 4, 8), "warm-up"))
        await cluster.drain_replica(1)
        alone = Stopwatches(cluster)
        for number, item in enumerate([*make_prompts(1, 16, 2), *make_prompts(2, 16, 2)]):
            await drive_client(cluster, make_requests([item], f"alone {number}"))
        many = Stopwatches(cluster)
        for num in (2, 4, 8, 16, 32):
            num_before, before_s = len(many.steps[0]), time.process_time()
            await drive_client(cluster, make_requests(make_prompts(3 + num, num, NUM_OUTPUT), f"{num}"))
            front.append(((num, len(many.steps[0]) - num_before, num * NUM_OUTPUT), time.process_time() - before_s))
        num_blocks = cluster.snapshots()[0].num_total_blocks
    async with local_cluster(options, model, "capacity_random", "1 prefill, 1 decode", num_threads) as cluster:
        await drive_client(cluster, make_requests(make_prompts(40, 4, 8), "warm-up"))
        moving = Stopwatches(cluster)
        for number, item in enumerate(make_prompts(41, 8, 8)):
            await drive_client(cluster, make_requests([item], f"{number}"))
    answers = [(step, elapsed_s) for step, elapsed_s in many.timed() if step.num_tokens == step.num_samples]
    prompts = [(step, elapsed_s) for step, elapsed_s in alone.timed() if step.num_tokens > step.num_samples]
    numbers = [load.num_tokens / BLOCK_SIZE for load in moving.loads]
    counts, spent_s = np.array([row for row, _ in front], dtype=np.float64), np.array([spent for _, spent in front])
    return Costs(
        steps=StepTimes.fit(answers + prompts * max(1, len(answers) // len(prompts))),
        delay_s=statistics.median(alone.delays_s),
        entry_s=statistics.median(load.elapsed_s / number for load, number in zip(moving.loads, numbers, strict=True)),
        entry_bytes=statistics.median(load.num_bytes / number for load, number in zip(moving.loads, numbers, strict=True)),
        num_blocks=num_blocks,
        front=FrontCosts(*fit_relative_costs(counts, spent_s)),
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
        max_num_seqs=64, delay_s=costs.delay_s, entry_s=costs.entry_s, entry_bytes=costs.entry_bytes, **asdict(costs.steps),
    )  # fmt: skip
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
