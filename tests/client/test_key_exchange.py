"""X-Wing on both envelopes: what clients take, what they may ask for, and what binds the new key to the hardware."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from cloister.client import EpochRefusedError, EvidenceRefusedError
from cloister.client.envelope import seal_for_node
from cloister.client.node_verification import judge_keys, judge_node
from cloister.trust.attestation import AttestationPolicy, Findings, Outcome
from cloister.trust.attestation.evidence import Statement, read_evidence, read_statement
from cloister.trust.attestation.policy_file import parse_policy
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.sealing import (
    X25519,
    XWING,
    Header,
    KeyConfiguration,
    KeyRing,
    encode_keys,
    parse_keys,
)
from cloister.trust.transparency.epoch import NodeEntry
from tests.client.test_envelope import GATEWAY, NODE_ENTRY, NOW, ask, epoch_of, open_request
from tests.client.world import NODES, Handler, World, ask_once
from tests.trust.transparency.world import World as Log
from tests.trust.transparency.world import make_evidence

SOFTWARE = AttestationPolicy(accept_software=True)
ASKED = replace(SOFTWARE, post_quantum=True)


def make_rings_older(patch: pytest.MonkeyPatch) -> None:
    """Every ring that is made from now on has X25519 alone, as before this release."""
    patch.setitem(KeyRing.__init__.__kwdefaults__, "kems", (X25519,))


@pytest.fixture
def world_of_older_nodes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(directory / "cloud")
    make_rings_older(monkeypatch)
    asyncio.run(world.cloud.enter(NODES))
    yield world
    world.cloud.close()


@pytest.fixture
def older_world(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    make_rings_older(monkeypatch)
    world = World(directory / "cloud")
    asyncio.run(world.cloud.enter(NODES))
    yield world
    world.cloud.close()


def sent_kems(world: World) -> list[int]:
    """Watches the wire: the KEM of each sealed request to the relay."""
    kems: list[int] = []

    async def look(request: httpx.Request, go_on: Handler) -> httpx.Response:
        if request.method == "POST" and request.headers["content-type"].startswith("message/ohttp"):
            kems.append(Header.parse(await request.aread()).kem_id)
        return await go_on(request)

    world.wire.tamper = look
    return kems


def test_both_envelopes_of_a_request_are_sealed_with_x_wing() -> None:
    envelope = seal_for_node(ask(), NODE_ENTRY, epoch_of("open"), 'PrivateToken token="t"', NOW)
    assert Header.parse(envelope.sealed).kem_id == XWING.kem_id
    outer, _ = open_request(GATEWAY, envelope.sealed)
    assert Header.parse(outer.content).kem_id == XWING.kem_id


def test_a_client_that_asks_for_it_is_served_by_programs_that_have_it(world: World) -> None:
    kems = sent_kems(world)
    assert ask_once(world, world.session(policy=ASKED)).json() == {"ok": True}
    assert kems == [XWING.kem_id] * 2, "a purchase and a request"


def test_older_programs_are_sealed_to_with_x25519(older_world: World) -> None:
    kems = sent_kems(older_world)
    assert ask_once(older_world).json() == {"ok": True}
    assert kems == [X25519.kem_id] * 2, "a purchase and a request"


def test_a_client_that_asks_for_post_quantum_encryption_sends_nothing_to_an_older_gateway(older_world: World) -> None:
    with pytest.raises(EpochRefusedError, match=r"Nothing was sent: the gateway offers DHKEM.* only") as refused:
        ask_once(older_world, older_world.session(policy=ASKED))
    assert refused.value.reason == "key-exchange"
    assert older_world.wire.sent == 0
    assert not any("token-request" in line for line in older_world.wire.asked), "no token was bought either"


def test_a_client_that_asks_for_post_quantum_encryption_sends_nothing_to_older_nodes(world_of_older_nodes: World) -> None:
    world = world_of_older_nodes
    with pytest.raises(EvidenceRefusedError, match=r"the node offers DHKEM.* only.*update the node") as refused:
        ask_once(world, world.session(policy=ASKED))
    assert refused.value.steps == ("key-exchange",)
    assert world.wire.sent == 0
    assert ask_once(world).json() == {"ok": True}, "who does not ask for it is served"


def judge(log: Log, document: bytes, node: NodeEntry, policy: AttestationPolicy = SOFTWARE) -> list[str]:
    believed = log.believe(log.publish().bundle)
    return [step.slug for step in judge_node(node, document, believed, log.trust, policy, log.now).of(Outcome.FAILED)]


def entry_of(document: bytes, keys: bytes | None = None) -> NodeEntry:
    statement = read_statement(read_evidence(document).statement)
    keys = keys or statement.keys
    return NodeEntry(hashlib.sha256(keys).hexdigest(), statement.capacity, keys, hashlib.sha256(document).hexdigest())


def swapped(keys: bytes, kem_id: int) -> bytes:
    """A list of keys in which that of one KEM is somebody else's."""
    stranger = {one.kem_id: one.public_key for one in parse_keys(KeyRing(0.0).publish())}
    return encode_keys(replace(one, public_key=stranger[kem_id]) if one.kem_id == kem_id else one for one in parse_keys(keys))


@pytest.mark.parametrize("kem_id", [XWING.kem_id, X25519.kem_id], ids=["X-Wing", "X25519"])
def test_a_key_that_was_swapped_in_the_epoch_is_refused_whichever_of_the_two(tmp_path: Path, kem_id: int) -> None:
    log = Log(tmp_path)
    document = make_evidence(log.release, now=log.now)
    honest = entry_of(document)
    assert "key" not in judge(log, document, honest)
    forged = swapped(honest.keys, kem_id)
    assert "key" in judge(log, document, entry_of(document, forged)), "under the name that belongs to the swapped list"
    assert "key" in judge(log, document, msgspec.structs.replace(honest, keys=forged)), "under the node's own name"


def test_a_node_whose_keys_the_epoch_leaves_to_its_evidence_is_bound_to_them_by_its_name(tmp_path: Path) -> None:
    log = Log(tmp_path)
    document = make_evidence(log.release, now=log.now)
    honest = msgspec.structs.replace(entry_of(document), keys=b"")
    assert "key" not in judge(log, document, honest)
    other = make_evidence(log.release, now=log.now, name="another node")
    listed = msgspec.structs.replace(honest, evidence_sha256=hashlib.sha256(other).hexdigest())
    assert "key" in judge(log, other, listed), "the evidence of another node, with keys of its own"


def test_a_client_seals_to_the_keys_in_the_evidence_where_the_epoch_leaves_them_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.trust.transparency.epoch.MAX_EPOCH_BYTES", 4500)
    world = World(directory / "cloud")
    asyncio.run(world.cloud.enter(NODES))
    session = world.session(policy=ASKED)
    assert ask_once(world, session).json() == {"ok": True}
    world.cloud.close()
    assert session.believed is not None
    assert {node.keys for node in session.believed.epoch.nodes} == {b""}


@pytest.mark.parametrize("kem_id", [XWING.kem_id, X25519.kem_id], ids=["X-Wing", "X25519"])
def test_a_key_that_was_swapped_in_the_statement_is_not_what_the_report_vouches_for(tmp_path: Path, kem_id: int) -> None:
    log = Log(tmp_path)
    evidence = read_evidence(make_evidence(log.release, now=log.now))
    statement: Statement = read_statement(evidence.statement)
    forged = msgspec.structs.replace(statement, keys=swapped(statement.keys, kem_id))
    document = msgspec.structs.replace(evidence, statement=forged.encode()).encode()
    assert "report-signature" in judge(log, document, entry_of(document))


def test_a_node_whose_keys_are_none_is_refused(tmp_path: Path) -> None:
    log = Log(tmp_path)
    statement = read_statement(read_evidence(make_evidence(log.release, now=log.now)).statement)
    for keys in (b"\x00\x01x", encode_keys([KeyConfiguration(1, bytes(31))])):
        document = software(msgspec.structs.replace(statement, keys=keys))
        assert "key-exchange" in judge(log, document, entry_of(document))


def software(statement: Statement) -> bytes:
    return SoftwareAttester().attest(statement.encode()).encode()


def test_a_node_with_x25519_alone_fails_the_policy_that_asks_for_more_and_no_other(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path)
    statement = read_statement(read_evidence(make_evidence(log.release, now=log.now)).statement)
    document = software(msgspec.structs.replace(statement, keys=KeyRing(0.0, kems=(X25519,)).publish()))
    assert "key-exchange" not in judge(log, document, entry_of(document))
    assert "key-exchange" in judge(log, document, entry_of(document), ASKED)


def test_a_client_without_ml_kem_that_asks_for_it_is_told_that_it_lacks_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.client.node_verification.KEMS", (X25519,))
    monkeypatch.setattr("cloister.trust.sealing.keys.KEMS", (X25519,))
    findings = Findings()
    judge_keys(findings, "the node", KeyRing(0.0).publish(), ASKED)
    [failed] = findings.of(Outcome.FAILED)
    assert "this machine's OpenSSL has no ML-KEM" in failed.text


def test_a_policy_file_can_ask_for_it() -> None:
    assert parse_policy(b'{"post_quantum": true}').post_quantum
    assert not parse_policy(b"{}").post_quantum
