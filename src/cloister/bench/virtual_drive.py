"""Runs requests on a scheduler in virtual time: the plans are real, and each step takes as long as a given function says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cloister.bench.drive import Timed
from cloister.bench.recorder import RequestRecord
from cloister.kv import KVObject
from cloister.kv.objects import KVHeader
from cloister.kv.tiers import KVTierIndex, TierBlock, TierLayout
from cloister.scheduler import Scheduler
from cloister.scheduler.kv_restores import TierRead
from cloister.types.events import Ended, Event, Preempted, Progressed, Scheduled
from cloister.types.request import FinishReason
from cloister.types.step import Sample, StepPlan, StepResult


class PlanRunner(Protocol):
    """Computes plans."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]: ...


class BlankRunner:
    """Samples token 0 for everything."""

    def run(self, plan: StepPlan) -> StepResult:
        """Returns a result with a token for each sequence whose prompt is complete, and for each fork."""
        samples = [Sample(part.seq_id, [0]) for part in plan.sequences if part.num_samples]
        return StepResult(plan_id=plan.plan_id, samples=samples + [Sample(fork.child_id, [0]) for fork in plan.forks])

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns something for each block."""
        return [b"\0"] * len(block_ids)


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
        scheduler.use_tier(self.index)

    @property
    def next_s(self) -> float | None:
        """When the next read ends."""
        return min((end_s for end_s, _ in self._reads), default=None)

    def deliver(self, now: float) -> None:
        """Brings what was read by now."""
        due = [read for end_s, read in self._reads if end_s <= now]
        self._reads = [(end_s, read) for end_s, read in self._reads if end_s > now]
        for read in due:
            is_complete = all(block is None or self.index.find(block.key, block.group) is block for block in _blocks_of(read))
            if is_complete:
                self._scheduler.kv_loads.arrive(read.request_id, self._objects(read))
                self.num_loaded += 1
            self._scheduler.kv_loads.finish(read.request_id, now, is_complete=is_complete)

    def dispatch(self, now: float) -> None:
        """Takes what a plan evicts, and begins its reads, before the plan runs."""
        stores, self.index.stores = self.index.stores, []
        for block, stored in stores:
            self._contents[stored.number] = self._runner.export_blocks([block])[0]
            self.index.confirm(stored, is_written=True)
        self.index.ended_roots.clear()
        restores, loads = self._scheduler.kv_restores, self._scheduler.kv_loads
        assert restores is not None
        for read in restores.reads:
            self._free_s = max(self._free_s, now) + read.num_bytes * self._byte_s
            self._reads.append((self._free_s, read))
        restores.reads = []
        self._reads = [(end_s, read) for end_s, read in self._reads if read.request_id not in loads.cancelled_reads]
        loads.cancelled_reads.clear()
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
class VirtualRun:
    """The result of a run.

    Attributes:
        records: in order of the requests given.
        preemptions: by request id.
        num_computed: positions computed, those that were computed again too.
        occupancy: share of KV blocks in use, over the time in which requests waited; None if none did.
        end_s: when the last request ended.
    """

    records: list[RequestRecord] = field(default_factory=list)
    preemptions: Counter[str] = field(default_factory=Counter)
    num_computed: int = 0
    occupancy: float | None = None
    end_s: float = 0.0


def drive_virtually(
    scheduler: Scheduler,
    requests: Sequence[Timed],
    step_time_s: Callable[[StepPlan], float],
    runner: PlanRunner,
    tier: VirtualTier | None = None,
) -> VirtualRun:
    """Adds every request when it is due, and runs steps until all have ended.

    Args:
        requests: in order of their times, each for one answer.
        step_time_s: the seconds that a plan takes.
        tier: gets what the prefix cache evicts.

    Raises:
        RuntimeError: requests are left, and nothing is planned.
    """
    run, deliveries = VirtualRun(), _Deliveries()
    now = waited_s = used_s = 0.0
    num_added = 0
    while num_added < len(requests) or scheduler.requests:
        while num_added < len(requests) and requests[num_added].due_s <= now:
            scheduler.add(requests[num_added].request, now)
            num_added += 1
        if tier is not None:
            tier.deliver(now)
        plan = scheduler.plan(now)
        if tier is not None:
            tier.dispatch(now)
        if plan is None:
            next_s = [requests[num_added].due_s] if num_added < len(requests) else []
            next_s += [tier.next_s] if tier is not None and tier.next_s is not None else []
            if not next_s:
                raise RuntimeError("requests are left and nothing is planned")
            now = max(now, min(next_s))
            continue
        elapsed_s = step_time_s(plan)
        if scheduler.num_waiting:
            waited_s += elapsed_s
            used_s += elapsed_s * scheduler.pool.num_used / scheduler.pool.num_total
        now += elapsed_s
        run.num_computed += plan.num_tokens
        result = runner.run(plan)
        result.elapsed_s = elapsed_s
        for event in scheduler.commit(result, {}, now):
            deliveries.take(event)
    run.records = [deliveries.record_of(number, timed) for number, timed in enumerate(requests)]
    run.preemptions = deliveries.preemptions
    run.occupancy = used_s / waited_s if waited_s else None
    run.end_s = now
    return run


class _Deliveries:
    """What came of each request, and when."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[tuple[float, int]]] = {}
        self.ends: dict[str, Ended] = {}
        self.cached: dict[str, int] = {}
        self.preemptions: Counter[str] = Counter()

    def take(self, event: Event) -> None:
        match event:
            case Progressed():
                self.tokens.setdefault(event.request_id, []).append((event.now_s, event.num_tokens))
            case Scheduled(resumed=False):
                self.cached[event.request_id] = event.num_cached_tokens
            case Preempted():
                self.preemptions[event.request_id] += 1
            case Ended():
                self.ends[event.request_id] = event
            case _:
                pass

    def record_of(self, number: int, timed: Timed) -> RequestRecord:
        name, end = timed.request.request_id, self.ends[timed.request.request_id]
        return RequestRecord(
            number=number,
            due_s=timed.due_s,
            end_s=end.now_s,
            num_input_tokens=len(timed.request.token_ids),
            num_output_tokens=end.num_output_tokens,
            deliveries=tuple(self.tokens.get(name, ())),
            num_cached_tokens=self.cached.get(name, 0),
            failure=None if end.reason in (FinishReason.STOP, FinishReason.LENGTH) else end.reason.value,
        )
