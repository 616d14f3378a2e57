"""Several engines behind one client: every request ends once, with the tokens of one engine alone, whichever are lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloister.cluster import ROUTERS, ReplicaSet, shadow_moves
from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.routers import Router, RouterContext
from cloister.cluster.shadow_moves import LEAD_PATIENCE, ShadowEnd
from cloister.engine import EngineClient, ProcessTransport, Supervision, channel
from cloister.engine.fork_server import ForkServer, _Template
from cloister.engine.replica_snapshot import Role
from cloister.engine.request_client import RequestClient
from cloister.kv import PrefixKeys
from cloister.types.clock import VirtualClock
from cloister.types.errors import EngineError, InvalidRequestError, MemoryBudgetError, QueueFullError
from cloister.types.events import Arrived, Ended, Event, FrontMessage, KVLoaded, KVStored, Outputs, Stepped
from cloister.types.request import FinishReason, ModelInfo, Request, SequenceOutput
from tests.engine.fake_transport import FakeTransport, opened_client
from tests.engine.forked_engines import spawn_forked
from tests.engine.replica import BLOCK_SIZE, VOCAB_SIZE, Replica, make_config, make_replica, make_request
from tests.history_program import greedy_continuation
from tests.thinning import examples

NUM_REPLICAS = 3
T = TypeVar("T")


def make_router(name: str, model: ModelInfo) -> Router:
    return ROUTERS.get(name)(RouterContext(PrefixKeys(model.fingerprint, BLOCK_SIZE), random.Random(0)))


class Engines:
    """Clients of engines in this process, which take steps, are lost and come back when they are told to."""

    def __init__(self, path: Path, router: str, roles: tuple[Role, ...] = ()) -> None:
        self.path = path
        self.clock = VirtualClock(10.0)
        self.on_the_way: list[list[Outputs]] = [[] for _ in range(NUM_REPLICAS)]
        self.replicas: list[Replica] = [self.new_engine() for _ in range(NUM_REPLICAS)]
        self.clients = [self.connect(index) for index in range(NUM_REPLICAS)]
        self.client = ReplicaSet(self.clients, partial(make_router, router), ClusterConfig(roles), BLOCK_SIZE, clock=self.clock)
        self.client.connect_routers()

    def new_engine(self) -> Replica:
        return make_replica(self.path, clock=self.clock, max_num_seqs=4, num_blocks=10)

    def connect(self, index: int) -> EngineClient:
        transport = FakeTransport()
        transport.supervision = Supervision()
        client = opened_client(transport, self.clock, max_waiting=3, max_num_seqs=4)
        transport.send = partial(self.pass_on, index)  # type: ignore[method-assign]
        return client

    def pass_on(self, index: int, message: FrontMessage) -> None:
        self.replicas[index].core.input_queue.put(message)

    def step(self, index: int) -> None:
        """Takes a step, whose messages arrive with the next one."""
        if self.clients[index].closed is not None:
            return
        early, self.on_the_way[index] = self.on_the_way[index], []
        for message in early:
            self.clients[index].receive(message)
        if (brought := self.replicas[index].core.step(self.on_the_way[index].append)) is not None:
            self.on_the_way[index].append(brought)

    def lose(self, index: int) -> None:
        if self.clients[index].closed is None:
            self.on_the_way[index].clear()
            self.clients[index]._stop_accepting()
            self.clients[index]._note_end()
            self.clients[index]._let_go()

    def restart(self, index: int) -> None:
        if self.clients[index].closed is not None:
            self.replicas[index] = self.new_engine()
            asyncio.run(self.clients[index]._open())
            self.clients[index]._send_due()


class Accounting(RuleBasedStateMachine):
    """Requests, and engines that are lost and restarted in any order."""

    path: Path
    router: str
    roles: tuple[Role, ...]

    def __init__(self) -> None:
        super().__init__()
        self.engines = Engines(self.path, self.router, self.roles)
        self.client = self.engines.client
        self.events: list[Event] = []
        self.client.subscribe(self.events.append)
        self.requests: dict[str, Request] = {}
        self.said: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: defaultdict[str, list[tuple[int, FinishReason]]] = defaultdict(list)
        self.left: set[str] = set()
        self.shadow_ends: list[object] = []

    def take(self, output: SequenceOutput) -> None:
        self.said[output.request_id, output.index] += output.token_ids
        if output.finish_reason is not None:
            self.ends[output.request_id].append((output.index, output.finish_reason))

    @rule(size=st.integers(0, 60), n=st.integers(1, 3), max_tokens=st.integers(1, 20), timeout_s=st.integers(1, 30))
    def submit(self, size: int, n: int, max_tokens: int, timeout_s: int) -> None:
        request = make_request([size % 5] * (size + 1), n=n, max_tokens=max_tokens, timeout_s=float(timeout_s))
        try:
            self.client.submit(request, self.take)
        except QueueFullError:
            accepting = [snapshot for snapshot in self.client.snapshots() if snapshot.is_accepting]
            has_slots = any(snapshot.num_sequences < snapshot.num_slots for snapshot in accepting)
            may_refuse_early = self.router == "conductor" and (self.roles or not has_slots)
            assert may_refuse_early or not accepting
        except EngineError:
            assert all(client.closed is not None for client in self.engines.clients)
        else:
            self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.requests)))
        self.left.add(request_id)
        self.client.abort(request_id)

    @rule(index=st.integers(0, NUM_REPLICAS - 1), num_steps=st.integers(1, 6))
    def step(self, index: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engines.clock.advance(0.05)
            self.engines.step(index)

    @rule(index=st.integers(0, NUM_REPLICAS - 1))
    def lose(self, index: int) -> None:
        self.engines.lose(index)

    @rule(index=st.integers(0, NUM_REPLICAS - 1))
    def restart(self, index: int) -> None:
        self.engines.restart(index)

    @precondition(lambda self: self.client._moves.places)
    @rule(data=st.data(), index=st.integers(0, NUM_REPLICAS - 1))
    def migrate(self, data: st.DataObject, index: int) -> None:
        request_id = data.draw(st.sampled_from(list(self.client._moves.places)))
        source = self.client._moves.places[request_id]
        if source != index and self.client._states.snapshot(index).is_accepting:
            self.client._moves.move_now(request_id, source, index)

    @precondition(lambda self: self.client._moves.places)
    @rule(data=st.data(), index=st.integers(0, NUM_REPLICAS - 1))
    def begin_shadow(self, data: st.DataObject, index: int) -> None:
        request_id = data.draw(st.sampled_from(list(self.client._moves.places)))
        if index != (source := self.client._moves.places[request_id]):
            self.client._moves.shadows.begin(request_id, source, index, self.shadow_ends.append)

    @invariant()
    def no_block_is_lost(self) -> None:
        for replica in self.engines.replicas:
            replica.scheduler.pool.check()

    @invariant()
    def each_open_request_is_in_one_place(self) -> None:
        held = [request_id for client in self.engines.clients for request_id in client._requests._by_id]
        assert len(held) == len(set(held))
        assert set(held) == set(self.client._moves.places)

    def teardown(self) -> None:
        """Lets everything end, then counts."""
        for index in range(NUM_REPLICAS):
            self.engines.restart(index)
        for _ in range(400):
            self.engines.clock.advance(0.05)
            for index in range(NUM_REPLICAS):
                self.engines.step(index)
        assert not self.client._moves.places
        assert not self.client.num_shadows
        assert not self.client.num_forecasts
        for replica in self.engines.replicas:
            assert replica.scheduler.pool.num_used == 0
        for request_id, request in self.requests.items():
            ended = [e for e in self.events if isinstance(e, Ended) and e.request_id == request_id]
            assert sorted(e.index for e in ended) == list(range(request.sampling.n))
            assert [e.last for e in ended].count(True) == 1
            assert sum(isinstance(e, Arrived) and e.request_id == request_id for e in self.events) == 1
            if request_id not in self.left:
                assert sorted(index for index, _ in self.ends[request_id]) == list(range(request.sampling.n))
            for index, reason in self.ends[request_id]:
                whole = greedy_continuation(request.token_ids, request.sampling.max_tokens or 0, VOCAB_SIZE)
                said = self.said[request_id, index]
                assert said == (whole if reason is FinishReason.LENGTH else whole[: len(said)])


@pytest.mark.parametrize(
    ("router", "roles"),
    [(router, ()) for router in ROUTERS.names()]
    + [("round_robin", ("prefill", "decode", "mixed")), ("conductor", ("prefill", "decode", "decode"))],
)
def test_every_request_ends_once_with_the_tokens_of_one_engine_alone(
    model_path: Path, router: str, roles: tuple[Role, ...]
) -> None:
    class Machine(Accounting):
        path = model_path

    Machine.router, Machine.roles = router, roles
    case = Machine.TestCase
    case.settings = settings(max_examples=examples(12), stateful_step_count=50, deadline=None)
    case().runTest()


def begin_move(engines: Engines) -> tuple[Request, list[int], list[ShadowEnd]]:
    """Has replica 1 compute a request of replica 0 too, until both have said as much. Returns what reaches the client."""
    request, said, ends = make_request("a", max_tokens=40), [], []
    engines.client.submit(request, lambda output: said.extend(output.token_ids))
    assert engines.client._moves.places[request.request_id] == 0
    step_until(engines, [0], lambda: len(said) == 3)
    assert engines.client._moves.shadows.begin(request.request_id, 0, 1, ends.append)
    (move,) = engines.client._moves.shadows._moves.values()
    step_until(engines, [0], lambda: len(said) == 4)
    step_until(engines, [1], lambda: move.num_level == 1)
    return request, said, ends


def step_until(engines: Engines, indexes: list[int], is_done: Callable[[], bool]) -> int:
    """Has replicas take steps in turns; returns how many each took."""
    for number in range(100):
        if is_done():
            return number
        for index in indexes:
            engines.step(index)
    raise AssertionError("100 steps were not enough")


def test_while_both_replicas_have_said_as_much_the_next_token_comes_from_the_first_that_has_it(model_path: Path) -> None:
    engines = Engines(model_path, "round_robin")
    request, said, ends = begin_move(engines)
    num_said = len(said)
    engines.step(0)
    assert len(said) == num_said + 1  # the source has not been stopped for a target that has nothing new
    assert not ends
    engines.step(1)
    assert len(said) == num_said + 1
    engines.step(1)
    assert len(said) == num_said + 2  # the target is ahead: its token comes at once, and the request is there
    assert ends == [ShadowEnd.TOOK_OVER]
    assert engines.client._moves.places[request.request_id] == 1
    step_until(engines, [1], lambda: len(said) == 40)
    assert said == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)


def test_a_source_is_not_stopped_however_long_the_target_says_the_same_before_it_is_ahead(model_path: Path) -> None:
    engines = Engines(model_path, "round_robin")
    request, said, ends = begin_move(engines)
    for _ in range(25):
        num_said = len(said)
        engines.step(0)
        engines.step(1)
        assert len(said) == num_said + 1  # without the source, the client would wait for the target's next step
    assert not ends
    engines.step(1)
    assert ends == [ShadowEnd.TOOK_OVER]
    step_until(engines, [1], lambda: len(said) == 40)
    assert said == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)


@pytest.mark.parametrize(("is_behind", "end"), [(False, ShadowEnd.TOOK_OVER), (True, ShadowEnd.FAILED)])
def test_when_the_time_of_a_move_is_over_a_target_that_has_said_as_much_gets_the_request(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind: bool, end: ShadowEnd
) -> None:
    engines, said = Engines(model_path, "round_robin"), []
    request = make_request("a", max_tokens=40)
    engines.client.submit(request, lambda output: said.extend(output.token_ids))
    step_until(engines, [0], lambda: len(said) == 3)
    monkeypatch.setattr(shadow_moves, "SHADOW_TIMEOUT_S", 0.0)

    async def main() -> ShadowEnd:
        moving = asyncio.create_task(engines.client._moves.shadows.run(request.request_id, 0, 1))
        while not len(engines.client._moves.shadows):
            await asyncio.sleep(0)
        (move,) = engines.client._moves.shadows._moves.values()
        engines.step(0)
        step_until(engines, [1], lambda: move.num_level == 1)
        if is_behind:
            engines.step(0)
        return await moving

    assert run(main()) is end
    assert engines.client._moves.places[request.request_id] == (0 if is_behind else 1)
    step_until(engines, [0 if is_behind else 1], lambda: len(said) == 40)
    assert said == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)
    assert not engines.client.num_shadows


def test_a_target_that_is_never_ahead_gets_the_request_after_some_steps(model_path: Path) -> None:
    engines = Engines(model_path, "round_robin")
    request, said, ends = begin_move(engines)
    assert step_until(engines, [0, 1], lambda: bool(ends)) == LEAD_PATIENCE
    assert ends == [ShadowEnd.TOOK_OVER]
    assert engines.client._moves.places[request.request_id] == 1
    step_until(engines, [1], lambda: len(said) == 40)
    assert said == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)


def test_a_request_that_is_being_moved_is_not_moved_a_second_time(model_path: Path) -> None:
    engines, said = Engines(model_path, "round_robin"), []
    request = make_request("a", max_tokens=60)
    engines.client.submit(request, lambda output: said.extend(output.token_ids))
    step_until(engines, [0], lambda: len(said) == 3)

    async def main() -> None:
        moves = [asyncio.create_task(engines.client.migrate(request.request_id, 1)) for _ in range(2)]
        while not all(move.done() for move in moves):
            for index in (0, 1, 1):  # the target is faster, so that it catches up
                engines.step(index)
            await asyncio.sleep(0)
        # the second one would stop the source without a target that is ready
        assert [move.result() for move in moves] == [True, False]

    run(main())
    assert engines.client.snapshots()[1].num_migrated == 1
    step_until(engines, [1], lambda: len(said) == 60)
    assert said == greedy_continuation(request.token_ids, 60, VOCAB_SIZE)


@pytest.mark.parametrize("router", ["capacity_random", "prefix_aware", "round_robin"])
def test_where_a_tenant_has_used_up_its_share_of_a_queue_its_requests_go_to_other_replicas(
    model_path: Path, router: str
) -> None:
    engines = Engines(model_path, router)

    def submit(client: RequestClient) -> None:
        client.submit(msgspec.structs.replace(make_request(), tenant="a"), lambda output: None)

    while engines.clients[0].has_room_for("a"):
        submit(engines.clients[0])
    assert engines.clients[0].snapshot().is_accepting
    num_each = engines.clients[0].num_requests
    for _ in range((NUM_REPLICAS - 1) * num_each):
        submit(engines.client)
    assert [client.num_requests for client in engines.clients] == [num_each] * NUM_REPLICAS
    with pytest.raises(QueueFullError, match="this key's tenant"):
        submit(engines.client)
    engines.client.submit(msgspec.structs.replace(make_request(), tenant="b"), lambda output: None)


def test_a_tenant_whose_share_is_used_up_has_no_prompts_computed_by_replicas_that_decode(model_path: Path) -> None:
    engines = Engines(model_path, "round_robin", ("prefill", "decode", "decode"))
    request = msgspec.structs.replace(make_request(), tenant="a")
    while engines.clients[0].has_room_for("a"):
        engines.clients[0].submit(msgspec.structs.replace(make_request(), tenant="a"), lambda output: None)
    with pytest.raises(QueueFullError, match="this key's tenant"):
        engines.client.submit(request, lambda output: None)


def test_a_lost_replica_passes_its_requests_on_at_once(model_path: Path) -> None:
    engines, outputs = Engines(model_path, "least_load"), []
    requests = [make_request(f"number {number}", max_tokens=12) for number in range(6)]
    for request in requests:
        engines.client.submit(request, outputs.append)
    assert [snapshot.num_requests for snapshot in engines.client.snapshots()] == [2, 2, 2]
    for _ in range(4):
        for index in range(NUM_REPLICAS):
            engines.step(index)
    engines.lose(0)
    assert [snapshot.num_requests for snapshot in engines.client.snapshots()] == [0, 3, 3]
    assert [snapshot.is_accepting for snapshot in engines.client.snapshots()] == [False, True, True]
    assert [snapshot.state for snapshot in engines.client.snapshots()] == ["starting", "running", "running"]
    health = engines.client.health()
    assert health.good
    detail = "2 of 3 replicas are healthy, 6 requests in flight; replica 0: the engine is being restarted"
    assert health.detail.startswith(detail)
    for _ in range(20):
        for index in (1, 2):
            engines.step(index)
    for request in requests:
        said = [token_id for output in outputs if output.request_id == request.request_id for token_id in output.token_ids]
        assert said == greedy_continuation(request.token_ids, 12, VOCAB_SIZE)


def test_a_replica_says_that_it_is_slow_or_drained_and_what_an_operator_did_counts_first(model_path: Path) -> None:
    engines = Engines(model_path, "least_load")
    engines.client._states.speeds._speeds[1].is_slow = True
    engines.client._states.draining.add(2)
    assert [snapshot.state for snapshot in engines.client.snapshots()] == ["running", "slow", "drained"]
    engines.client._verifier.suspicious.add(1)
    assert engines.client.snapshots()[1].state == "suspicious"
    engines.client._states.draining.add(1)
    engines.client.submit(make_request("a", max_tokens=2), lambda output: None)
    engines.client._states.draining.add(0)
    assert [snapshot.state for snapshot in engines.client.snapshots()] == ["draining", "drained", "drained"]
    engines.lose(2)
    assert engines.client.snapshots()[2].state == "starting"


def test_a_slow_replica_that_stands_by_does_not_let_the_last_one_be_drained(model_path: Path) -> None:
    engines = Engines(model_path, "least_load")
    engines.client._states.draining.add(2)
    engines.client._states.standby.add(1)
    engines.client.check_drain(0)  # replica 1 takes its place
    engines.client._states.speeds._speeds[1].is_slow = True
    with pytest.raises(InvalidRequestError, match="replica 1 stands by and is slow, replica 2 is drained; return a"):
        engines.client.check_drain(0)
    engines.client._states.standby.clear()
    engines.client.check_drain(0)  # one that is slow serves if no other one is left


def test_kv_that_came_from_another_replica_is_counted(model_path: Path) -> None:
    engines = Engines(model_path, "least_load")
    for num_bytes in (4096, 0):
        engines.client._observe(1, KVLoaded("r", 1.0, 16, num_bytes, 0.1, complete=num_bytes > 0))
    assert [snapshot.num_kv_loads for snapshot in engines.client.snapshots()] == [0, 1, 0]


def test_how_long_kv_took_to_come_is_forgotten_without_another_load(model_path: Path) -> None:
    """A time that was measured under a fault would else keep requests from the loads that would correct it."""
    engines = Engines(model_path, "least_load")
    engines.client._observe(1, KVLoaded("r", 1.0, 16, 4096, 8.0, complete=True))
    assert engines.client.snapshots()[1].transfer_token_s == 0.5
    engines.clock.advance(31.0)
    assert engines.client.snapshots()[1].transfer_token_s == 0.0
    engines.client._observe(1, KVLoaded("s", 1.0, 16, 4096, 0.016, complete=True))
    assert engines.client.snapshots()[1].transfer_token_s == 0.001


def test_a_replica_says_how_much_is_expected_of_its_answers_and_learns_from_their_ends(model_path: Path) -> None:
    engines = Engines(model_path, "least_work")
    for number in range(3):
        engines.client.submit(make_request([number] * 10, max_tokens=12, ignore_eos=True), lambda output: None)
    first = engines.client.snapshots()
    assert [(one.num_sequences, one.num_slots, one.num_expected_tokens) for one in first] == [(1, 4, 12.0)] * NUM_REPLICAS
    engines.client.submit(make_request([7] * 10, max_tokens=5, ignore_eos=False), lambda output: None)
    for index in [*range(NUM_REPLICAS)] * 6:
        engines.clock.advance(0.05)
        engines.step(index)
    assert all(0 < one.num_expected_tokens < 12 for one in engines.client.snapshots())
    for index in [*range(NUM_REPLICAS)] * 12:
        engines.step(index)
    assert sum(one.num_expected_tokens for one in engines.client.snapshots()) == 0
    assert engines.client.num_forecasts == 0
    lengths = engines.client._states.lengths
    assert lengths is not None
    assert lengths._predictor._num_learned == 1  # type: ignore[attr-defined]  # the others were of fixed length


@pytest.mark.parametrize("router", ROUTERS.names())
def test_only_routers_that_strict_profiles_refuse_learn_lengths(model_path: Path, router: str) -> None:
    engines = Engines(model_path, router)
    engines.client.submit(make_request([1] * 10, max_tokens=5), lambda output: None)
    learns = router in ("least_work", "conductor")
    assert (engines.client.length_errors() is not None) == learns
    assert engines.client.num_forecasts == learns


def test_the_load_of_a_step_is_that_of_all_replicas(model_path: Path) -> None:
    engines, events = Engines(model_path, "round_robin"), []
    engines.client.subscribe(events.append)
    for number in range(6):
        engines.client.submit(make_request([number] * 10, max_tokens=5), lambda output: None)
    for index in [*range(NUM_REPLICAS)] * 2:  # its messages arrive with the next step
        engines.step(index)
    last = [event for event in events if isinstance(event, Stepped)][-1]
    assert last.num_running == 6
    assert last.num_total_blocks == NUM_REPLICAS * 10


def test_what_tiers_hold_is_that_of_all_replicas_that_run(model_path: Path) -> None:
    engines, events = Engines(model_path, "round_robin"), []
    engines.client.subscribe(events.append)

    def say(index: int, used_bytes: int, oldest_s: float | None) -> None:
        stored = KVStored("disk", num_bytes=100, used_bytes=used_bytes, oldest_s=oldest_s)
        engines.clients[index].receive(Outputs([], [Stepped(0.0, 0.1, 1, 1, 1, 0, 1, 0, 8, stored=(stored,))]))

    say(0, 700, 3.0)
    say(1, 200, 9.0)
    say(2, 0, None)
    engines.lose(1)
    say(0, 800, 4.0)
    told = [stored for event in events if isinstance(event, Stepped) for stored in event.stored]
    assert [(one.num_bytes, one.used_bytes, one.oldest_s) for one in told] == [
        (100, 700, 3.0), (100, 900, 9.0), (100, 900, 9.0), (100, 800, 4.0),
    ]  # fmt: skip


def run(main: Coroutine[object, object, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, 600.0))


@asynccontextmanager
async def serving(path: Path, entry: str = "build_slow") -> AsyncIterator[ReplicaSet]:
    clients = [
        EngineClient(ProcessTransport(f"tests.engine.replica:{entry}", spawn=spawn_forked), make_config(path)) for _ in range(2)
    ]
    replicas = ReplicaSet(clients, partial(make_router, "least_load"))
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.drain(0.0)
        assert replicas.processes == []


async def answer(replicas: ReplicaSet, request: Request) -> list[SequenceOutput]:
    return [output async for output in replicas.generate(request)]


def test_blocks_of_a_request_that_has_left_do_not_stay_in_the_figures(model_path: Path) -> None:
    engines = Engines(model_path, "round_robin")
    request = make_request("a long prompt of several blocks", max_tokens=40)
    engines.client.submit(request, lambda output: None)
    step_until(engines, [0], lambda: engines.client.snapshots()[0].num_used_blocks > 0)
    engines.client.abort(request.request_id)
    step_until(engines, [0], lambda: not engines.client.num_places)
    assert engines.client.snapshots()[0].num_used_blocks == 0
    assert engines.client.snapshots()[0].num_total_blocks == 10


def test_processes_answer_though_one_of_them_is_killed(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            assert [name for name, _ in replicas.processes] == ["engine 0", "engine 1"]
            assert dict(replicas.memory)["KV cache"] == 2 * dict(replicas._replicas[0].memory)["KV cache"]
            requests = [make_request(f"request {number}", max_tokens=60) for number in range(8)]
            answers = [asyncio.create_task(answer(replicas, request)) for request in requests]
            await asyncio.sleep(0.3)
            os.kill(replicas.processes[1][1], signal.SIGKILL)
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                assert [token_id for o in outputs for token_id in o.token_ids] == greedy_continuation(
                    request.token_ids, 60, VOCAB_SIZE
                )
            assert [snapshot.num_routed for snapshot in replicas.snapshots()] == [8, 4]
            assert "the engine of replica 1 is gone" in caplog.text

    run(main())


def test_a_drained_replica_is_empty_and_every_answer_is_whole(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_moves, "LEAD_PATIENCE", 4)  # these engines sleep in step, so that none is ahead by chance

    async def main() -> None:
        async with serving(model_path) as replicas:
            requests = [make_request(f"request {number}", max_tokens=80) for number in range(8)]
            answers = [asyncio.create_task(answer(replicas, request)) for request in requests]
            await asyncio.sleep(0.3)
            assert await replicas.drain_replica(1) == 0
            assert [snapshot.num_requests for snapshot in replicas.snapshots()] == [8, 0]
            assert [snapshot.is_accepting for snapshot in replicas.snapshots()] == [True, False]
            with pytest.raises(InvalidRequestError, match="no other replica is left"):
                await replicas.drain_replica(0)
            with pytest.raises(InvalidRequestError, match="numbered 0 to 1"):
                await replicas.drain_replica(2)
            for request, outputs in zip(requests, await asyncio.gather(*answers), strict=True):
                whole = greedy_continuation(request.token_ids, 80, VOCAB_SIZE)
                assert [token_id for o in outputs for token_id in o.token_ids] == whole
            replicas.return_replica(1)
            assert [snapshot.is_accepting for snapshot in replicas.snapshots()] == [True, True]
            assert [snapshot.num_migrated for snapshot in replicas.snapshots()] == [4, 0]

    run(main())


def test_replicas_that_do_not_fit_are_told_how_many_would(model_path: Path) -> None:
    async def start(num: int) -> None:
        server = ForkServer()
        engines = [
            EngineClient(ProcessTransport("tests.engine.replica:build_too_large", fork_server=server), make_config(model_path))
            for _ in range(num)
        ]
        await ReplicaSet(engines, partial(make_router, "least_load")).start()

    with pytest.raises(
        MemoryBudgetError,
        match=r"^start 5 replicas at most, since 20 share the memory: of each, it needs 4 MiB, but 1 MiB are available$",
    ):
        asyncio.run(start(20))
    with pytest.raises(MemoryBudgetError, match=r"^it needs 4 MiB, but 1 MiB are available; raise --memory-share$"):
        asyncio.run(start(2))


def test_of_many_engines_that_cannot_be_built_one_template_is_loaded(model_path: Path) -> None:
    made = []

    class Counting(ForkServer):
        async def _make(self, boot: channel.Boot) -> _Template:
            made.append(boot)
            return await super()._make(boot)

    async def main() -> None:
        server = Counting()
        engines = [
            EngineClient(ProcessTransport("tests.engine.replica:build_refusing", fork_server=server), make_config(model_path))
            for _ in range(20)
        ]
        with pytest.raises(MemoryBudgetError, match="start fewer replicas: 20 share"):
            await ReplicaSet(engines, partial(make_router, "least_load")).start()
        assert server.pid is None
        with pytest.raises(MemoryBudgetError):  # memory may be free by then
            await EngineClient(
                ProcessTransport("tests.engine.replica:build_refusing", fork_server=server), make_config(model_path)
            ).start()

    run(main())
    assert len(made) == 2


def test_a_replica_that_cannot_start_ends_the_others_and_says_why(model_path: Path) -> None:
    async def main() -> None:
        clients = [
            EngineClient(ProcessTransport(f"tests.engine.replica:{entry}", spawn=spawn_forked), make_config(model_path))
            for entry in ("build", "build_refusing")
        ]
        with pytest.raises(MemoryBudgetError, match="--max-model-len 7"):
            await ReplicaSet(clients, partial(make_router, "least_load")).start()
        assert [client.pid for client in clients] == [None, None]

    run(main())


def test_replicas_that_compute_otherwise_are_refused_and_told_what_may_differ(model_path: Path) -> None:
    """Such as on a processor with other kernels: equal settings do not help there."""

    async def main() -> None:
        entries = ("tests.engine.replica:build", "tests.cluster.test_rolling_update:build_other_weights")
        clients = [EngineClient(ProcessTransport(entry, spawn=spawn_forked), make_config(model_path)) for entry in entries]
        with pytest.raises(EngineError, match=r"instruction sets differ; .* one set that all have, such as CLOISTER_ISA=avx2"):
            await ReplicaSet(clients, partial(make_router, "least_load")).start()
        assert [client.pid for client in clients] == [None, None]

    run(main())
