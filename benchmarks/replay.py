"""Replay: the real scheduler and cache with a runner that only counts, under a virtual clock. No model, no waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cloister.bench.drive import Timed
from cloister.bench.recorder import EventRecorder
from cloister.bench.report import fit_relative_costs
from cloister.kv import BlockPool, KVObject, PrefixKeys
from cloister.kv.objects import KVHeader
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.kv.tiers import KVTiers
from cloister.scheduler import Scheduler, SchedulerConfig
from cloister.scheduler.kv_restores import TRIAL, TierRead
from cloister.types.clock import VirtualClock
from cloister.types.events import Event, Preempted, Stepped
from cloister.types.step import Sample, StepPlan, StepResult

StepTime = Callable[[Stepped], float]
OnStep = Callable[[Scheduler, StepPlan], None]

MADE_UP_TOKEN = 7


def count_nothing(_: Stepped) -> float:
    """A step time of zero: for runs that count and do not time."""
    return 0.0


class PlanRunner(Protocol):
    """Computes plans, and copies blocks for a tier."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]: ...


class CountingRunner:
    """Does what a plan says to the counts alone: every sample is the same made-up token.

    Attributes:
        num_tokens: positions computed so far.
    """

    def __init__(self) -> None:
        self.num_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_tokens += plan.num_tokens
        sampling = [part.seq_id for part in plan.sequences if part.num_samples]
        sampling += [fork.child_id for fork in plan.forks]
        return StepResult(plan_id=plan.plan_id, samples=[Sample(seq_id, [MADE_UP_TOKEN]) for seq_id in sampling])

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return [b"\0"] * len(block_ids)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Time of a step: `step_s + token_s * tokens + sample_s * samples + key_s * keys attended`, in seconds."""

    step_s: float
    token_s: float
    sample_s: float
    key_s: float

    @classmethod
    def fit(cls, steps: Sequence[Stepped]) -> StepCosts:
        """Fits the costs to measured steps, without negative costs.

        Errors count relative to the predicted time: else the few steps with whole prompts would outweigh all the others.
        """
        kept = [step for step in steps if step.num_tokens and step.elapsed_s > 0]
        table = np.array([(1.0, s.num_tokens, s.num_samples, s.num_attended) for s in kept], dtype=np.float64)
        elapsed_s = np.array([s.elapsed_s for s in kept])
        return cls(*fit_relative_costs(table, elapsed_s))

    def __call__(self, step: Stepped) -> float:
        rows = self.token_s * step.num_tokens + self.sample_s * step.num_samples
        return self.step_s + rows + self.key_s * step.num_attended


class VirtualTier:
    """A KV tier whose reads take their time, one after the other.

    Args:
        block_bytes: what a block of each group counts as.
        num_blocks: of each group.
        byte_s: seconds that a byte takes.
    """

    def __init__(self, scheduler: Scheduler, runner: PlanRunner, block_bytes: int, num_blocks: int, byte_s: float) -> None:
        num_groups = scheduler.pool.num_groups
        self.index = KVTierIndex("virtual", TierLayout((block_bytes,) * num_groups, (num_blocks,) * num_groups))
        self.index.learn(block_bytes, block_bytes * byte_s)
        self.num_loaded = 0
        self._scheduler, self._runner, self._byte_s = scheduler, runner, byte_s
        self._contents: dict[int, bytes] = {}  # by number of the write
        self._reads: list[tuple[float, TierRead]] = []
        self._free_s = 0.0
        scheduler.use_tiers(KVTiers([self.index]))

    @property
    def next_s(self) -> float | None:
        """When the next read ends."""
        return min((end_s for end_s, _ in self._reads), default=None)

    def deliver(self, now: float) -> None:
        """Brings what was read by now."""
        due = [read for end_s, read in self._reads if end_s <= now]
        self._reads = [(end_s, read) for end_s, read in self._reads if end_s > now]
        for read in due:
            if read.request_id == TRIAL:
                assert self._scheduler.kv_restores is not None
                self._scheduler.kv_restores.is_trying = False
                continue
            is_complete = all(block is None or self.index.find(block.key, block.group) is block for block in _blocks_of(read))
            if is_complete:
                self._scheduler.kv_loads.arrive(read.request_id, self._objects(read))
                self.num_loaded += 1
            self._scheduler.kv_loads.finish(read.request_id, now, is_complete=is_complete)

    def dispatch(self, now: float) -> None:
        """Takes what a plan evicts, and begins its reads, before the plan runs."""
        copies, self.index.copies = self.index.copies, []
        for block, stored in copies:
            assert isinstance(block, int)
            self._contents[stored.number] = self._runner.export_blocks([block])[0]
            self.index.confirm(stored, is_written=True)
        self.index.ended_roots.clear()
        restores, loads = self._scheduler.kv_restores, self._scheduler.kv_loads
        assert restores is not None
        self._reads = [(end_s, read) for end_s, read in self._reads if read.request_id not in loads.cancelled_reads]
        loads.cancelled_reads.clear()
        for read in restores.take_reads():
            self._free_s = max(self._free_s, now) + read.num_bytes * self._byte_s
            self._reads.append((self._free_s, read))
        self.index.earn(1.0)  # what storing costs is not modelled

    def _objects(self, read: TierRead) -> list[KVObject]:
        objects = []
        for entry in read.entries:
            contents = tuple(b"" if block is None else self._contents[block.number] for block in entry.blocks)
            header = KVHeader(b"", read.root, entry.key, entry.entry, tuple(map(len, contents)))
            objects.append(KVObject(header, contents, b""))
        return objects


def _blocks_of(read: TierRead) -> list[TierBlock | None]:
    return [block for entry in read.entries for block in entry.blocks]


@dataclass(slots=True)
class Replay:
    """One replay and what it saw.

    Attributes:
        recorder: records, and steps with the times that they were given.
        preemptions: by request id.
    """

    scheduler: Scheduler
    runner: PlanRunner = field(default_factory=CountingRunner)
    recorder: EventRecorder = field(default_factory=EventRecorder)
    clock: VirtualClock = field(default_factory=VirtualClock)
    tier: VirtualTier | None = None
    preemptions: Counter[str] = field(default_factory=Counter)

    @property
    def num_computed(self) -> int:
        """Positions computed, those that were computed again too."""
        return sum(step.num_tokens for step in self.recorder.steps)

    @property
    def occupancy(self) -> float:
        """Share of KV blocks in use, over the time in which requests waited; 0 if none did."""
        steps = [step for step in self.recorder.steps if step.num_waiting]
        waited_s = sum(step.elapsed_s for step in steps)
        used_s = sum(step.elapsed_s * step.num_used_blocks / step.num_total_blocks for step in steps)
        return used_s / waited_s if waited_s else 0.0

    def step(self, step_time: StepTime, on_step: OnStep | None = None) -> bool:
        """Does one step; False if there was nothing to do."""
        now, tier = self.clock.now(), self.tier
        if tier is not None:
            tier.deliver(now)
        plan = self.scheduler.plan(now)
        if tier is not None:
            tier.dispatch(now)
        if plan is None:
            self._record(self.scheduler.take_events())
            if tier is None or tier.next_s is None:
                return False
            self.clock.advance(tier.next_s - now)
            return True
        result = self.runner.run(plan)
        stepped = self._describe(plan, result)
        result.elapsed_s = step_time(stepped)
        if on_step is not None:
            on_step(self.scheduler, plan)
        self.clock.advance(result.elapsed_s)
        self._record(self.scheduler.commit(result, {}, self.clock.now()))
        self.recorder(self._describe(plan, result))
        return True

    def _record(self, events: Iterable[Event]) -> None:
        for event in events:
            self.recorder(event)
            if isinstance(event, Preempted):
                self.preemptions[event.request_id] += 1

    def _describe(self, plan: StepPlan, result: StepResult) -> Stepped:
        pool = self.scheduler.pool
        return Stepped(
            now_s=self.clock.now(),
            elapsed_s=result.elapsed_s,
            num_tokens=plan.num_tokens,
            num_samples=len(result.samples),
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_total_blocks=pool.num_total,
            num_attended=plan.num_attended,
        )


def make_scheduler(config: SchedulerConfig, num_blocks: int, block_size: int) -> Scheduler:
    """Returns a scheduler with a pool of its own, and prefix keys if the configuration caches."""
    keys = PrefixKeys("bench", block_size) if config.prefix_cache else None
    return Scheduler(config, BlockPool(num_blocks, block_size), keys)


def replay(
    scheduler: Scheduler,
    requests: Iterable[Timed],
    step_time: StepTime,
    on_step: OnStep | None = None,
    *,
    runner: PlanRunner | None = None,
    tier: VirtualTier | None = None,
) -> Replay:
    """Runs every request through the scheduler at its arrival time and returns what happened.

    Args:
        tier: gets what the prefix cache evicts.
    """
    run = Replay(scheduler, runner or CountingRunner(), tier=tier)
    for timed in sorted(requests, key=lambda timed: timed.due_s):
        while run.clock.now() < timed.due_s and run.step(step_time, on_step):
            pass
        run.clock.advance(max(0.0, timed.due_s - run.clock.now()))
        scheduler.add(timed.request, run.clock.now())
    while run.step(step_time, on_step):
        pass
    return run


def replay_one_by_one(scheduler: Scheduler, requests: Iterable[Timed]) -> Replay:
    """Runs each request to its end before the next one is taken: nobody waits for another one's prefix."""
    run = Replay(scheduler)
    for timed in requests:
        scheduler.add(timed.request, run.clock.now())
        while run.step(count_nothing):
            pass
    return run
