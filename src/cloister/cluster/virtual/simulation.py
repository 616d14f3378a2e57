"""Runs a scenario in a virtual cluster, with its faults, and checks the invariants of the run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from cloister.cluster.hot_prefixes import HotPrefixes
from cloister.cluster.lengths import LengthCurves, LengthPredictor
from cloister.cluster.link import LinkTimes
from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.replica_states import ClusterConfig, ScalingConfig
from cloister.cluster.virtual.adapters import adapter_name
from cloister.cluster.virtual.checks import RECOVERY_S, JobAnswer, check_events, updates_of
from cloister.cluster.virtual.engine import SLOT_KIB, VirtualEngine, make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import VirtualEventLoop, run_virtually
from cloister.cluster.virtual.front import OLD_WEIGHTS, make_front
from cloister.cluster.virtual.job_requests import make_request, prompt_of
from cloister.cluster.virtual.kv_links import KVSwitch, endpoint_of
from cloister.cluster.virtual.leftovers import check_copies, find_leftovers
from cloister.cluster.virtual.network import GOOD, NetworkPath, VirtualNetwork
from cloister.cluster.virtual.replica import Host
from cloister.cluster.virtual.scenario import InjectedFault, OperatorAction, Scenario, UpdateTrouble
from cloister.cluster.virtual.single_engine import check_answers
from cloister.cluster.virtual.tier_threads import VirtualPool
from cloister.cluster.virtual.transport import LinkTransport
from cloister.cluster.virtual.wrong_lengths import WrongLengths
from cloister.engine.client import EngineClient
from cloister.engine.supervision import Restarts, Supervision
from cloister.kv import PrefixKeys
from cloister.text import Tokenizer
from cloister.types.errors import CloisterError, InvalidRequestError
from cloister.types.events import Event, FrontMessage, HoldKV, KVSource, PrefetchKV, Stepped, Submit
from cloister.types.request import ModelInfo

LONGEST_S: Final = 400.0
"""Virtual time within which all requests must have ended."""
REST_S: Final = RECOVERY_S + 25.0
"""Maximum virtual time in which the cluster becomes idle after the last request: a hang is noticed within `RECOVERY_S`, and KV
that the new engine computes is held for others for 20 s."""
QUIET_S: Final = 6.0
"""A cluster without leftovers for this time stays so: by then lost links are noticed and lost frames are sent again."""
LOOK_EVERY_S: Final = 1.0
DRAIN_S: Final = 5.0
SCALE_DOWN_S: Final = 0.5
UPDATE_LOOK_S: Final = 0.05
MANY: Final = 1_000_000
NUM_RESTARTS: Final = 20
"""More restarts than faults and killing requests can use up, so that no front gives up an engine."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run.

    Attributes:
        violations: broken invariants, one line each.
        digest: of all messages and events in order, with their times; equal for equal runs.
        faults: how many were injected, by kind.
        num_requests, num_tokens: requests accepted, and tokens that their clients got.
    """

    violations: tuple[str, ...]
    digest: str
    faults: Counter[str]
    num_requests: int
    num_tokens: int


def run_scenario(scenario: Scenario, tokenizer: Tokenizer) -> RunOutcome:
    """Runs a scenario.

    Args:
        tokenizer: of `write_byte_tokenizer`.
    """
    simulation = _Simulation(scenario, tokenizer)
    try:
        run_virtually(simulation.run())
    except RuntimeError as error:  # nothing will ever happen again
        return simulation.outcome([str(error)])
    simulation.violations += check_answers(simulation, simulation.shape, tokenizer) + check_events(simulation)
    return simulation.outcome(simulation.violations)


async def operate(front: ReplicaSet, operation: OperatorAction, answers: Sequence[JobAnswer]) -> None:
    """Moves a request, drains a replica, changes a role or drops a cache, if the cluster lets it.

    Args:
        answers: to the jobs, by number.
    """
    with contextlib.suppress(InvalidRequestError):  # no other replica would be left
        match operation.kind:
            case "migrate":
                await front.migrate(f"r{operation.job}", operation.replica)
            case "drain":
                await front.drain_replica(operation.replica, DRAIN_S)
                await asyncio.sleep(operation.lasts_s)
                front.return_replica(operation.replica)
            case "flip":
                await front.set_role(operation.replica, operation.role, DRAIN_S)
            case "forget":
                await front.inspect_cache(answers[operation.job].request.scope, drop=True)


@dataclass
class _Simulation:
    """A scenario while it runs."""

    scenario: Scenario
    tokenizer: Tokenizer
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    late_s: float = 0.0

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.shape = EngineShape(
            num_blocks=scenario.num_blocks,
            max_num_seqs=scenario.max_num_seqs,
            max_waiting=scenario.max_waiting,
            policy=scenario.scheduler,
            num_adapters=scenario.num_adapters,
            drafts=scenario.drafts,
            helper_s=scenario.helper_s,
            tiers=scenario.tiers,
            damages_tiers=scenario.damages_tiers,
            pool=scenario.pool,
        )
        self.draw = random.Random(scenario.seed)
        self.network = VirtualNetwork(self.draw, scenario.delay_s)
        self.switch = KVSwitch(self.network, self.draw, scenario.damages_kv)
        self.pool: VirtualPool | None = None
        if scenario.pool != "none":
            num_parts = scenario.num_replicas * (1 + len(updates_of(scenario)))  # an update starts one beside each other
            self.pool = VirtualPool(scenario.tiers[0], SLOT_KIB << 10, num_parts)
        self.served: dict[str, set[int]] = {}  # replicas that have had requests of a tenant
        self.answers = [JobAnswer.to(job, make_request(job, f"r{number}")) for number, job in enumerate(scenario.jobs)]
        self.hosts: list[Host] = []  # those of the replicas, and then those that updates bring
        self.hosts_of: list[list[Host]] = []
        self.updating: OperatorAction | None = None
        self.transports: list[LinkTransport] = []
        self.clients: list[EngineClient] = []
        self.front: ReplicaSet | None = None
        self.open: dict[int, asyncio.Task[None]] = {}
        self.loop: VirtualEventLoop

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualEventLoop)
        self.loop = loop
        loop.set_exception_handler(self._note_exception)
        self.hosts_of = [[] for _ in range(self.scenario.num_replicas)]
        for replica in range(self.scenario.num_replicas):
            self._make_host(replica, OLD_WEIGHTS)
        await self._start_front()
        async with asyncio.TaskGroup() as group:
            for number, answer in enumerate(self.answers):
                group.create_task(self._run_job(number, answer))
            for fault in self.scenario.faults:
                group.create_task(self._inject(fault))
            for operation in self.scenario.operations:
                group.create_task(self._operate(operation))
        await self._settle()

    def outcome(self, violations: Sequence[str]) -> RunOutcome:
        """Returns the outcome of the run."""
        return RunOutcome(
            tuple(violations),
            self.network.digest.hexdigest(),
            self.faults + self.network.faults,
            sum(answer.refusal is None for answer in self.answers),
            sum(len(ids) for answer in self.answers for ids in answer.token_ids),
        )

    # What happens

    def _make_host(self, replica: int, model: str) -> Host:
        index, update = len(self.hosts), self.updating
        host = Host(
            index,
            lambda: self._make_engine(index, replica, int(model), update),
            self.network,
            self.draw,
            start_s=self.shape.start_s,
            times=LinkTimes(),
            switch=self.switch if self.scenario.moves_kv or self.scenario.copies_prefixes else None,
        )
        if self._has_trouble("start", int(model), replica, update):
            host.refuses_starts = NUM_RESTARTS
        self.hosts.append(host)
        self.hosts_of[replica].append(host)
        return host

    def _host_of(self, replica: int) -> Host:
        """Returns the last machine of a replica whose engine runs."""
        return next((host for host in reversed(self.hosts_of[replica]) if host.process is not None), self.hosts[replica])

    def _has_trouble(self, trouble: UpdateTrouble, weights: int, replica: int | None, update: OperatorAction | None) -> bool:
        """Whether an engine that an update starts has this trouble, on all replicas or on one."""
        if update is None or update.trouble != trouble or replica not in (None, update.replica):
            return False
        return weights == update.weights or (update.weights is None and replica is not None)

    def _make_engine(self, index: int, replica: int, weights: int, update: OperatorAction | None) -> VirtualEngine:
        offsets_s = self.scenario.clock_offsets_s
        offset_s = offsets_s[index] if index < len(offsets_s) else 0.0
        shape = replace(self.shape, weights=weights)
        if self._has_trouble("front", weights, None, update):
            shape = replace(shape, max_model_len=shape.max_model_len // 2)
        engine = make_engine(shape, self.tokenizer, self.loop.clock, offset_s, self.draw, self.hosts[index].lora, self.pool)
        if self._has_trouble("step", weights, replica, update):
            engine.runner.num_failing = MANY
        engine.runner.kills_after = {
            prompt_of(job): job.kills_after for job in self.scenario.jobs if job.kills_after is not None
        }
        return engine

    def _make_supervision(self) -> Supervision:
        idle_timeout_s = self.scenario.idle_timeout_s
        return Supervision(
            look_every_s=Supervision().look_every_s if idle_timeout_s is None else idle_timeout_s / 2,
            restarts=Restarts(max_restarts=NUM_RESTARTS),
            idle_timeout_s=idle_timeout_s,
        )

    async def _start_front(self) -> None:
        made = make_front(
            self.hosts,
            self.shape,
            self.scenario.router,
            ClusterConfig(
                self.scenario.roles, self.scenario.rebalance, self.scenario.num_standby, self._make_scaling(self.scenario)
            ),
            draw=self.draw,
            make_predictor=self._make_predictor,
            clock=self.loop.clock,
            stall_timeout_s=self.scenario.stall_timeout_s,
            verify_replay=self.scenario.verify_replay,
            supervise=self._make_supervision,
            amend=self._move_kv,
            make_host=self._make_host if updates_of(self.scenario) else None,
            make_hot_prefixes=self._make_hot_prefixes if self.scenario.copies_prefixes else None,
        )
        front, self.transports, self.clients = made.replicas, made.transports, made.clients
        front.subscribe(self._observe)
        await front.start()
        self.front = front

    def _make_scaling(self, scenario: Scenario) -> ScalingConfig | None:
        if scenario.min_replicas is None:
            return None
        return ScalingConfig(scenario.min_replicas, up_after_s=0.1, down_after_s=SCALE_DOWN_S, look_every_s=0.05)

    def _make_predictor(self, model: ModelInfo) -> LengthPredictor:
        draw = random.Random(self.scenario.seed)
        return WrongLengths(LengthCurves(model.max_model_len), self.scenario.length_error, draw)

    def _make_hot_prefixes(self, model: ModelInfo) -> HotPrefixes:
        keys = PrefixKeys(model.fingerprint, self.shape.block_size)
        return HotPrefixes(
            keys, self.draw, hot=3.0, half_life_s=2.0, min_tokens=16, min_skew=1, lease_s=1.0, renew_s=0.3, rest_s=1.0
        )

    def _move_kv(self, index: int, message: FrontMessage) -> list[FrontMessage]:
        """Adds a KV source to a submitted request, as a controller could; the source may not have the KV."""
        if not (isinstance(message, Submit) and self.scenario.moves_kv):
            return [message]
        served = self.served.setdefault(message.request.tenant, set())
        others = sorted(served - {index}) or [other for other in range(len(self.hosts)) if other != index]
        served.add(index)
        is_likely = bool(served - {index} or self.draw.random() < 0.2)  # a source that has nothing shows little
        if not (others and is_likely and self.draw.random() < self.scenario.moves_kv):
            return [message]
        source = KVSource(endpoint_of(self.draw.choice(others)))
        token_ids = [*message.request.token_ids, *(message.resumption.token_ids[0] if message.resumption is not None else ())]
        prefetch = PrefetchKV(message.request, token_ids, source, follows=self.draw.random() < 0.3)
        return [
            *([prefetch] if self.draw.random() < 0.3 else []),
            msgspec.structs.replace(message, kv_source=source, hold_kv_s=self.draw.choice((0.0, 0.5, 20.0))),
            *([HoldKV(message.request.request_id, 1.0)] if self.draw.random() < 0.2 else []),
        ]

    async def _run_job(self, number: int, answer: JobAnswer) -> None:
        """Sends a request and takes what comes."""
        await asyncio.sleep(answer.job.at_s)
        answer.sent_s = self.loop.time()
        if self.front is None:
            answer.refusal = "no front is there"
            return
        task = self.open[number] = asyncio.create_task(self._follow(answer, self.front))
        limit_s = LONGEST_S if answer.job.cancel_after_s is None else answer.job.cancel_after_s
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            if answer.job.cancel_after_s is None:
                self.violations.append(f"{answer.request.request_id} has not ended after {LONGEST_S:.0f} s")
            answer.has_left = True
            task.cancel()
            await asyncio.wait({task})
        answer.ended_s = self.loop.time()
        self.open.pop(number, None)

    async def _follow(self, answer: JobAnswer, front: ReplicaSet) -> None:
        if answer.job.adapter and adapter_name(answer.job.adapter) not in front.adapters.loaded:
            answer.refusal = "the front knows no such adapter"
            return
        try:
            await front.follow(answer.request, answer.take)
        except CloisterError as error:
            answer.refusal = error.message

    async def _inject(self, fault: InjectedFault) -> None:
        await asyncio.sleep(fault.at_s)
        self.faults[fault.kind] += 1
        host = self._host_of(fault.replica)
        match fault.kind:
            case "crash":
                host.kill()
            case "hang":
                if host.process is not None:
                    host.process.hangs_until_s = max(host.process.hangs_until_s, self.loop.time() + fault.lasts_s)
            case "slow":
                if (process := host.process) is not None:
                    process.engine.runner.slowness = fault.amount
                    await asyncio.sleep(fault.lasts_s)
                    process.engine.runner.slowness = 1.0
            case "fail_step":
                if host.process is not None:
                    host.process.engine.runner.num_failing = int(fault.amount)
            case "refuse_start":
                host.refuses_starts = int(fault.amount)
            case "network" | "cut":
                await self._disturb_network(fault)
            case "restart_router":
                await self._restart_front()
            case "clock_jump":
                self.late_s += fault.lasts_s
                self.loop.clock.advance(fault.lasts_s)

    async def _operate(self, operation: OperatorAction) -> None:
        await asyncio.sleep(operation.at_s)
        self.faults[operation.kind] += 1
        if (front := self.front) is None:
            return
        if operation.kind == "update":
            await self._update(front, operation)
        elif operation.kind in ("load", "unload"):
            await self._change_adapter(front, operation)
        else:
            await operate(front, operation, self.answers)

    async def _change_adapter(self, front: ReplicaSet, operation: OperatorAction) -> None:
        """Loads or unloads an adapter. A refusal is the operator's error, and an operator may cancel the call."""
        name = adapter_name(operation.adapter)
        with contextlib.suppress(CloisterError, TimeoutError):
            if operation.kind == "load":
                async with asyncio.timeout(operation.cancelled_after_s):
                    await front.adapters.load(name, str(operation.adapter))
            else:
                await front.adapters.unload(name)

    async def _update(self, front: ReplicaSet, operation: OperatorAction) -> None:
        before = self.updating
        self.updating = operation
        try:
            front.update_replicas(None if operation.weights is None else str(operation.weights))
        except InvalidRequestError:  # another one is under way
            self.updating = before
            return
        ends_s = self.loop.time() + LONGEST_S
        while (progress := front.update_progress) is not None and progress.is_running and self.loop.time() < ends_s:
            await asyncio.sleep(UPDATE_LOOK_S)

    async def _disturb_network(self, fault: InjectedFault) -> None:
        if fault.kind == "cut":
            path = NetworkPath(is_cut=True)
        else:
            path = NetworkPath(loss_rate=fault.amount, repeat_rate=fault.amount, jitter_s=fault.jitter_s)
        ways = {"both": (True, False), "to_engine": (True,), "to_front": (False,)}[fault.ways]
        hosts = list(self.hosts_of[fault.replica])
        for host in hosts:
            for is_to_engine in ways:
                self.network.set_path(host.index, is_to_engine, path)
        await asyncio.sleep(fault.lasts_s)
        for host in hosts:
            for is_to_engine in ways:
                self.network.set_path(host.index, is_to_engine, GOOD)

    async def _restart_front(self) -> None:
        """Kills the front with all that it has, and starts another one."""
        if self.front is None:
            return
        self.front.stop_replays()
        self.front = None
        for number, task in self.open.items():
            self.answers[number].is_cut = True
            task.cancel()
        for transport, client in zip(self.transports, self.clients, strict=True):
            transport.crash()
            if client._lifecycle is not None:
                client._lifecycle.cancel()
        await asyncio.sleep(0.1)
        while self.front is None:
            with contextlib.suppress(CloisterError):  # an engine cannot be reached; an operator's supervisor tries again
                await self._start_front()

    async def _settle(self) -> None:
        """Waits until the cluster has no leftovers for `QUIET_S`, records those that remain, and drains it."""
        ends_s, quiet_s = self.loop.time() + REST_S, 0.0
        while quiet_s < QUIET_S and self.loop.time() < ends_s:
            await asyncio.sleep(LOOK_EVERY_S)
            quiet_s = 0.0 if self._is_starting or find_leftovers(self) else quiet_s + LOOK_EVERY_S
        self.violations += find_leftovers(self)
        if self.front is not None:
            await self.front.drain(DRAIN_S)
        await asyncio.sleep(DRAIN_S)
        self.violations += [f"engine {i} runs after the drain" for i, host in enumerate(self.hosts) if host.process is not None]

    @property
    def _is_starting(self) -> bool:
        """Whether an engine is started, or started again."""
        return self.front is not None and any(replica.state == "starting" for replica in self.front.snapshots())

    def _observe(self, event: Event) -> None:
        self.network.digest.update(msgspec.msgpack.encode(event))
        if not isinstance(event, Stepped):
            self.events.append(event)
        elif self.scenario.copies_prefixes:
            check_copies(self.hosts)

    def _note_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.violations.append(f"an exception that nobody handled: {context.get('exception') or context['message']!r}")
