"""Replay: the real scheduler and cache with a runner that only counts, under a virtual clock. No model, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.bench.drive import Timed
from cloister.bench.recorder import EventRecorder
from cloister.bench.report import fit_costs
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import Scheduler, SchedulerConfig
from cloister.types.clock import VirtualClock
from cloister.types.events import Stepped
from cloister.types.step import Sample, StepPlan, StepResult

StepTime = Callable[[Stepped], float]
OnStep = Callable[[Scheduler, StepPlan], None]

MADE_UP_TOKEN = 7


def count_nothing(_: Stepped) -> float:
    """A step time of zero: for runs that count and do not time."""
    return 0.0


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

        Errors count relative to the step's time: else the few steps with whole prompts would outweigh all the others, and
        a step that another program held up would outweigh both.
        """
        kept = [step for step in steps if step.num_tokens and step.elapsed_s > 0]
        table = np.array([(1.0, s.num_tokens, s.num_samples, s.num_attended) for s in kept], dtype=np.float64)
        elapsed_s = np.array([s.elapsed_s for s in kept])
        return cls(*fit_costs(table / elapsed_s[:, None], np.ones(len(kept))))

    def __call__(self, step: Stepped) -> float:
        rows = self.token_s * step.num_tokens + self.sample_s * step.num_samples
        return self.step_s + rows + self.key_s * step.num_attended


@dataclass(slots=True)
class Replay:
    """One replay and what it saw.

    Attributes:
        runner: has counted what was computed.
        recorder: records, and steps with the times that they were given.
    """

    scheduler: Scheduler
    runner: CountingRunner = field(default_factory=CountingRunner)
    recorder: EventRecorder = field(default_factory=EventRecorder)
    clock: VirtualClock = field(default_factory=VirtualClock)

    def step(self, step_time: StepTime, on_step: OnStep | None = None) -> bool:
        """Does one step; False if there was nothing to do."""
        plan = self.scheduler.plan(self.clock.now())
        if plan is None:
            self._record_events()
            return False
        result = self.runner.run(plan)
        stepped = self._describe(plan, result)
        result.elapsed_s = step_time(stepped)
        if on_step is not None:
            on_step(self.scheduler, plan)
        self.clock.advance(result.elapsed_s)
        for event in self.scheduler.commit(result, {}, self.clock.now()):
            self.recorder(event)
        self.recorder(self._describe(plan, result))
        return True

    def _record_events(self) -> None:
        for event in self.scheduler.take_events():
            self.recorder(event)

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


def replay(scheduler: Scheduler, requests: Iterable[Timed], step_time: StepTime, on_step: OnStep | None = None) -> Replay:
    """Runs every request through the scheduler at its arrival time and returns what happened."""
    run = Replay(scheduler)
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
