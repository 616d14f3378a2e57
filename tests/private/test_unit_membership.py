"""A leader and its members over real sockets, with real statements: which machines are used, and why others are not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

import msgspec
import pytest

from cloister.private.attesting import MemberAttester
from cloister.private.unit.membership import MAX_UNPROVED, UnitLeader, UnitTimes
from cloister.private.unit.pairing import LeaderHandshake, Pair, UnitRefusedError
from cloister.private.unit.peer_verification import PeerVerifier
from cloister.trust.attestation import (
    AttestationError,
    AttestationPolicy,
    Evidence,
    SnpFloor,
    Statement,
    read_evidence,
    read_statement,
)
from cloister.trust.attestation.base import MAX_CLOCK_SKEW_S
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import VERIFIERS
from cloister.trust.sealing import NODE_KEY_LIFE_S
from cloister.trust.transparency.note import Kind, PrivateKey
from tests.private.units import (
    FACTS,
    HARDENING,
    REQUEST_S,
    TIMES,
    Clock,
    Machine,
    SnpAttester,
    failures,
    pass_time,
    running_leader,
    running_member,
    until,
)
from tests.snp_platform import SnpPlatform


@pytest.fixture
def clock() -> Clock:
    return Clock()


def verifier_of(
    machine: Machine, facts: object = FACTS, hardening: Mapping[str, str] = HARDENING, **changes: object
) -> PeerVerifier:
    """What another machine than `machine` demands: one with these facts."""
    made = machine.announcer.make_verifier(gpu=False)
    return replace(made, facts=facts, hardening=lambda: hardening, **changes)  # type: ignore[arg-type]


async def lead(leader: Machine, members: list[Machine], during: Callable[[], object] = lambda: True) -> None:
    """Runs a unit until `during` holds."""
    async with contextlib.AsyncExitStack() as stack:
        for member in members:
            await stack.enter_async_context(running_member(member))
        await stack.enter_async_context(running_leader(leader, [member.port for member in members]))
        await until(lambda: len(leader.pairs) == len(members))
        await until(during)


def test_a_leader_and_two_members_pair_and_a_client_verifies_all_three(clock: Clock):
    leader, members = Machine(clock), [Machine(clock), Machine(clock)]

    def is_whole() -> bool:
        assert leader.judged().accepted
        return all(member.pairs for member in members)

    asyncio.run(lead(leader, members, is_whole))
    told = [step.text for step in leader.judged() if step.slug == "unit-member"]
    assert [text[:28] for text in told] == ["machine 1 of the node's unit", "machine 2 of the node's unit"]
    statement = stated(leader)
    assert statement.unit_members == tuple(sorted(member.key.digest for member in members))
    assert len(leader.lost) == 2, "at the end"


def test_both_sides_of_a_pair_have_its_secret_and_know_which_member_it_is(clock: Clock):
    leader, members = Machine(clock), [Machine(clock), Machine(clock)]

    async def run() -> None:
        async with running_member(members[0]), running_member(members[1]):
            async with running_leader(leader, [member.port for member in members]):
                await until(lambda: len(leader.pairs) == 2 and all(member.pairs for member in members))
                for index, member in enumerate(members, 1):
                    (far,) = member.pairs.values()
                    near = leader.pairs[far.id]
                    assert (near.secret, near.index) == (far.secret, index)
                    assert far.index == index
                    assert (near.address, far.address) == (("127.0.0.1", member.port), None)
                    assert near.num_engines == far.num_engines == 2
            await until(lambda: not any(member.pairs for member in members))

    asyncio.run(run())


def test_evidence_is_renewed_on_both_sides_for_as_long_as_the_unit_runs(clock: Clock):
    """Both outlive every single statement, and a client accepts the node at every moment."""
    leader = Machine(clock)
    clock.now += 600  # so that their statements do not end together
    member = Machine(clock)

    async def run() -> None:
        async with running_member(member), running_leader(leader, [member.port]) as unit:
            await until(lambda: leader.pairs)
            (pair_id,) = leader.pairs
            documents = set()
            for _ in range(100):
                await pass_time(clock, 60, leader, member, settled=lambda: member.document in unit.list_members().documents)
                assert leader.judged().accepted, failures(leader.judged())
                left_s = stated(leader).not_after - clock.now
                assert left_s > TIMES.listed_s, "clients get epochs of some length"
                documents.add(leader.document)
            assert set(leader.pairs) == set(member.pairs) == {pair_id}, "it stayed the same pair"
            assert 2 <= len(documents) <= 8, "100 minutes: each statement lasts most of an hour"

    asyncio.run(run())


def test_a_member_that_renews_nothing_is_dropped_before_its_evidence_ends(clock: Clock):
    attester = FailingAttester()
    leader, member = Machine(clock), Machine(clock, attester=attester)

    async def run() -> None:
        async with running_member(member), running_leader(leader, [member.port]) as unit:
            await until(lambda: leader.pairs)
            attester.is_broken = True
            await pass_time(clock, NODE_KEY_LIFE_S - TIMES.listed_s - 1, leader, member)
            assert leader.pairs, "nothing is late yet"
            clock.now += 1
            await until(lambda: not leader.pairs and not member.pairs)
            assert not stated(leader).unit_members
            assert leader.judged().accepted, "the node goes on by itself"
            assert stated(leader).not_after > clock.now + TIMES.listed_s, "and does not end with its member"
            attester.is_broken = False
            await until(lambda: stated(leader).unit_members)
            await asyncio.sleep(0.1)
            assert not leader.pairs, "statements without it are still valid"
            later_s = NODE_KEY_LIFE_S + MAX_CLOCK_SKEW_S + REQUEST_S
            await pass_time(clock, later_s, leader, member, settled=lambda: member.document in unit.list_members().documents)
            await until(lambda: leader.pairs)

    asyncio.run(run())


def test_a_leader_that_renews_nothing_is_dropped_by_its_member(clock: Clock):
    leader, member = Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(member), running_leader(leader, [member.port]):
            await until(lambda: member.pairs)
            leader.does_renew = False
            clock.now += NODE_KEY_LIFE_S
            await until(lambda: not member.pairs)
            await asyncio.sleep(0.1)
            assert not member.pairs, "nor is it taken back"

    asyncio.run(run())


def test_a_member_that_was_started_again_is_used_when_no_statement_without_it_is_valid(clock: Clock):
    """A client that sealed to the leader under an older statement agreed to the machine in that one."""
    leader, first, second = Machine(clock), Machine(clock), Machine(clock)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as of_first:
            await of_first.enter_async_context(running_member(first))
            async with running_leader(leader, [first.port]) as unit:
                await until(lambda: leader.pairs)
                (old_id,) = leader.pairs
                old = stated(leader)
                await of_first.aclose()
                await until(lambda: leader.lost == [old_id])
                async with running_member(second, port=first.port):
                    await until(lambda: stated(leader).unit_members == (second.key.digest,))
                    assert leader.judged().accepted
                    wait_s = old.not_before + NODE_KEY_LIFE_S + MAX_CLOCK_SKEW_S + REQUEST_S - clock.now - 1
                    await pass_time(
                        clock, wait_s, leader, second, settled=lambda: second.document in unit.list_members().documents
                    )
                    assert not leader.pairs
                    clock.now += 1
                    await until(lambda: leader.pairs)
                    assert leader.judged().accepted

    asyncio.run(run())


def test_a_member_is_used_when_the_key_of_a_statement_without_it_has_ended_not_only_the_statement(clock: Clock):
    """A request that somebody held is opened until then, and may run on."""
    first, second = Machine(clock), Machine(clock)
    clock.now += 1500
    leader = Machine(clock)  # its key ends 1500 s later than that of the first member, and so than its statement

    async def run() -> None:
        async with contextlib.AsyncExitStack() as of_first:
            await of_first.enter_async_context(running_member(first))
            async with running_leader(leader, [first.port]) as unit:
                await until(lambda: leader.pairs)
                old = stated(leader)
                key_ends_s = clock.now + NODE_KEY_LIFE_S
                assert old.not_after < key_ends_s
                await of_first.aclose()
                await until(lambda: not leader.pairs)
                async with running_member(second, port=first.port):
                    await until(lambda: stated(leader).unit_members == (second.key.digest,))
                    assert stated(leader).keys == old.keys
                    wait_s = key_ends_s + MAX_CLOCK_SKEW_S + REQUEST_S - clock.now - 1
                    await pass_time(
                        clock, wait_s, leader, second, settled=lambda: second.document in unit.list_members().documents
                    )
                    assert not leader.pairs
                    clock.now += 1
                    await until(lambda: leader.pairs)

    asyncio.run(run())


def test_a_member_that_is_lost_for_a_moment_comes_back_at_once(clock: Clock):
    leader, member = Machine(clock), Machine(clock)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as first:
            await first.enter_async_context(running_member(member))
            async with running_leader(leader, [member.port]):
                await until(lambda: leader.pairs)
                await first.aclose()
                await until(lambda: not leader.pairs)
                assert stated(leader).unit_members == (member.key.digest,), "it is not used, but may be"
                async with running_member(member, port=member.port) as port:
                    port.take_evidence(member.document)
                    await until(lambda: leader.pairs)

    asyncio.run(run())


FLOOR = AttestationPolicy(
    snp_floor=SnpFloor(boot_loader=3, snp=23, microcode=219),
    accept_software=True,  # which no policy can have a node on hardware accept
    releases=frozenset({"ff" * 32}),
)


def stated(machine: Machine) -> Statement:
    return read_statement(read_evidence(machine.document).statement)


LESS = {name: told for name, told in HARDENING.items() if name != "engine-1.landlock"}
MISSING = {**HARDENING, "engine.seccomp": "missing: no filter"}
FOREIGN: dict[str, tuple[dict[str, object], Mapping[str, str], str, str]] = {
    "another release": ({"release": "1a" * 32}, HARDENING, "release", "--release"),
    "another model": ({"model": "1b" * 32}, HARDENING, "model", "--model"),
    "another profile": ({"profile": "team"}, HARDENING, "profile", "--profile"),
    "a profile with other rules": ({"profile_digest": "1c" * 32}, HARDENING, "profile-digest", "release"),
    "another setting": (
        {"configuration": {**FACTS.configuration, "setting quant": '"int8"'}},
        HARDENING,
        "configuration",
        "setting quant",
    ),
    "a measure that is missing": ({}, MISSING, "hardening", "engine.seccomp"),
    "an engine with fewer measures": ({}, LESS, "unit", "less hardened"),
    "no hardening": ({}, {}, "hardening", "hardening"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_leader_does_not_start_with_a_member_that_is_not_what_it_is(clock: Clock, case: str):
    changes, hardening, reason, told = FOREIGN[case]
    leader, member = Machine(clock), Machine(clock, replace(FACTS, **changes), hardening)  # type: ignore[arg-type]

    async def run() -> None:
        async with running_member(member):
            with pytest.raises(UnitRefusedError, match="member 1 of the unit") as refused:
                async with running_leader(leader, [member.port]):
                    raise AssertionError("it started")
            assert refused.value.reason == reason
            assert told in refused.value.message
            assert leader.announcer.evidence() is None, "it states nothing"

    asyncio.run(run())


@pytest.mark.parametrize("case", FOREIGN)
def test_a_member_lends_nothing_to_a_leader_that_is_not_what_it_is(clock: Clock, case: str, caplog: pytest.LogCaptureFixture):
    """A leader whose own code would accept anybody."""
    changes, hardening, _, told = FOREIGN[case]
    leader, member = Machine(clock, replace(FACTS, **changes), hardening), Machine(clock)  # type: ignore[arg-type]

    async def run() -> None:
        async with running_member(member):
            await leader.announcer.rehearse()
            async with running_leader(leader, [member.port], verifier_of(leader)):
                await until(lambda: "the member refuses" in caplog.text)
                assert not member.pairs
                assert not leader.pairs

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert told in caplog.text


def test_a_machine_without_a_unit_is_no_member(clock: Clock):
    """A statement with no unit key, shown by something that answers as a member does."""
    leader, member, plain = Machine(clock), Machine(clock), Machine(clock)

    async def run() -> None:
        await plain.announcer.renew()
        async with running_member(member) as port:
            member.does_renew = False
            port.take_evidence(plain.document)
            with pytest.raises(UnitRefusedError, match="no machine of a unit"):
                async with running_leader(leader, [member.port]):
                    raise AssertionError("it started")

    asyncio.run(run())


def test_a_node_that_leads_a_unit_is_no_member_of_another(clock: Clock):
    leader, other, member, liar = (Machine(clock) for _ in range(4))

    async def run() -> None:
        async with running_member(member), running_leader(other, [member.port]), running_member(liar) as port:
            liar.does_renew = False
            port.take_evidence(other.document)
            with pytest.raises(UnitRefusedError, match="leads a unit of its own"):
                async with running_leader(leader, [liar.port]):
                    raise AssertionError("it started")

    asyncio.run(run())


def test_evidence_of_a_member_without_its_key_is_not_listed(clock: Clock):
    """An attacker at the member's address shows the member's evidence, which is public."""
    leader, member, thief = Machine(clock), Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(member), running_member(thief) as port:
            thief.does_renew = False
            port.take_evidence(member.document)
            with pytest.raises(UnitRefusedError, match="does not prove") as refused:
                async with running_leader(leader, [thief.port]):
                    raise AssertionError("it started")
            assert refused.value.reason == "handshake"
            assert not thief.pairs

    asyncio.run(run())


def test_a_thief_in_the_place_of_a_running_member_changes_nothing_in_the_leaders_statement(clock: Clock):
    """Its evidence, and that of the member when it had another key, are still valid."""
    leader, member, thief = Machine(clock), Machine(clock), Machine(clock)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as of_member:
            await of_member.enter_async_context(running_member(member))
            async with running_leader(leader, [member.port]):
                await until(lambda: leader.pairs)
                await of_member.aclose()
                async with running_member(thief, port=member.port) as port:
                    thief.does_renew = False
                    port.take_evidence(member.document)
                    await asyncio.sleep(0.3)
                    assert stated(leader).unit_members == (member.key.digest,)
                    assert not leader.pairs

    asyncio.run(run())


def test_evidence_that_has_ended_or_does_not_hold_yet_is_refused(clock: Clock):
    member = Machine(clock)
    member.does_renew = False

    async def run() -> None:
        async with running_member(member):
            verifier = member.announcer.make_verifier(gpu=False)
            assert verifier.judge_member(member.document, clock.now).unit_key == member.key.public
            for moment in (clock.now + NODE_KEY_LIFE_S, clock.now - 400):
                with pytest.raises(UnitRefusedError, match="clock") as refused:
                    verifier.judge_member(member.document, moment)
                assert refused.value.reason == "expiry"
            clock.now += NODE_KEY_LIFE_S
            late = Machine(clock)
            with pytest.raises(UnitRefusedError, match="stale"):
                async with running_leader(late, [member.port]):
                    raise AssertionError("it started")

    asyncio.run(run())


def test_a_machine_that_names_no_checkpoint_is_refused_by_one_that_does(clock: Clock):
    """A strict client refuses the whole node for it."""
    member = Machine(clock)

    async def run() -> None:
        async with running_member(member):
            verifier = member.announcer.make_verifier(gpu=False)
            assert verifier.judge_member(member.document, clock.now).checkpoint == ""
            with pytest.raises(UnitRefusedError, match="--log-checkpoint"):
                replace(verifier, names_checkpoint=True).judge_member(member.document, clock.now)

    asyncio.run(run())


def test_a_leader_whose_statement_does_not_list_the_member_is_refused(clock: Clock):
    leader, member, other = Machine(clock), Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(other), running_member(member), running_leader(leader, [other.port]):
            await until(lambda: leader.pairs)
            verifier = member.announcer.make_verifier(gpu=False)
            with pytest.raises(UnitRefusedError, match="does not list") as refused:
                verifier.judge_leader(leader.document, member.key.public, clock.now)
            assert refused.value.reason == "not-listed"
            # over the wire, with all keys: the leader's program is not asked
            reader, writer = await asyncio.open_connection("127.0.0.1", member.port)
            handshake = LeaderHandshake(leader.key)
            writer.write(b"j" + frame(handshake.hello))
            handshake.read_offer(await read_frame(reader))
            writer.write(frame(handshake.claim(member.key.public, 1, leader.document)))
            assert b"does not list" in await read_frame(reader)
            writer.close()
            assert not member.pairs

    asyncio.run(run())


def test_a_stranger_with_a_leaders_evidence_has_nothing_verified(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    leader, member, thief = Machine(clock), Machine(clock), Machine(clock)
    judged: list[bytes] = []

    async def run() -> None:
        async with running_member(member):
            async with running_leader(leader, [member.port]):
                await until(lambda: member.pairs)
                document = leader.document
            await until(lambda: not member.pairs)
            monkeypatch.setattr(PeerVerifier, "judge_leader", lambda _, document, *__: judged.append(document))
            reader, writer = await asyncio.open_connection("127.0.0.1", member.port)
            handshake = LeaderHandshake(thief.key)
            writer.write(b"j" + frame(handshake.hello))
            handshake.read_offer(await read_frame(reader))
            writer.write(frame(handshake.claim(member.key.public, 1, document)))
            assert b"does not prove that it holds the key" in await read_frame(reader)
            writer.close()
            assert not judged

    asyncio.run(run())


def test_a_leader_says_that_its_statement_does_not_list_a_member_yet(clock: Clock, caplog: pytest.LogCaptureFixture):
    attester = FailingAttester()
    leader, first, second = Machine(clock, attester=attester), Machine(clock), Machine(clock)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as of_first:
            await of_first.enter_async_context(running_member(first))
            async with running_leader(leader, [first.port]):
                await until(lambda: leader.pairs)
                attester.is_broken = True
                await of_first.aclose()
                async with running_member(second, port=first.port):
                    await until(lambda: "is not used: this node's statement does not list it" in caplog.text)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_an_error_of_the_program_with_one_member_does_not_end_the_others(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    leader, good, bad = Machine(clock), Machine(clock), Machine(clock)
    claim = LeaderHandshake.claim

    def fail_for_second(handshake: LeaderHandshake, member_key: bytes, index: int, evidence: bytes) -> bytes:
        if index == 2:
            raise ValueError("of an error in the program")
        return claim(handshake, member_key, index, evidence)

    monkeypatch.setattr(LeaderHandshake, "claim", fail_for_second)

    async def run() -> None:
        async with running_member(good), running_member(bad), running_leader(leader, [good.port, bad.port]):
            await until(lambda: "ValueError" in caplog.text)
            await until(lambda: leader.pairs)
            assert not bad.pairs
            monkeypatch.undo()
            await until(lambda: bad.pairs and len(leader.pairs) == 2)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_a_member_that_is_named_twice_is_found_out(clock: Clock):
    leader, member = Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(member):
            with pytest.raises(UnitRefusedError, match="named twice"):
                async with running_leader(leader, [member.port, member.port]):
                    raise AssertionError("it started")

    asyncio.run(run())


def test_members_that_exchange_their_addresses_are_paired_again(clock: Clock):
    leader, first, second = Machine(clock), Machine(clock), Machine(clock)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for member in (first, second):
                await stack.enter_async_context(running_member(member))
            ways = [await stack.enter_async_context(forwarding(member.port)) for member in (first, second)]
            await stack.enter_async_context(running_leader(leader, [way.port for way in ways]))
            await until(lambda: len(leader.pairs) == 2)
            old, stated_before = set(leader.pairs), stated(leader).unit_members
            ways[0].target, ways[1].target = second.port, first.port
            for way in ways:
                way.cut()
            await until(lambda: len(leader.pairs) == 2 and not old & set(leader.pairs))
            assert stated(leader).unit_members == stated_before, "none was left out meanwhile: it would not be used for an hour"
            await until(lambda: first.pairs and second.pairs)
            assert [pair.index for member in (first, second) for pair in member.pairs.values()] == [2, 1]

    asyncio.run(run())


class Forwarder:
    """Passes connections on to a port of this machine, which may change."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, 0
        self.writers: list[asyncio.StreamWriter] = []

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += [writer, far_writer]
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def forwarding(target: int) -> AsyncIterator[Forwarder]:
    forwarder = Forwarder(target)
    server = await asyncio.start_server(forwarder.forward, "127.0.0.1", 0)
    forwarder.port = server.sockets[0].getsockname()[1]
    try:
        yield forwarder
    finally:
        forwarder.cut()
        server.close()


def test_a_member_serves_one_leader_and_another_one_waits_until_it_has_ended(clock: Clock, caplog: pytest.LogCaptureFixture):
    first, second, member = Machine(clock), Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(member), contextlib.AsyncExitStack() as of_first:
            await of_first.enter_async_context(running_leader(first, [member.port]))
            await until(lambda: member.pairs)
            (pair_id,) = member.pairs
            async with running_leader(second, [member.port]):
                await until(lambda: "has a leader" in caplog.text)
                assert set(member.pairs) == {pair_id}
                assert not second.pairs
                await of_first.aclose()
                await until(lambda: second.pairs and set(member.pairs) == set(second.pairs))
                assert member.lost == [pair_id]

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_a_member_without_descriptors_for_its_leader_keeps_none_that_it_does_not_serve(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    first, second, member = Machine(clock), Machine(clock), Machine(clock)
    paired, is_full = member.paired, True

    def pair_later(pair: Pair) -> None:
        paired(pair)
        if is_full:
            raise OSError(errno.EMFILE, "Too many open files")

    member.paired = pair_later  # type: ignore[method-assign]

    async def run() -> None:
        nonlocal is_full
        async with running_member(member):
            async with running_leader(first, [member.port]):
                await until(lambda: "refuses: this member cannot serve a leader now (Too many open files)" in caplog.text)
            is_full = False
            async with running_leader(second, [member.port]):
                await until(lambda: second.pairs and set(second.pairs) == set(member.pairs))

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_a_leader_that_lost_its_connection_gets_a_new_one(clock: Clock):
    """The network forgot it, and the member has not noticed yet."""
    leader, member = Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(member), running_leader(leader, [member.port]):
            await until(lambda: member.pairs)
            (pair_id,) = member.pairs
            reader, writer = await asyncio.open_connection("127.0.0.1", member.port)
            handshake = LeaderHandshake(leader.key)
            writer.write(b"j" + frame(handshake.hello))
            handshake.read_offer(await read_frame(reader))
            writer.write(frame(handshake.claim(member.key.public, 1, leader.document)))
            handshake.finish(await read_frame(reader))
            await until(lambda: pair_id in member.lost)
            writer.close()
            await until(lambda: leader.pairs and set(leader.pairs) == set(member.pairs))

    asyncio.run(run())


def test_a_leader_without_descriptors_for_a_member_renews_its_evidence_and_uses_it_later(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    leader, member = Machine(clock), Machine(clock)
    pairs = iter([False, True])
    paired = leader.paired

    def pair_later(pair: Pair) -> None:
        paired(pair)
        if not next(pairs):
            raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        async with running_member(member), running_leader(leader, [member.port]) as unit:
            await until(lambda: leader.pairs)
            (pair_id,) = leader.pairs
            leader.pairs.clear()
            unit._on_pair, unit._members[0].is_used = pair_later, False  # as if it were not used yet
            unit.take_evidence(leader.document)
            assert leader.lost == [pair_id]
            await until(lambda: leader.pairs and set(leader.pairs) == set(member.pairs) != {pair_id})
            assert stated(leader).unit_members == (member.key.digest,)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "cannot reach its engines (Too many open files)" in caplog.text


def test_a_machine_on_the_leaders_chip_is_refused_and_one_on_another_is_not(clock: Clock):
    platform, another = SnpPlatform(), SnpPlatform(chip_id=bytes(range(65, 129)))
    trusted = {**VERIFIERS, "sev-snp": SnpVerifier(platform.roots | another.roots)}
    facts = replace(FACTS, launch={"sev-snp": "4d" * 48})
    leader, same, elsewhere, software = (
        Machine(clock, facts, attester=SnpAttester(platform), policy=FLOOR),
        Machine(clock, facts, attester=SnpAttester(platform), policy=FLOOR),
        Machine(clock, facts, attester=SnpAttester(another), policy=FLOOR),
        Machine(clock, facts),
    )

    async def run() -> None:
        for machine in (leader, same, elsewhere, software):
            await machine.announcer.rehearse()
        verifier = replace(leader.announcer.make_verifier(gpu=False), verifiers=trusted)
        for member, reason in ((same, "chip"), (software, "hardware")):
            async with running_member(member):
                with pytest.raises(UnitRefusedError) as refused:
                    async with running_leader(leader, [member.port], verifier):
                        raise AssertionError("it started")
                assert refused.value.reason == reason, refused.value.message
        its_own = replace(elsewhere.announcer.make_verifier(gpu=False), verifiers=trusted)
        async with running_member(elsewhere, its_own), running_leader(leader, [elsewhere.port], verifier):
            await until(lambda: leader.pairs and elsewhere.pairs)

    asyncio.run(run())


def test_a_machine_of_another_measurement_than_the_release_names_is_refused(clock: Clock):
    platform = SnpPlatform()
    trusted = {**VERIFIERS, "sev-snp": SnpVerifier(platform.roots)}
    member = Machine(clock, attester=SnpAttester(platform))

    async def run() -> None:
        async with running_member(member):
            other = {"sev-snp": "4e" * 48}
            for policy, launch, reason in ((FLOOR, other, "measurement"), (FLOOR, {}, "measurement"), (None, other, "tcb")):
                made = replace(member.announcer.make_verifier(gpu=False), verifiers=trusted, policy=policy)
                with pytest.raises(UnitRefusedError) as refused:
                    replace(made, facts=replace(FACTS, launch=launch)).judge_member(member.document, clock.now)
                assert refused.value.reason == reason, refused.value.message

    asyncio.run(run())


def test_the_operators_policy_accepts_no_other_register_of_the_release_and_no_other_kind_of_hardware(clock: Clock):
    platform = SnpPlatform()
    trusted = {**VERIFIERS, "sev-snp": SnpVerifier(platform.roots)}
    elsewhere = SnpPlatform(chip_id=bytes(range(65, 129)))
    lax = replace(FLOOR, kinds=frozenset({"tdx", "nitro", "sev-snp"}), measurements={"sev-snp": frozenset({"4d" * 48})})
    member = Machine(clock, attester=SnpAttester(platform))

    async def run() -> None:
        async with running_member(member):
            made = replace(member.announcer.make_verifier(gpu=False), own=SnpAttester(elsewhere).attest(b""), verifiers=trusted)
            made = replace(made, policy=lax, facts=replace(FACTS, launch={"sev-snp": "4d" * 48}))
            assert made.judge_member(member.document, clock.now).unit_key == member.key.public, "it is good otherwise"
            other_release = replace(made, facts=replace(FACTS, launch={"sev-snp": "4e" * 48}))
            other_kind = replace(made, own=SoftwareAttester().attest(b""))
            for verifier, reason in ((other_release, "measurement"), (other_kind, "kind")):
                with pytest.raises(UnitRefusedError) as refused:
                    verifier.judge_member(member.document, clock.now)
                assert refused.value.reason == reason, refused.value.message

    asyncio.run(run())


def test_an_attested_machine_without_the_clouds_member_key_is_refused(clock: Clock):
    """That a machine is attested does not make it the operator's."""
    key, other = (PrivateKey.generate("node1.example", Kind.NOTE) for _ in range(2))

    async def run() -> None:
        for key_of_member, is_taken in ((key, True), (other, False), (None, False)):
            leader = Machine(clock, attester=MemberAttester(SoftwareAttester(), key))
            attester = SoftwareAttester() if key_of_member is None else MemberAttester(SoftwareAttester(), key_of_member)
            member = Machine(clock, attester=attester)
            async with running_member(member, verifier_of_software(member, clock, key)):
                if is_taken:
                    async with running_leader(leader, [member.port]):
                        await until(lambda leader=leader: leader.pairs)
                    continue
                with pytest.raises(UnitRefusedError, match="--member-key"):
                    async with running_leader(leader, [member.port]):
                        raise AssertionError("it started")

    asyncio.run(run())


def verifier_of_software(machine: Machine, clock: Clock, key: PrivateKey) -> PeerVerifier:
    return PeerVerifier(FACTS, SoftwareAttester().attest(b""), lambda: HARDENING, member_key=key.public)


def test_connections_that_prove_nothing_take_nobodys_place_for_long(clock: Clock):
    leader, member = Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(member, times=replace(TIMES, handshake_s=600)):
            idle = [await asyncio.open_connection("127.0.0.1", member.port) for _ in range(MAX_UNPROVED + 20)]
            for _, writer in idle[::2]:
                writer.write(b"j")
            async with running_leader(leader, [member.port]):
                await until(lambda: leader.pairs)
                await until(lambda: all(reader.at_eof() for reader, _ in idle[:20]))
                assert not any(reader.at_eof() for reader, _ in idle[-10:]), "the oldest go first"
                for _, writer in idle:
                    writer.close()

    asyncio.run(run())


def test_connections_that_come_in_bursts_are_bounded_too(clock: Clock):
    member = Machine(clock)

    async def run() -> None:
        async with running_member(member, times=replace(TIMES, handshake_s=600)) as unit_port:
            with contextlib.ExitStack() as stack:
                strangers: list[socket.socket] = []
                for _ in range(6):
                    burst = [stack.enter_context(socket.socket()) for _ in range(MAX_UNPROVED - 1)]
                    for one in burst:
                        one.setblocking(False)
                        with contextlib.suppress(BlockingIOError):
                            one.connect(("127.0.0.1", member.port))
                    strangers += burst
                    await until(lambda burst=burst: all(map(is_connected, burst)))
                    for one in burst[::2]:
                        with contextlib.suppress(OSError):
                            one.send(b"j")
                    # A burst that finds the queue of the kernel full comes in an order of its own, a second later.
                    await until(lambda strangers=strangers: sum(map(is_open, strangers)) <= len(unit_port._unproved))
                await until(lambda: sum(map(is_open, strangers)) <= MAX_UNPROVED)
                assert all(is_open(one) for one in strangers[-MAX_UNPROVED:]), "the oldest go first"

    asyncio.run(run())


def is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0  # or it was, and has ended
    return True


def is_open(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"x",
        b"GET / HTTP/1.1\r\n\r\n",
        b"j\xff\xff\xff\xff",
        b"j\x00\x00\x00\x04abcd",
        b"j" + (2000).to_bytes(4, "big") + b"cloister unit v1" + bytes(1984),
    ],
    ids=["nothing", "another byte", "http", "too long", "no hello", "no keys"],
)
def test_what_is_no_join_ends_the_connection_and_harms_nobody(clock: Clock, sent: bytes):
    leader, member = Machine(clock), Machine(clock)

    async def run() -> None:
        async with running_member(member):
            reader, writer = await asyncio.open_connection("127.0.0.1", member.port)
            writer.write(sent)
            writer.write_eof()
            answer = b""
            async with asyncio.timeout(300):
                with contextlib.suppress(ConnectionResetError):
                    answer = await reader.read()
            writer.close()
            assert not answer or answer[4:5] == b"-"
            async with running_leader(leader, [member.port]):
                await until(lambda: leader.pairs)

    asyncio.run(run())


def test_a_carried_connection_is_handed_on_with_its_first_byte(clock: Clock):
    member = Machine(clock)

    async def run() -> None:
        async with running_member(member):
            _, writer = await asyncio.open_connection("127.0.0.1", member.port)
            writer.write(b"c" + b"header")
            await until(lambda: member.carried == [b"cheader"])
            writer.close()

    asyncio.run(run())


def test_a_leader_says_which_member_did_not_answer_and_does_not_wait_for_ever(clock: Clock):
    leader = Machine(clock)

    async def run(port: int) -> None:
        begin_s = time.monotonic()
        await leader.announcer.rehearse()
        made = UnitLeader(
            leader.key,
            [("127.0.0.1", port)],
            leader.announcer.make_verifier(gpu=False),
            1,
            longest_request_s=REQUEST_S,
            on_pair=leader.paired,
            on_lost=leader.unpaired,
            times=TIMES,
        )
        with pytest.raises(UnitRefusedError, match=f"127.0.0.1:{port}: the connection is refused: nothing listens there"):
            await made.start(begin_s + 0.2)
        assert time.monotonic() - begin_s < 60

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nothing listens there
        asyncio.run(run(taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("says", "then", "reason"),
    [
        (
            b"",
            "waits",
            "takes the connection and says nothing for 2 s: it loads its model, or is {port} what its --unit",
        ),
        (b"", "ends", "takes the connection and ends it without an answer: is {port} what its --unit-port says"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "ends", "answers in another protocol: is {port} what its --unit-port says"),
        (bytes.fromhex("15030100020232"), "ends", "answers in another protocol: is {port} what its --unit-port says"),
    ],
    ids=["silent", "closed", "http", "tls"],
)
def test_a_leader_says_what_it_found_at_a_wrong_port(clock: Clock, says: bytes, then: str, reason: str):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(says)
        if then == "waits":
            await reader.read()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(UnitRefusedError, match=re.escape(reason.format(port=port))):
                await look_at(clock, port, UnitTimes(connect_s=60.0, handshake_s=2.0 if then == "waits" else 60.0))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            None,
            "cannot be reached (nothing answers within 0.5 s); correct its address in --unit-members, or let",
        ),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "cannot be reached (No route to host); correct its address"),
    ],
)
def test_a_leader_says_that_an_address_is_not_reached(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, error: OSError | None, reason: str
):
    async def connect(host: str, port: int) -> None:
        if error is not None:
            raise error
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(UnitRefusedError, match=re.escape(reason)):
        asyncio.run(look_at(clock, 9100, UnitTimes(connect_s=0.5)))


async def look_at(clock: Clock, port: int, times: UnitTimes) -> None:
    """Starts a leader that looks at its member once."""
    machine = Machine(clock)
    await machine.announcer.rehearse()
    leader = UnitLeader(
        machine.key,
        [("127.0.0.1", port)],
        machine.announcer.make_verifier(gpu=False),
        1,
        longest_request_s=REQUEST_S,
        on_pair=machine.paired,
        on_lost=machine.unpaired,
        times=times,
    )
    await leader.start(time.monotonic())


@pytest.mark.parametrize(("of_leader", "of_members"), [(1, 150_000), (32, 1)], ids=["bytes", "parts"])
def test_members_whose_evidence_does_not_fit_keep_the_node_from_starting(clock: Clock, of_leader: int, of_members: int):
    leader = Machine(clock, attester=BigAttester(of_leader, 1))
    members = [Machine(clock, attester=BigAttester(1, of_members)) for _ in range(4)]

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for member in members:
                await stack.enter_async_context(running_member(member))
            with pytest.raises(UnitRefusedError, match="name fewer members"):
                async with running_leader(leader, [member.port for member in members]):
                    raise AssertionError("it started")
            assert leader.announcer.evidence() is None

    asyncio.run(run())


def test_a_member_whose_evidence_has_grown_is_left_out_and_the_leaders_goes_on(clock: Clock, caplog: pytest.LogCaptureFixture):
    attester = BigAttester(1, 100)
    leader, small, growing = Machine(clock), Machine(clock, attester=BigAttester(1, 150_000)), Machine(clock, attester=attester)

    async def run() -> None:
        async with running_member(small), running_member(growing), running_leader(leader, [small.port, growing.port]) as unit:
            is_settled: Callable[[], bool] = lambda: small.document in unit.list_members().documents  # noqa: E731
            await until(lambda: len(leader.pairs) == 2)
            attester.extra = {"collateral-0": bytes(150_000)}
            await pass_time(clock, NODE_KEY_LIFE_S, leader, small, growing, settled=is_settled)
            await until(lambda: stated(leader).unit_members == (small.key.digest,))
            await until(lambda: {pair.index for pair in leader.pairs.values()} == {1})
            assert leader.judged().accepted, failures(leader.judged())
            await until(lambda: "name fewer members in --unit-members; it is left out" in caplog.text)
            await asyncio.sleep(0.2)
            num_said = caplog.text.count("it is left out")
            assert num_said <= 2, "once for a member that was dropped, and once for one that comes again; not at each try"
            attester.extra = {}
            await pass_time(clock, 2 * NODE_KEY_LIFE_S + MAX_CLOCK_SKEW_S, leader, small, growing, settled=is_settled)
            await until(lambda: len(leader.pairs) == 2)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


class FailingAttester(SoftwareAttester):
    """Hardware that fails for a while."""

    def __init__(self) -> None:
        self.is_broken = False

    def attest(self, statement: bytes) -> Evidence:
        if self.is_broken:
            raise AttestationError("the hardware does not answer")
        return super().attest(statement)


class BigAttester(SoftwareAttester):
    """Evidence with as much beside it as that of several GPUs."""

    def __init__(self, num_parts: int, num_bytes: int) -> None:
        self.extra = {f"collateral-{number}": bytes(num_bytes) for number in range(num_parts)}

    def attest(self, statement: bytes) -> Evidence:
        return msgspec.structs.replace(super().attest(statement), extra=self.extra)


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
