"""Runs a scenario of a sealed unit of several machines, and checks what every run must keep to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cloister.cluster.virtual.checks import JobAnswer
from cloister.cluster.virtual.engine import VirtualEngine, make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import STUCK
from cloister.cluster.virtual.job_requests import make_request, prompt_of
from cloister.cluster.virtual.reference import match_program
from cloister.cluster.virtual.simulation import RunOutcome
from cloister.cluster.virtual.single_engine import answer_all
from cloister.private.unit.carriers import LeaderCarriers, MemberCarriers
from cloister.private.unit.pairing import CARRY
from cloister.private.virtual.checks import RequestTrail, StatementSeen, check_trail, check_unit_answer
from cloister.private.virtual.event_loop import SocketEventLoop
from cloister.private.virtual.machines import (
    EPOCH_S,
    UNIT_PORT,
    NodeLife,
    UnitMake,
    UnitWorker,
    host_of,
    make_settings,
)
from cloister.private.virtual.scenario import UnitFault, UnitScenario
from cloister.private.virtual.tcp import HOST, TcpConnection, TcpNetwork
from cloister.text import Tokenizer
from cloister.trust.attestation import Statement
from cloister.trust.sealing import NODE_KEY_LIFE_S
from cloister.types.clock import VirtualClock
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError
from cloister.types.events import FrontMessage, Submit
from cloister.types.request import SequenceOutput

LONGEST_S: Final = 400.0
"""Virtual time within which a request must have ended."""
REST_S: Final = 120.0
"""Virtual time within which a unit comes to rest after the last request and fault: a hang before the first step is noticed
last, and a leader that has found no member asks again every few seconds."""
SUPERVISOR_S: Final = 1.0
"""After a node has ended by itself it is started again so much later."""
QUIET_S: Final = 4.0
LATE_CLIENT_S: Final = 250.0
"""By so much a client's clock may be late: with the machines' own error less than what clients and leader allow for."""
ABORT_S: Final = 0.5
"""After so long an engine has heard that its worker has ended."""
LISTEN_S: Final = 30.0
"""For so long an attacker who repeats a connection waits for an answer."""
_EVENT: Final = struct.Struct("<dq")


def run_unit_scenario(scenario: UnitScenario, tokenizer: Tokenizer) -> RunOutcome:
    """Runs a scenario.

    Args:
        tokenizer: of `write_byte_tokenizer`.
    """
    run = _UnitRun(scenario, tokenizer)
    with asyncio.Runner(loop_factory=SocketEventLoop) as runner:
        try:
            runner.run(run.run())
        except RuntimeError as error:  # nothing will ever happen again
            if str(error) != STUCK:
                raise
            run.violations.append(str(error))
    return run.outcome()


@dataclass
class _UnitRun:
    """A scenario while it runs."""

    scenario: UnitScenario
    tokenizer: Tokenizer
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.shape = EngineShape(
            num_blocks=scenario.num_blocks, max_num_seqs=scenario.max_num_seqs, max_waiting=scenario.max_waiting
        )
        self.draw = random.Random(scenario.seed)
        self.digest = hashlib.sha256()
        self.answers = [JobAnswer.to(job, make_request(job, f"r{number}")) for number, job in enumerate(scenario.jobs)]
        self.trails = {answer.request.request_id: RequestTrail() for answer in self.answers}
        num_machines = scenario.num_members + 1
        offsets_s = [*scenario.clock_offsets_s, *[0.0] * num_machines]
        self.offsets_s = offsets_s[:num_machines]
        self.lives: list[NodeLife | None] = [None] * num_machines
        self.statements: list[StatementSeen] = []
        self.deaths: Counter[int] = Counter()
        self.restarting: list[asyncio.Task[None]] = []

    def outcome(self) -> RunOutcome:
        """Returns what the run showed."""
        return RunOutcome(
            tuple(self.violations),
            self.digest.hexdigest(),
            self.faults,
            sum(answer.refusal is None for answer in self.answers),
            sum(len(ids) for answer in self.answers for ids in answer.token_ids),
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SocketEventLoop)
        self.loop = loop
        loop.set_exception_handler(self._note_exception)
        loop.takes_s = lambda: self.draw.random() * self.scenario.judging_s
        self.network = loop.network = TcpNetwork(self.scenario.delay_s, self._log)
        scenario = self.scenario
        base = EngineConfig(
            model="history",
            block_size=self.shape.block_size,
            max_waiting=self.shape.max_waiting,
            max_num_seqs=self.shape.max_num_seqs,
            stall_timeout_s=scenario.stall_timeout_s,
        )
        config, front = make_settings(scenario.num_engines, scenario.num_members, base)
        addresses = tuple((host_of(machine), UNIT_PORT) for machine in range(1, scenario.num_members + 1))
        self.make = UnitMake(config, front, self.shape, addresses, self._make_engine, self.draw, self)
        for machine in range(len(self.lives)):
            self._start(machine)
        async with asyncio.TaskGroup() as group:
            for answer in self.answers:
                group.create_task(self._work(answer))
            for fault in scenario.faults:
                group.create_task(self._break(fault))
        await self._rest()
        self._check_answers()
        for machine in range(len(self.lives)):
            self._kill(machine)
        await asyncio.sleep(1.0)

    # What happens

    def _start(self, machine: int) -> None:
        life = self.lives[machine] = NodeLife(self.make, machine, lambda: self._now(machine))
        life.start()

    def _kill(self, machine: int) -> None:
        if (life := self.lives[machine]) is not None:
            self.lives[machine] = None
            life.kill()

    def _now(self, machine: int) -> float:
        return EPOCH_S + self.loop.time() + self.offsets_s[machine]

    def _make_engine(self) -> VirtualEngine:
        engine = make_engine(self.shape, self.tokenizer, self.loop.clock)
        engine.runner.kills_after = {
            prompt_of(job): job.kills_after for job in self.scenario.jobs if job.kills_after is not None
        }
        return engine

    async def _work(self, answer: JobAnswer) -> None:
        """Sends a request and takes what comes."""
        await asyncio.sleep(answer.job.at_s)
        answer.sent_s = self.loop.time()
        life = self.lives[0]
        trail = self.trails[answer.request.request_id]
        trail.statement = self._choose_statement(life)
        if life is None or trail.statement is None:
            answer.refusal = "no leader has evidence"
            return
        task = self.loop.create_task(self._follow(answer, life))
        life.workers.add(task)
        limit_s = LONGEST_S if answer.job.cancel_after_s is None else answer.job.cancel_after_s
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            if answer.job.cancel_after_s is None:
                self.violations.append(f"{answer.request.request_id} has not ended after {LONGEST_S:.0f} s")
            answer.has_left = True
            task.cancel()
            await asyncio.wait({task})
        elif task.cancelled():
            answer.is_cut = True
        elif (error := task.exception()) is not None:
            self.violations.append(f"the worker of {answer.request.request_id} failed: {error!r}")
        life.workers.discard(task)
        answer.ended_s = self.loop.time()
        await asyncio.sleep(ABORT_S)
        self.violations += self._find_running(answer.request.request_id)

    async def _follow(self, answer: JobAnswer, life: NodeLife) -> None:
        trail = self.trails[answer.request.request_id]
        worker = UnitWorker(life, self.draw, lambda index: trail.asked.add(index // self.scenario.num_engines))

        def take(output: SequenceOutput) -> None:
            self._log(f"{answer.request.request_id}[{output.index}] {output.token_ids} {output.finish_reason}", 0)
            answer.take(output)

        try:
            await worker.client.start()
            await worker.client.follow(answer.request, take)
        except CloisterError as error:
            answer.refusal = error.message
        finally:
            worker.exit()

    def _choose_statement(self, life: NodeLife | None) -> StatementSeen | None:
        """Returns one that a client may seal under: that it has not seen the newest one is no fault of it."""
        if life is None:
            return None
        if self.scenario.holds_requests:
            now_s = EPOCH_S + self.loop.time()
            return next((each for each in self.statements if each.life is life and each.opens_until_s > now_s), None)
        now_s = EPOCH_S + self.loop.time() - self.draw.choice((0.0, LATE_CLIENT_S))
        valid = [each for each in self.statements if each.life is life and each.ends_s > now_s]
        return self.draw.choice((valid[0], valid[-1])) if valid else None

    async def _break(self, fault: UnitFault) -> None:
        await asyncio.sleep(fault.at_s)
        self.faults[fault.kind] += 1
        life = self.lives[fault.machine]
        member = host_of(fault.machine)
        transport = None if life is None else life.transports[fault.engine]
        process = None if transport is None else transport.process
        match fault.kind:
            case "crash":
                if process is not None and not process.has_ended:
                    process.end()
            case "hang":
                if process is not None:
                    process.hangs_until_s = max(process.hangs_until_s, self.loop.time() + fault.lasts_s)
            case "fail_step":
                if process is not None:
                    process.engine.runner.num_failing = int(fault.amount)
            case "refuse_start":
                if transport is not None:
                    transport.refuses_starts = int(fault.amount)
            case "end_machine" | "lose_machine":
                await self._restart(fault.machine, fault.lasts_s, loses_power=fault.kind == "lose_machine")
            case "cut_path":
                ways = {"both": (True, False), "to_member": (True,), "to_leader": (False,)}[fault.ways]
                paths = [(host_of(0), member) if is_to_member else (member, host_of(0)) for is_to_member in ways]
                for path in paths:
                    self.network.cut(*path)
                await asyncio.sleep(fault.lasts_s)
                for path in paths:
                    self.network.mend(*path)
            case "reset":
                for connection in self._choose(fault):
                    connection.reset()
            case "hold":
                held = self._choose(fault)
                for connection in held:
                    connection.is_held = True
                await asyncio.sleep(fault.lasts_s)
                for connection in held:
                    connection.is_held = False
            case "change":
                for connection in self._choose(fault):
                    connection.changes = True
            case "repeat":
                said = self.network.ended.get(member, []) + [
                    bytes(each.said) for each in self.network.connections if each.goes_between(host_of(0), member)
                ]
                await asyncio.gather(*(self._repeat(member, each) for each in said))
            case "stranger":
                await asyncio.gather(*(self._knock(member, fault.lasts_s) for _ in range(int(fault.amount))))
            case "clock":
                self.offsets_s[fault.machine] = fault.amount
            case "suspend":
                self.late_s += fault.lasts_s
                self.loop.clock.advance(fault.lasts_s)

    async def _restart(self, machine: int, after_s: float, *, loses_power: bool = False) -> None:
        if self.lives[machine] is None:
            return  # it is being started already
        host = host_of(machine)
        if loses_power:
            self.network.turn_off(host)
        else:
            self.network.end_programs(host)
        self._kill(machine)
        await asyncio.sleep(after_s)
        self.network.turn_on(host)
        self._start(machine)

    def _choose(self, fault: UnitFault) -> list[TcpConnection]:
        """Returns a share of the connections between the leader and a member."""
        found = [each for each in self.network.connections if each.goes_between(host_of(0), host_of(fault.machine))]
        return [each for each in found if self.draw.random() < fault.amount]

    async def _repeat(self, member: str, said: bytes) -> None:
        """Makes a connection again, as an attacker who has recorded it, and listens."""
        HOST.set("10.9.9.9")
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LISTEN_S):
                sock = await self.network.connect((member, UNIT_PORT))
                with sock:
                    await self.loop.sock_sendall(sock, said)
                    if await self.loop.sock_recv(sock, 1) and said.startswith(CARRY):
                        self.violations.append("a connection that was made again got an answer")

    async def _knock(self, member: str, lasts_s: float) -> None:
        """Connects to a unit port, and proves nothing."""
        HOST.set("10.9.9.8")
        said = self.draw.choice((b"", b"j", b"c", b"x", b"j" + bytes(2000), b"c" + self.draw.randbytes(100)))
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(lasts_s + 1.0):
                sock = await self.network.connect((member, UNIT_PORT))
                with sock:
                    await self.loop.sock_sendall(sock, said)
                    await asyncio.sleep(lasts_s)

    async def _rest(self) -> None:
        """Waits until nothing is left and all machines work together, and says what is wrong for too long."""
        ends_s, quiet_s = self.loop.time() + REST_S, 0.0
        while quiet_s < QUIET_S and self.loop.time() < ends_s:
            await asyncio.sleep(1.0)
            quiet_s = 0.0 if next(self._leftovers(), None) else quiet_s + 1.0
        self.violations += self._leftovers()

    # What must be

    def note_failure(self, life: NodeLife) -> None:
        """See `UnitWatcher`: its operator's supervisor starts it again."""
        self.restarting.append(self.loop.create_task(self._restart(life.machine, SUPERVISOR_S)))

    def note_statement(self, life: NodeLife, statement: Statement) -> None:
        """See `UnitWatcher`."""
        self._log(f"statement of {len(statement.unit_members)} members", int(statement.not_after))
        opens_until_s = statement.not_before + NODE_KEY_LIFE_S  # its key was drawn later
        self.statements.append(StatementSeen(life, frozenset(statement.unit_members), statement.not_after, opens_until_s))

    def note_message(self, life: NodeLife, engine: int, message: FrontMessage) -> None:
        """See `UnitWatcher`."""
        if isinstance(message, Submit):
            self._log(f"{message.request.request_id} to {life.machine}/{engine}", 0)
            self.trails[message.request.request_id].lives.append(life)

    def _log(self, what: str, number: int) -> None:
        self.digest.update(_EVENT.pack(self.loop.time(), number) + what.encode())

    def _check_answers(self) -> None:
        if match_program(self.answers, self.shape):
            expected = self.answers
        else:
            expected = answer_all(make_engine(self.shape, self.tokenizer, VirtualClock()).core, self.answers)
        for answer, alone in zip(self.answers, expected, strict=True):
            self.violations += check_unit_answer(answer, alone.as_given(), self.scenario, self.late_s)
            self.violations += check_trail(answer, self.trails[answer.request.request_id])

    def _find_running(self, request_id: str) -> Iterator[str]:
        """Yields which engines still compute a request that has ended; over a path that is cut one hears of it later."""
        for life in self.lives:
            if life is None or (life.machine and self.scenario.faults):
                continue
            for index, transport in enumerate(life.transports):
                process = transport.process
                if process is None or process.has_ended or self.loop.time() < process.hangs_until_s + ABORT_S:
                    continue
                if request_id in process.engine.scheduler.requests:
                    yield f"engine {index} of machine {life.machine} still has {request_id}, {ABORT_S:g} s after its end"

    def _leftovers(self) -> Iterator[str]:
        """Yields what must not be in a unit that has come to rest."""
        for machine, life in enumerate(self.lives):
            if life is None:
                yield f"machine {machine} does not run"
                continue
            if not life.is_ready:
                yield f"machine {machine} has stated nothing"
            yield from self._leftovers_of_engines(life)
            if num_workers := life.zygote.broker.num_workers:
                yield f"the zygote of machine {machine} still has sockets of {num_workers} workers"
        num_carried = sum(bytes(each.said[:1]) == CARRY for each in self.network.connections)
        if num_carried:
            yield f"{num_carried} carried connections are open"
        yield from self._leftovers_of_unit()

    def _leftovers_of_engines(self, life: NodeLife) -> Iterator[str]:
        for index, transport in enumerate(life.transports):
            name, process = f"engine {index} of machine {life.machine}", transport.process
            if process is None or process.has_ended:
                yield f"{name} does not run"
                continue
            if self.loop.time() < process.hangs_until_s:
                continue  # one that hangs while nothing waits for it is noticed with the next request
            scheduler, channels = process.engine.scheduler, process.channels
            if scheduler.requests:
                yield f"{name} still has {sorted(scheduler.requests)}"
            if scheduler.pool.num_used:
                yield f"{name} still uses {scheduler.pool.num_used} blocks"
            if process.num_channels:
                yield f"{name} still has {process.num_channels} channels"
            if channels._by_request or channels._later:
                yield f"the channels of {name} still have {sorted({*channels._by_request, *channels._later})}"
            if channels._keys is not None and channels._keys._keys:
                yield f"{name} still has {len(channels._keys._keys)} keys"
            scheduler.pool.check()

    def _leftovers_of_unit(self) -> Iterator[str]:
        leader = self.lives[0]
        if leader is None or leader.leader is None:
            return
        num_used = 0
        for known in leader.leader._members:
            member = self.lives[known.index]
            if known.pair is None:
                yield f"member {known.index} has not proved itself"
                continue
            num_used += known.is_used
            if known.is_used != leader.leader._may_use(known):
                yield f"member {known.index} may be used: {not known.is_used}, and is: {known.is_used}"
            if member is not None and known.digest != member.key.digest:
                yield f"member {known.index} is known by another key"
            if member is not None and isinstance(member.carriers, MemberCarriers):
                yield from self._leftovers_of_carriers(known.index, member.carriers)
            if member is not None and member.port is not None and member.port._unproved:
                yield f"the port of member {known.index} still has {len(member.port._unproved)} strangers"
            num_keys = 0 if member is None else len(member.key.memory._keys)
            if num_keys > 5:  # its own, two of the records, two of carried connections
                yield f"member {known.index} has {num_keys} keys"
        num_keys, most = len(leader.key.memory._keys), 1 + 2 * len(leader.leader._members) + 2 * num_used
        if num_keys > most:
            yield f"the leader has {num_keys} keys, of which {most} are needed"
        if isinstance(leader.carriers, LeaderCarriers):
            for carried in leader.carriers._pairs.values():
                if carried._num_channels:
                    yield f"the leader still carries {carried._num_channels} channels"

    def _leftovers_of_carriers(self, index: int, carriers: MemberCarriers) -> Iterator[str]:
        carried = carriers._carried
        if carried is None:
            yield f"member {index} has no leader"
        elif carried._num_channels or carried._num_kv_links:
            yield f"member {index} still carries {carried._num_channels} channels"

    def _note_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.violations.append(f"an exception that nobody handled: {context.get('exception') or context['message']!r}")
