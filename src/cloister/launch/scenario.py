"""Runs a scenario of the fault search (`cluster.virtual`) on engine processes: of this machine, or placed by its own Ray.

Front, routers and controllers are the same in all three. Here their engines are real, requests are computed by a model, and
signals do what the simulator simulates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from cloister.cluster.remote.transport import RemoteTransport
from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.virtual.checks import JobAnswer, check_answer, check_events
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.job_requests import make_request
from cloister.cluster.virtual.leftovers import leftovers_of_front
from cloister.cluster.virtual.scenario import FaultKind, InjectedFault, Job, OperationKind, OperatorAction, Scenario
from cloister.cluster.virtual.simulation import LONGEST_S, RunOutcome, operate
from cloister.cluster.virtual.single_engine import answer_all
from cloister.engine.client import EngineClient
from cloister.engine.request_client import RequestClient
from cloister.launch.engine import build_engine
from cloister.launch.processes import make_engine
from cloister.launch.settings import Settings, resolve_settings
from cloister.text import Tokenizer
from cloister.types.errors import CloisterError, ConfigError, InvalidRequestError
from cloister.types.events import Event, Stepped
from cloister.types.request import SequenceOutput

Body = Literal["local", "ray"]
IMPOSSIBLE_FAULTS: Final[tuple[FaultKind, ...]] = ("fail_step", "refuse_start", "network", "cut")
"""Faults that cannot be injected from outside an engine. `benchmarks.cluster_faults` cuts networks."""
ADAPTER_KINDS: Final[tuple[OperationKind, ...]] = ("load", "unload")
"""Operations on adapters, which exist only in the virtual program."""
PLAIN: Final = Scenario(seed=0)
KV_TRANSFERS: Final = {"local": "unix", "ray": "unix,tls"}
LATE_S: Final = 10.0
"""Tolerance for deadlines on a busy machine."""
REST_S: Final = 60.0
"""Time limit for everything to be released after the last request."""
LOOK_EVERY_S: Final = 0.2
PROBE_EVERY_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 30.0
UPDATE_S: Final = 120.0
UPSCALE_S: Final = 0.1
DOWNSCALE_S: Final = 0.5
"""Scaling delay, as short as in virtual time, so that replicas are both added and removed."""
SLICE_S: Final = 0.02
"""Running time of a slowed engine between two stops."""
_LISTENS: Final = "0A"
_ENGINE: Final = "cl-engine"


def find_impossible(scenario: Scenario, on: Body) -> list[str]:
    """Returns the parts of a scenario that only virtual time supports, named as in its file."""
    names = [f"faults: {kind}" for kind in sorted({fault.kind for fault in scenario.faults} & {*IMPOSSIBLE_FAULTS})]
    for operation in scenario.operations:
        names += ["operations: update with weights"] if operation.weights is not None else []
        names += ["operations: update with trouble"] if operation.trouble != "none" else []
        names += ["operations: load or unload"] if operation.kind in ADAPTER_KINDS else []
    names += ["jobs: adapter"] if any(job.adapter for job in scenario.jobs) else []
    names += ["damages_kv"] if scenario.damages_kv else []
    names += ["clock_offsets_s"] if any(scenario.clock_offsets_s) else []
    names += ["length_error"] if scenario.length_error != "none" else []
    names += [name for name in ("drafts", "tiers", "pool") if getattr(scenario, name) != getattr(PLAIN, name)]
    names += ["idle_timeout_s"] if scenario.idle_timeout_s is not None and on == "ray" else []
    return list(dict.fromkeys(names))


def without_impossible(scenario: Scenario, on: Body) -> Scenario:
    """Returns a scenario without the parts that `find_impossible` names."""
    replace = msgspec.structs.replace
    return msgspec.structs.replace(
        scenario,
        faults=tuple(fault for fault in scenario.faults if fault.kind not in IMPOSSIBLE_FAULTS),
        jobs=tuple(replace(job, adapter=0) for job in scenario.jobs),
        operations=tuple(each for each in scenario.operations if _is_possible(each)),
        damages_kv=PLAIN.damages_kv,
        clock_offsets_s=PLAIN.clock_offsets_s,
        length_error=PLAIN.length_error,
        drafts=PLAIN.drafts,
        tiers=PLAIN.tiers,
        pool=PLAIN.pool,
        num_adapters=PLAIN.num_adapters,
        idle_timeout_s=PLAIN.idle_timeout_s if on == "ray" else scenario.idle_timeout_s,
    )


def _is_possible(operation: OperatorAction) -> bool:
    return operation.weights is None and operation.trouble == "none" and operation.kind not in ADAPTER_KINDS


def run_on_processes(scenario: Scenario, on: Body, model: str) -> RunOutcome:
    """Runs a scenario on real engines with one thread each, and checks what is visible from outside.

    Args:
        model: the model that they serve.

    Raises:
        ConfigError: a part of the scenario is impossible there, or the settings do not fit the model.
        CloisterError: the engines do not start.
        SystemExit: on SIGTERM, after all started processes have ended.
    """
    if impossible := find_impossible(scenario, on):
        raise ConfigError(
            f"only virtual time can do this: {', '.join(impossible)}. Take it out of the file, or give --skip-impossible",
            param="scenario",
        )
    if not scenario.jobs:
        raise ConfigError("the scenario has no jobs, so the engines would have nothing to do; add some", param="scenario")
    run = _ProcessRun(scenario, on, model)
    alone = run.answer_alone()
    try:
        asyncio.run(run.run())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    for answer, expected in zip(run.answers, alone, strict=True):
        run.violations += check_answer(answer, expected.as_given(), run)
    run.violations += check_events(run)
    num_tokens = sum(len(ids) for answer in run.answers for ids in answer.token_ids)
    num_requests = sum(answer.refusal is None for answer in run.answers)
    return RunOutcome(tuple(run.violations), "", run.faults, num_requests, num_tokens)


@dataclass
class _ProcessRun:
    """A scenario while it runs (protocol `RunRecord`)."""

    scenario: Scenario
    on: Body
    model: str
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    late_s: float = LATE_S

    def __post_init__(self) -> None:
        self.answers: list[JobAnswer] = []
        self.front: RequestClient | None = None
        self._last_front: RequestClient | None = None
        self.open: dict[int, asyncio.Task[None]] = {}
        self._block_mb = 0.0
        self._answered = asyncio.Event()
        self._holders: Counter[int] = Counter()
        self._steps: dict[int, Stepped] = {}
        self._heard: list[EngineClient] = []
        self._is_over = False
        self._before = {*_descendants(os.getpid())}

    def answer_alone(self) -> list[JobAnswer]:
        """Creates the requests, and returns the answers of a single engine in this process."""
        core = build_engine(self._settings(replicas=1, max_waiting=len(self.scenario.jobs) + 1).engine.config)
        tokenizer = Tokenizer(Path(core.model.path))
        self.answers = [
            JobAnswer.to(job, make_request(job, f"r{number}", tokenizer.encode(job.prompt), core.model.vocab_size))
            for number, job in enumerate(self.scenario.jobs)
        ]
        self._block_mb = dict(core.memory)["KV cache"] / core._scheduler.pool.num_total / 2**20
        return answer_all(core, self.answers)

    def _settings(self, **settings: object) -> Settings:
        shape = EngineShape(num_blocks=self.scenario.num_blocks)
        length = min(shape.max_model_len, shape.num_blocks * shape.block_size)
        return resolve_settings(
            {
                "model": self.model,
                "num_threads": 1,
                "block_size": shape.block_size,
                "max_model_len": length,
                "max_batched_tokens": shape.max_batched_tokens,
                "max_num_seqs": self.scenario.max_num_seqs,
                "stall_timeout_s": self.scenario.stall_timeout_s,
                "scheduler": self.scenario.scheduler,
                **settings,
            }
        )

    def _cluster_settings(self) -> Settings:
        scenario = self.scenario
        given: dict[str, object] = {"on": self.on, "replicas": scenario.num_replicas, "max_waiting": scenario.max_waiting}
        given["kv_memory_mb"] = scenario.num_blocks * self._block_mb + self._block_mb / 2
        if scenario.num_replicas > 1:
            given |= {
                "router": scenario.router,
                "rebalance": scenario.rebalance,
                "verify_replay": scenario.verify_replay,
                "prefill": scenario.roles.count("prefill"),
                "decode": scenario.roles.count("decode"),
                "standby": scenario.num_standby,
                "replicate_hot_prefixes": scenario.copies_prefixes,
            }
            if scenario.moves_kv or scenario.copies_prefixes or {*scenario.roles} - {"mixed"}:
                given["kv_transfer"] = KV_TRANSFERS[self.on]
        if scenario.min_replicas is not None and scenario.num_replicas > 1:
            del given["replicas"]
            num_min = scenario.min_replicas if scenario.idle_timeout_s is not None else max(1, scenario.min_replicas)
            given |= {"min_replicas": num_min, "max_replicas": scenario.num_replicas, "upscale_delay_s": UPSCALE_S}
            given["downscale_delay_s"] = DOWNSCALE_S
        if scenario.idle_timeout_s is not None:
            given["idle_timeout_s"] = scenario.idle_timeout_s
        return self._settings(**given)

    # Requests, faults and operations

    async def run(self) -> None:
        """Answers all requests while faults happen, then checks for leftovers. SIGTERM cancels it."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task.cancelling() or task.cancel())
        try:
            await self._start_front()
            async with asyncio.TaskGroup() as group:
                working = [group.create_task(self._work(number)) for number in range(len(self.answers))]
                for fault in self.scenario.faults:
                    group.create_task(self._break(fault))
                for operation in self.scenario.operations:
                    group.create_task(self._operate(operation))
                await asyncio.wait(working)
                self._answered.set()
            await self._rest()
        finally:
            if self._last_front is not None:
                await self._last_front.drain(0.0)
        await self._look_for_processes()

    async def _start_front(self) -> None:
        settings = self._cluster_settings()
        front = self._last_front = make_engine(settings.engine.config, settings.server.config)
        front.subscribe(self._observe)
        await front.start()
        self.front = front

    def _observe(self, event: Event) -> None:
        if not (isinstance(event, Stepped) or self._is_over):
            self.events.append(event)

    def _note_step(self, index: int, event: Event) -> None:
        if isinstance(event, Stepped):
            self._steps[index] = event

    async def _work(self, number: int) -> None:
        """Sends a request and records its outputs."""
        answer = self.answers[number]
        job = answer.job
        await asyncio.sleep(job.at_s)
        answer.sent_s = time.monotonic()
        if self.front is None:
            answer.refusal = "no front is there"
        else:
            task = self.open[number] = asyncio.create_task(self._follow(answer, self.front))
            await asyncio.wait({task}, timeout=LONGEST_S if job.cancel_after_s is None else job.cancel_after_s)
            if not task.done():
                if job.cancel_after_s is None:
                    self.violations.append(f"r{number} has not ended after {LONGEST_S:.0f} s")
                answer.has_left = True
                task.cancel()
                await asyncio.wait({task})
            self.open.pop(number, None)
        answer.ended_s = time.monotonic()

    async def _follow(self, answer: JobAnswer, front: RequestClient) -> None:
        name, kills_after = answer.request.request_id, answer.job.kills_after
        seen = place = 0

        def take(output: SequenceOutput) -> None:
            nonlocal seen, place
            answer.take(output)
            if kills_after is not None and not output.finish_reason:
                there = front._moves.places.get(name, 0) if isinstance(front, ReplicaSet) else 0
                seen, place = (seen + 1 if there == place else 1), there
                if seen == kills_after:
                    seen = 0
                    self._kill(there)

        try:
            await front.follow(answer.request, take)
        except CloisterError as error:
            answer.refusal = error.message

    async def _break(self, fault: InjectedFault) -> None:
        await asyncio.sleep(fault.at_s)
        self.faults[fault.kind] += 1
        match fault.kind:
            case "crash":
                self._kill(fault.replica)
            case "hang":
                pid = self._engine_of(fault.replica)
                self._hold(pid)
                with contextlib.suppress(TimeoutError):  # wait no longer than requests do
                    await asyncio.wait_for(self._answered.wait(), fault.lasts_s)
                self._let_go(pid)
            case "slow":
                await self._slow(self._engine_of(fault.replica), fault)
            case "restart_router":
                await self._restart_front()
            case "clock_jump":
                self._suspend(fault.lasts_s)
            case _:
                raise AssertionError(fault.kind)

    async def _slow(self, pid: int | None, fault: InjectedFault) -> None:
        ends_s = time.monotonic() + fault.lasts_s
        while pid is not None and time.monotonic() < ends_s and not self._answered.is_set():
            self._hold(pid)
            await asyncio.sleep(SLICE_S * (fault.amount - 1))
            self._let_go(pid)
            await asyncio.sleep(SLICE_S)

    def _suspend(self, lasts_s: float) -> None:
        """Stops all engines and this front, like the suspension of a machine."""
        pids = [self._engine_of(index) for index in range(self.scenario.num_replicas)]
        for pid in pids:
            self._hold(pid)
        time.sleep(lasts_s)
        self.late_s += lasts_s
        for pid in pids:
            self._let_go(pid)

    async def _restart_front(self) -> None:
        """Ends clients and engines, and starts another front with engines of its own."""
        front, self.front = self.front, None
        if front is None:
            return
        for number, task in self.open.items():
            self.answers[number].is_cut = True
            task.cancel()
        await front.drain(0.0)
        await self._start_front()

    async def _operate(self, operation: OperatorAction) -> None:
        await asyncio.sleep(operation.at_s)
        self.faults[operation.kind] += 1
        front = self.front
        if not isinstance(front, ReplicaSet):
            return
        if operation.kind != "update":
            await operate(front, operation, self.answers)
            return
        with contextlib.suppress(InvalidRequestError):  # another update is in progress
            front.update_replicas(None)
        ends_s = time.monotonic() + UPDATE_S
        while (progress := front.update_progress) is not None and progress.is_running and time.monotonic() < ends_s:
            await asyncio.sleep(LOOK_EVERY_S)

    # Processes

    def _engine_of(self, replica: int) -> int | None:
        """Returns the pid of a replica's engine; None while none runs."""
        if self.front is None:
            return None
        if self.on == "local":
            return self.front.snapshots()[replica].pid
        transport = _clients(self.front)[replica]._transport
        session = transport._session if isinstance(transport, RemoteTransport) else None
        return None if session is None else _find_engine_behind(session._place.port)

    def _kill(self, replica: int) -> None:
        if (pid := self._engine_of(replica)) is not None:
            _send_signal(pid, signal.SIGKILL)

    def _hold(self, pid: int | None) -> None:
        """Stops an engine. Several faults may stop it at once; it continues when the last one ends."""
        if pid is not None:
            self._holders[pid] += 1
            _send_signal(pid, signal.SIGSTOP)

    def _let_go(self, pid: int | None) -> None:
        if pid is None:
            return
        self._holders[pid] -= 1
        if not self._holders[pid] and pid in _descendants(os.getpid()):  # the pid may have been reused
            _send_signal(pid, signal.SIGCONT)

    # Checks

    async def _rest(self) -> None:
        """Waits until everything is released, and reports what is left after `REST_S`."""
        assert self.front is not None
        self._is_over = True
        ends_s = time.monotonic() + REST_S
        while (left := await self._leftovers(self.front)) and time.monotonic() < ends_s:
            await asyncio.sleep(PROBE_EVERY_S)
        self.violations += left

    async def _leftovers(self, front: RequestClient) -> list[str]:
        left = [
            f"the client of engine {replica.index} still has {replica.num_requests} requests"
            for replica in front.snapshots()
            if replica.num_requests
        ]
        left += leftovers_of_front(front)
        for replica in front.snapshots() if not left else ():
            left += [] if replica.is_stopped else await self._probe(front, replica.index)
        return left

    async def _probe(self, front: RequestClient, index: int) -> list[str]:
        """Sends a minimal request: its step event counts all used blocks, including leftovers of other requests."""
        request = make_request(Job(at_s=0.0, prompt="", max_tokens=2), f"probe {index} {time.monotonic()}", [1])
        client = _clients(front)[index]
        if client not in self._heard:  # replicas get new clients in an update
            self._heard.append(client)
            client.subscribe(lambda event: self._note_step(index, event))
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await client.follow(request, lambda output: None)
        except (TimeoutError, CloisterError) as error:
            return [f"engine {index} answers nothing: {type(error).__name__}"]
        if (step := self._steps.get(index)) is None:
            return [f"engine {index} has made no step"]  # it is still starting
        num_used = step.num_used_blocks
        return [f"engine {index} still uses {num_used - 1} blocks"] if num_used > 1 else []

    async def _look_for_processes(self) -> None:
        ends_s = time.monotonic() + REST_S
        while (left := {*_descendants(os.getpid())} - self._before) and time.monotonic() < ends_s:
            await asyncio.sleep(LOOK_EVERY_S)
        self.violations += [f"{len(left)} processes are left"] if left else []


def _clients(front: RequestClient) -> list[EngineClient]:
    if isinstance(front, ReplicaSet):
        return front._replicas
    assert isinstance(front, EngineClient)
    return [front]


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Returns the pids of all descendants of `pid` (Linux)."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            children += map(int, task.read_text().split())
    return [*children, *(below for child in children for below in _descendants(child))]


def _find_engine_behind(port: int) -> int | None:
    """Returns the pid of the engine whose host listens on a port; None if no descendant of this process does."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port}
    for host in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if not any(os.readlink(path) in sockets for path in Path(f"/proc/{host}/fd").iterdir()):
                continue
            for pid in _descendants(host):
                if Path(f"/proc/{pid}/comm").read_text().strip() == _ENGINE:
                    return pid
    return None
