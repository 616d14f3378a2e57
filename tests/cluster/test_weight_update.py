"""Replicas get other weights while requests go on: each answer is of one of both, and nothing is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from cloister.cluster import ROUTERS, ReplicaSet
from cloister.cluster.rolling_update import EngineRelease
from cloister.cluster.routers import Router, RouterContext
from cloister.engine import EngineClient
from cloister.engine.core import EngineCore
from cloister.engine.in_flight import EngineStats
from cloister.engine.replica_snapshot import UpdateProgress
from cloister.engine.supervision import Restarts, Supervision
from cloister.engine.transports import Deliver, ThreadTransport
from cloister.executor.sampling import NOT_FINITE
from cloister.kv import PrefixKeys
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.config import EngineConfig
from cloister.types.errors import InvalidRequestError, MemoryBudgetError
from cloister.types.events import Event, Outputs, Ready, Shutdown
from cloister.types.request import FinishReason, ModelInfo, Request, SequenceOutput
from cloister.types.step import StepPlan, StepResult
from tests.engine.replica import BLOCK_SIZE, VOCAB_SIZE, SpeakingRunner, SteppedRunner, make_config, make_replica, make_request
from tests.history_program import greedy_continuation
from tests.model_factory import make_model

WAIT_S = 300.0
NEW = 1
BY_WEIGHTS = {"": 0, "weights 1": NEW}
Make = Callable[[int], EngineClient]


def make_router(model: ModelInfo) -> Router:
    return ROUTERS.get("least_load")(RouterContext(PrefixKeys(model.fingerprint, BLOCK_SIZE), random.Random(0)))


class Pace:
    """How long steps take. They are slow until the test has done what has to happen in the middle of an answer.

    Attributes:
        step_s: of each step that begins now.
    """

    def __init__(self, step_s: float = 0.002) -> None:
        self.step_s = step_s

    def wait(self, plan: StepPlan) -> None:
        time.sleep(self.step_s)


SLOW_S = 0.05


def make_core(path: Path, weights: int = 0, *, max_num_seqs: int = 16, pace: Pace | None = None) -> EngineCore:
    before = (pace or Pace()).wait
    return make_replica(path, wrap=lambda r: SteppedRunner(r, before=before), weights=weights, max_num_seqs=max_num_seqs).core


def in_thread(path: Path, core: EngineCore) -> EngineClient:
    return EngineClient(ThreadTransport(core), make_config(path))


class LosableTransport(ThreadTransport):
    """A transport to an engine that a test can end as if its process had died; another one is started then."""

    def __init__(self, make: Callable[[], EngineCore]) -> None:
        self._make, self._is_used = make, False
        super().__init__(make())
        self.supervision = Supervision(restarts=Restarts(max_restarts=1))

    async def open(self, config: EngineConfig) -> None:
        if self._is_used:
            self._core = core = self._make()
            self.ready = Ready(core.model, core.memory, core.adapters.loaded, core.startup)
        self._is_used = True

    async def run(self, deliver: Deliver) -> None:
        self._lost = asyncio.Event()
        lost = self._lost

        def pass_on(message: Outputs) -> None:
            if not lost.is_set():
                deliver(message)

        running = asyncio.create_task(super().run(pass_on))
        losing = asyncio.create_task(lost.wait())
        await asyncio.wait({running, losing}, return_when=asyncio.FIRST_COMPLETED)
        losing.cancel()
        if not running.done():
            self._core.input_queue.put(Shutdown(0.0))
            await running

    def kill(self) -> None:
        self._lost.set()


def losable(path: Path, make: Callable[[], EngineCore], **changes: int) -> EngineClient:
    return EngineClient(LosableTransport(make), make_config(path, **changes))


def lose(replicas: ReplicaSet, index: int) -> None:
    replicas._replicas[index]._transport.kill()


def refuse(index: int) -> EngineClient:
    raise MemoryBudgetError("it does not fit; set --max-model-len 7 or less")


@asynccontextmanager
async def serving(
    path: Path, make_new: Make | None = None, num_replicas: int = 2, pace: Pace | None = None, **settings: float
) -> AsyncIterator[ReplicaSet]:
    """Replicas whose new engines `make_new` makes; without it they have other weights."""

    def make_old(index: int) -> EngineClient:
        return in_thread(path, make_core(path, pace=pace))

    new = make_new or (lambda index: in_thread(path, make_core(path, NEW)))
    replicas = ReplicaSet(
        [make_old(index) for index in range(num_replicas)],
        make_router,
        release=EngineRelease("old", lambda index, lora: make_old(index)),
        make_release=lambda model: EngineRelease(model, lambda index, lora: new(index)),
        **settings,
    )
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.drain(0.0)


async def update(replicas: ReplicaSet, model: str | None = "new") -> UpdateProgress:
    replicas.update_replicas(model)
    async with asyncio.timeout(WAIT_S):
        while (progress := replicas.update_progress) is None or progress.is_running:
            await asyncio.sleep(0.005)
    return progress


@dataclasses.dataclass
class Seen:
    """What a client sees of its request, and the front of its engine."""

    request: Request
    stats: EngineStats = dataclasses.field(default_factory=EngineStats)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    ends: list[FinishReason] = dataclasses.field(default_factory=list)
    error: str = ""

    def refuse(self) -> None: ...

    def observe(self, event: Event) -> None: ...

    def take(self, output: SequenceOutput) -> None:
        self.token_ids += output.token_ids
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)
            self.error = output.error

    @property
    def is_right(self) -> bool:
        """Whether it is whole, and the answer of the weights that the front names."""
        weights = BY_WEIGHTS[self.stats.fingerprint]
        length = self.request.sampling.max_tokens
        expected = greedy_continuation(self.request.token_ids, length, VOCAB_SIZE, weights)
        return self.ends == [FinishReason.LENGTH] and self.token_ids == expected


def begin(replicas: ReplicaSet, prompt: str = "once", max_tokens: int = 40) -> Seen:
    seen = Seen(make_request(prompt, max_tokens=max_tokens))
    replicas.submit(seen.request, seen.take, seen)
    return seen


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


def fingerprints(replicas: ReplicaSet) -> list[str]:
    return [replica.fingerprint for replica in replicas._replicas]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_each_answer_is_of_one_weights_and_none_begins_with_the_old_ones_after_the_switch(
    model_path: Path, num_replicas: int
) -> None:
    async def main() -> None:
        async with serving(model_path, num_replicas=num_replicas) as replicas:
            seen: list[Seen] = []
            updating = asyncio.create_task(update(replicas))

            async def send() -> None:
                while not updating.done():
                    one = begin(replicas, f"request {len(seen)}", 4 + len(seen) % 12)
                    seen.append(one)
                    await until(lambda one=one: one.ends)

            await asyncio.gather(*(send() for _ in range(4)))
            assert await updating == UpdateProgress(num_replicas, num_replicas, is_running=False)
            seen.append(begin(replicas))
            await until(lambda: seen[-1].ends)
            assert all(one.is_right for one in seen)
            order = [BY_WEIGHTS[one.stats.fingerprint] for one in seen]
            assert order == sorted(order)
            assert set(order) == {0, NEW}
            assert replicas.model.fingerprint == "weights 1"
            assert fingerprints(replicas) == ["weights 1"] * num_replicas

    asyncio.run(main())


def test_the_last_old_engine_ends_what_it_has_begun(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            long = [begin(replicas, f"long {number}", 100) for number in range(2)]
            await until(lambda: all(one.token_ids for one in long))
            assert not (await update(replicas)).error
            assert all(one.is_right and not one.stats.fingerprint for one in long)

    asyncio.run(main())


def test_the_count_of_requests_that_a_replica_was_given_goes_on_over_its_engines(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            begun = [begin(replicas, f"number {number}", 5) for number in range(4)]
            await until(lambda: all(one.ends for one in begun))
            counts = [snapshot.num_routed for snapshot in replicas.snapshots()]
            assert sum(counts) == 4
            other = in_thread(model_path, make_core(model_path))
            await other.start()
            old = replicas._updates.put_client(0, other)
            assert [snapshot.num_routed for snapshot in replicas.snapshots()] == counts
            begun = [begin(replicas, f"then {number}", 5) for number in range(4)]
            await until(lambda: all(one.ends for one in begun))
            assert sum(snapshot.num_routed for snapshot in replicas.snapshots()) == 8
            await replicas._updates.put_client(0, old).drain(0.0)  # as an update that is undone
            assert sum(snapshot.num_routed for snapshot in replicas.snapshots()) == 8

    asyncio.run(main())


def test_what_has_begun_moves_to_its_own_weights_only_and_what_has_not_to_any(model_path: Path) -> None:
    async def main() -> None:
        pace = Pace(SLOW_S)
        async with serving(model_path, num_replicas=3, pace=pace) as replicas:
            other = in_thread(model_path, make_core(model_path, NEW))
            await other.start()
            await replicas._updates.put_client(2, other).drain(0.0)
            await replicas.drain_replica(2)
            await replicas.drain_replica(1)
            begun = begin(replicas, "begun", 150)
            await until(lambda: begun.token_ids)
            fresh = begin(replicas, "fresh", 20)
            replicas.return_replica(2)
            replicas.return_replica(1)
            assert await replicas.migrate(fresh.request.request_id, 2)
            assert not await replicas.migrate(begun.request.request_id, 2)
            assert await replicas.migrate(begun.request.request_id, 1)
            pace.step_s = 0.0
            await until(lambda: begun.ends and fresh.ends)
            assert begun.is_right
            assert fresh.is_right
            assert (begun.stats.fingerprint, fresh.stats.fingerprint) == ("", "weights 1")

    asyncio.run(main())


def test_a_move_that_waits_for_a_step_does_not_go_on_with_the_other_weights_that_its_target_gets(model_path: Path) -> None:
    async def main() -> None:
        arrived, goes_on, num_steps = threading.Event(), threading.Event(), itertools.count()

        def hold(plan: StepPlan) -> None:
            if next(num_steps) == 2:
                arrived.set()
                assert goes_on.wait(WAIT_S)

        async with serving(model_path) as replicas:
            held = make_replica(model_path, wrap=lambda r: SteppedRunner(r, before=hold)).core
            slow = in_thread(model_path, held)
            other = in_thread(model_path, make_core(model_path, NEW))
            await asyncio.gather(slow.start(), other.start())
            await replicas._updates.put_client(0, slow).drain(0.0)
            await replicas.drain_replica(1)
            begun = begin(replicas, "begun", 12)
            await until(lambda: arrived.is_set() and len(begun.token_ids) == 2)
            replicas.return_replica(1)
            moving = asyncio.create_task(replicas.migrate(begun.request.request_id, 1))
            await until(lambda: replicas._moves._step_waiters[0])
            old = replicas._updates.put_client(1, other)
            goes_on.set()
            assert not await moving
            await until(lambda: begun.ends)
            assert begun.is_right
            await old.drain(0.0)

    asyncio.run(main())


def test_a_prompt_finds_no_prefix_of_other_weights(model_path: Path) -> None:
    prompt = "a prompt that is longer than some blocks of eight tokens"

    async def main() -> None:
        async with serving(model_path, verify_replay=1.0) as replicas:
            for _ in range(3):
                first = begin(replicas, prompt)
                await until(lambda first=first: first.ends)
            assert not (await update(replicas)).error
            again = begin(replicas, prompt)
            await until(lambda: again.ends)
            assert again.is_right
            assert again.stats.num_cached_tokens == 0
            await asyncio.sleep(0.05)
            assert [snapshot.num_mismatches for snapshot in replicas.snapshots()] == [0, 0]

    asyncio.run(main())


def test_an_answer_is_compared_with_one_of_its_own_weights_only(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, verify_replay=1.0) as replicas:
            other = in_thread(model_path, make_core(model_path, NEW))
            await other.start()
            await replicas._updates.put_client(1, other).drain(0.0)
            for number in range(6):
                one = begin(replicas, f"request {number}", 5)
                await until(lambda one=one: one.ends)
                await asyncio.sleep(0.02)
            assert {replica.num_routed for replica in replicas.snapshots()} != {0}
            assert [snapshot.num_mismatches for snapshot in replicas.snapshots()] == [0, 0]
            assert replicas._verifier.num_replays == 0

    asyncio.run(main())


@pytest.mark.parametrize("on", ["local", "ray"])
def test_engines_with_other_weights_get_the_context_window_that_is_served(on: str) -> None:
    settings = resolve_settings({"model": "cloister-5m", "replicas": 2})
    replicas = make_engine(settings.engine.config, dataclasses.replace(settings.server.config, on=on))
    assert isinstance(replicas, ReplicaSet)
    assert replicas._updates._make_release is not None
    replicas.model = ModelInfo(name="old", path="", max_model_len=128, vocab_size=VOCAB_SIZE, eos_token_ids=())
    assert replicas._updates._make_release("new").make(0, None)._config.max_model_len == 128
    assert replicas._updates._make_release("cloister-5m").make(0, None)._config.max_model_len is None


@pytest.mark.slow  # four engines with models
@pytest.mark.parametrize(
    ("max_positions", "why"), [(256, ""), (64, "max_model_len is 128 and the model was trained for 64 positions")]
)
def test_weights_with_a_longer_context_window_get_the_one_that_is_served_and_those_with_a_shorter_one_are_refused(
    tmp_path: Path, max_positions: int, why: str
) -> None:
    old = make_model(tmp_path / "old", "llama", max_position_embeddings=128)
    new = make_model(tmp_path / "new", "llama", seed=1, max_position_embeddings=max_positions)

    async def main() -> None:
        given = {"model": str(old), "num_threads": 1, "replicas": 2, "kv_memory_mb": 8, "weights_cache": ""}
        settings = resolve_settings(given)
        replicas = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(replicas, ReplicaSet)
        await replicas.start()
        try:
            before = replicas.model.fingerprint
            progress = await update(replicas, str(new))
            assert (progress.num_updated, why in progress.error) == (0 if why else 2, True), progress.error
            assert (replicas.model.fingerprint == before) is bool(why)
            assert replicas.model.max_model_len == 128
        finally:
            await replicas.drain(0.0)

    asyncio.run(main())


def with_other_length(path: Path) -> EngineCore:
    core = make_core(path, NEW)
    core.model = msgspec.structs.replace(core.model, max_model_len=128, defaults={"top_k": 3.0})
    return core


class DamagedRunner(SpeakingRunner):
    """A runner whose weights are no numbers."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan_id=plan.plan_id, failures={p.seq_id: NOT_FINITE for p in plan.sequences if p.num_samples})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda path: lambda index: refuse(index),
            "replica 0: it does not fit; .*7 or less; all replicas have the old weights",
        ),
        (
            lambda path: lambda index: in_thread(path, with_other_length(path)),
            "replica 0: the new weights differ in max_model_len, defaults, .*; start another server",
        ),
        (
            lambda path: lambda index: in_thread(path, make_core(path)),
            "replica 0: the new engine has the same weights and formats as the others",
        ),
        (
            lambda path: lambda index: in_thread(path, make_replica(path, SpeakingRunner(""), weights=NEW).core),
            "replica 0: the new engine did not compute a trial request: .+; all replicas have the old weights",
        ),
        (
            lambda path: lambda index: in_thread(path, make_replica(path, DamagedRunner(""), weights=NEW).core),
            f"replica 0: the new engine did not compute a trial request: {NOT_FINITE}; all replicas have the old weights",
        ),
        (
            lambda path: lambda index: in_thread(path, make_core(path, NEW)) if index == 0 else refuse(index),
            "replica 1: it does not fit; .*; all replicas have the old weights",
        ),
        (
            lambda path: lambda index: in_thread(path, make_core(path, NEW + index)),
            "replica 1: the new engine has the fingerprint weights 2, not weights 1: .*; all replicas have the old weights",
        ),
    ],
    ids=["no start", "other front", "no change", "no step", "no numbers", "second no start", "changes again"],
)
def test_new_weights_that_do_not_work_are_rolled_back_and_no_request_is_lost(
    model_path: Path, make: Callable[[Path], Make], why: str
) -> None:
    async def main() -> None:
        async with serving(model_path, make(model_path)) as replicas:
            seen: list[Seen] = []
            updating = asyncio.create_task(update(replicas))
            while not updating.done():
                seen.append(begin(replicas, f"request {len(seen)}", 20))
                await asyncio.sleep(0.02)
            progress = await updating
            seen.append(begin(replicas, "the last"))
            await until(lambda: all(one.ends for one in seen))
            assert re.match(why, progress.error)
            assert (progress.num_updated, progress.is_rolling_back) == (0, False)
            assert all(one.is_right for one in seen)
            assert fingerprints(replicas) == ["", ""]
            assert seen[-1].stats.fingerprint == replicas.model.fingerprint == ""

    asyncio.run(main())


def test_weights_whose_engine_dies_in_its_place_are_rolled_back(model_path: Path) -> None:
    pace = Pace(SLOW_S)

    def make_new(index: int) -> EngineClient:
        return losable(model_path, lambda: make_core(model_path, NEW, pace=pace))

    async def main() -> None:
        async with serving(model_path, make_new, pace=pace) as replicas:
            long = [begin(replicas, f"long {number}", 150) for number in range(2)]
            await until(lambda: all(one.token_ids for one in long))
            updating = asyncio.create_task(update(replicas))
            await until(lambda: replicas.update_progress and replicas.update_progress.num_updated)
            late = [begin(replicas, f"late {number}", 40) for number in range(4)]
            await until(lambda: all(one.token_ids for one in late))
            lose(replicas, 0)
            pace.step_s = 0.0
            progress = await updating
            assert re.match(r"replica 1: the engine of replica 0, which has the new weights, died.*old weights", progress.error)
            await until(lambda: all(one.ends for one in (*long, *late)))
            assert all(one.is_right for one in (*long, *late))
            assert {one.stats.fingerprint for one in late} == {"weights 1"}
            assert fingerprints(replicas) == ["", ""]

    asyncio.run(main())


def test_where_no_replica_of_its_weights_is_left_a_begun_request_ends_once_and_another_begins_again(model_path: Path) -> None:
    async def main() -> None:
        cores = iter([make_core(model_path, 0, max_num_seqs=1), make_core(model_path, NEW)])  # its files are changed
        old = losable(model_path, lambda: next(cores), max_num_seqs=1)
        replicas = ReplicaSet([in_thread(model_path, make_core(model_path, NEW)), old], make_router)
        await asyncio.gather(*(replica.start() for replica in replicas._replicas))
        replicas.model = replicas._replicas[0].model
        replicas.connect_routers()
        try:
            await replicas.drain_replica(0)
            begun = begin(replicas, "begun", 240)
            await until(lambda: begun.token_ids)
            fresh = begin(replicas, "fresh")
            replicas.return_replica(0)
            lose(replicas, 1)
            await until(lambda: begun.ends and fresh.ends)
            assert begun.ends == [FinishReason.ERROR]
            assert "died too often" in begun.error
            said = greedy_continuation(begun.request.token_ids, len(begun.token_ids), VOCAB_SIZE)
            assert begun.token_ids == said
            assert fresh.is_right
            assert fresh.stats.fingerprint == "weights 1"
        finally:
            await replicas.drain(0.0)

    asyncio.run(main())


def test_drained_replicas_get_the_new_weights_too_and_stay_drained(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            await replicas.drain_replica(0)
            long = begin(replicas, "long", 100)
            await until(lambda: long.token_ids)
            assert not (await update(replicas)).error
            late = begin(replicas, "late")
            await until(lambda: late.ends)
            assert long.is_right
            assert late.is_right
            assert fingerprints(replicas) == ["weights 1"] * 2
            assert [replicas._updates.is_drained(index) for index in range(2)] == [True, False]

    asyncio.run(main())


def test_the_next_update_is_one_of_the_weights_that_are_served_by_then(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            assert not (await update(replicas)).error
            assert not (await update(replicas, None)).error
            with pytest.raises(InvalidRequestError, match="one engine"):
                replicas._replicas[0].update_replicas("new")
            assert fingerprints(replicas) == ["weights 1"] * 2

    asyncio.run(main())
