"""Machines of a sealed unit: real keys, statements, evidence and sockets, and a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from cloister.private.attesting import Announcer
from cloister.private.unit.membership import UnitLeader, UnitPort, UnitTimes, listen_for_leader
from cloister.private.unit.pairing import Pair, UnitKey
from cloister.private.unit.peer_verification import PeerVerifier
from cloister.private.unsealing import LocalUnsealer
from cloister.trust.attestation import AttestationError, AttestationPolicy, Attester, Evidence, Findings, Outcome, read_evidence
from cloister.trust.attestation.measuring import measure_profile
from cloister.trust.attestation.node import Facts
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import verify_evidence
from cloister.trust.sealing import NODE_KEY_LIFE_S, KeyRing, Receiver, ReplayCache
from tests.snp_platform import NOW, SnpPlatform, make_report

NUM_ENGINES = 2
TIMES = UnitTimes(connect_s=2, handshake_s=10, ping_s=0.01, silent_s=5, retry_s=0.02)
HARDENING = {
    f"{process}.{measure}": "applied: on" for process in ("front", "engine", "engine-1") for measure in ("seccomp", "landlock")
}
FACTS = Facts(
    release="0a" * 32,
    model="0b" * 32,
    profile="private",
    profile_digest=measure_profile("private"),
    configuration={"setting replicas": str(NUM_ENGINES), "setting router": '"capacity_random"', "setting quant": '"none"'},
    capacity=4,
)
POLICY = AttestationPolicy(
    accept_software=True,
    releases=frozenset({FACTS.release}),
    models=frozenset({FACTS.model}),
    profile_digests=frozenset({FACTS.profile_digest}),
    configuration=FACTS.configuration,
    hardening=frozenset({"seccomp", "landlock"}),
)
REQUEST_S = 720.0
DEADLINE_S = 300.0


class Clock:
    """Unix seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class SnpAttester:
    """An attester of simulated hardware."""

    kind = "sev-snp"

    def __init__(self, platform: SnpPlatform) -> None:
        self.platform = platform

    def attest(self, statement: bytes) -> Evidence:
        evidence = Evidence(self.kind, statement, b"", self.platform.extra)
        report = make_report(evidence.report_data, chip_id=self.platform.chip_id)
        return Evidence(self.kind, statement, self.platform.sign(report), self.platform.extra)


class Machine:
    """A sealed node that may be part of a unit; its evidence is renewed whenever its unit or its key changes.

    Attributes:
        pairs: pairs that are usable now.
        lost: ids of pairs that are not any more.
    """

    def __init__(
        self,
        clock: Clock,
        facts: Facts = FACTS,
        hardening: Mapping[str, str] = HARDENING,
        attester: Attester | None = None,
        policy: AttestationPolicy | None = None,
    ) -> None:
        self.clock = clock
        self.key = UnitKey()
        ring = KeyRing(clock.now)
        unsealer = LocalUnsealer(Receiver(ring, ReplayCache(NODE_KEY_LIFE_S)), clock)
        self.announcer = Announcer(
            unsealer, attester or SoftwareAttester(), facts, clock.now, lambda: hardening, now=clock, unit_policy=policy
        )
        self.pairs: dict[bytes, Pair] = {}
        self.lost: list[bytes] = []
        self.carried: list[bytes] = []
        self.port = 0
        self.does_renew = True
        self.num_looks = 0

    def paired(self, pair: Pair) -> None:
        assert pair.id not in self.pairs
        self.pairs[pair.id] = pair

    def unpaired(self, pair_id: bytes) -> None:
        del self.pairs[pair_id]
        self.lost.append(pair_id)

    async def carry(self, sock: socket.socket, first_byte: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.carried.append(first_byte + await loop.sock_recv(sock, 100))
        sock.close()

    @property
    def document(self) -> bytes:
        document = self.announcer.evidence()
        assert document is not None
        return document

    def judged(self, policy: AttestationPolicy = POLICY) -> Findings:
        """What a client says about it."""
        return verify_evidence(read_evidence(self.document), policy, self.clock.now)

    async def renew_forever(self) -> None:
        while True:
            if self.does_renew:
                with contextlib.suppress(AttestationError):
                    await self.announcer.renew()
            self.num_looks += 1
            await asyncio.sleep(0.003)


@contextlib.asynccontextmanager
async def running_member(
    machine: Machine, verifier: PeerVerifier | None = None, port: int = 0, times: UnitTimes = TIMES
) -> AsyncIterator[UnitPort]:
    """Runs a member until the block ends."""
    await machine.announcer.rehearse()
    unit_port = UnitPort(
        machine.key,
        verifier or machine.announcer.make_verifier(gpu=False),
        NUM_ENGINES,
        carry=machine.carry,
        on_leader=machine.paired,
        on_leader_lost=machine.unpaired,
        now=machine.clock,
        times=times,
    )
    machine.announcer.join(unit_port)
    await machine.announcer.renew()
    with listen_for_leader("127.0.0.1", port) as listener:
        machine.port = listener.getsockname()[1]
        async with running(unit_port.run(listener), machine.renew_forever()):
            yield unit_port


@contextlib.asynccontextmanager
async def running_leader(
    machine: Machine, ports: list[int], verifier: PeerVerifier | None = None, *, starts: bool = True
) -> AsyncIterator[UnitLeader]:
    """Runs a leader until the block ends."""
    await machine.announcer.rehearse()
    leader = UnitLeader(
        machine.key,
        [("127.0.0.1", port) for port in ports],
        verifier or machine.announcer.make_verifier(gpu=False),
        NUM_ENGINES,
        longest_request_s=REQUEST_S,
        on_pair=machine.paired,
        on_lost=machine.unpaired,
        now=machine.clock,
        times=TIMES,
    )
    machine.announcer.join(leader)
    if starts:
        await leader.start(asyncio.get_running_loop().time() + DEADLINE_S)
    await machine.announcer.renew()
    async with running(leader.run(), machine.renew_forever()):
        yield leader


@contextlib.asynccontextmanager
async def running(*coroutines: Awaitable[None]) -> AsyncIterator[None]:
    """Runs coroutines until the block ends; one that fails before fails the test."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(holds: Callable[[], object]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.003)


async def pass_time(clock: Clock, seconds: float, *machines: Machine, settled: Callable[[], object] = lambda: True) -> None:
    """Moves the clock as time goes by: in steps that are short for keys and evidence. At each, all machines look at it.

    Args:
        settled: has to hold after each step.
    """
    end_s = clock.now + seconds
    while clock.now < end_s:
        clock.now = min(clock.now + 60, end_s)
        for holds in (lambda: True, settled):
            await until(holds)
            seen = [machine.num_looks for machine in machines]
            await until(lambda seen=seen: all(m.num_looks > n + 1 for m, n in zip(machines, seen, strict=True)))


def failures(findings: Findings) -> list[str]:
    return [step.slug for step in findings.of(Outcome.FAILED)]


def on_chip(platform: SnpPlatform) -> Attester:
    return SnpAttester(platform)
