"""Dishonest operators of a whole cloud, each with one thing that it does. Everything else is the real programs' code."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import httpx
import msgspec

from cloister.client.routing_audit.adversary import SteeringBook
from cloister.client.routing_audit.cloud import GATEWAY, ISSUER, Node, SealedCloud, current_user
from cloister.client.routing_audit.records import Attack, Spell
from cloister.private.issuer import issuer_app
from cloister.private.nodes import NodeBook
from cloister.private.upstream import Upstream
from cloister.trust.tokens import Issuer, KeyShelf
from cloister.trust.tokens.redeem import BUDGET_FIELD
from cloister.trust.transparency.epoch import (
    Epoch,
    EpochBundle,
    GatewayEntry,
    NodeEntry,
    encode_bundle,
    epoch_leaf,
    parse_bundle,
)
from cloister.trust.transparency.note import Kind, PrivateKey

replace = msgspec.structs.replace
VICTIM = "user-1"
CAPTURED = "c"
NODES = Spell({"a": 1, "b": 1, "c": 1})


def is_victim() -> bool:
    return current_user.get("") == VICTIM


async def log_alone(cloud: SealedCloud, **changes: object) -> bytes:
    """An epoch that the gateway wrote itself: logged and cosigned, for witnesses do not read entries."""
    assert cloud.epochs.bundle is not None
    honest = parse_bundle(cloud.epochs.bundle)
    epoch: Epoch = replace(honest.epoch, epoch=cloud.publisher._history.epoch.epoch + 1, **changes)  # type: ignore[union-attr]
    appended = cloud.log.append([epoch_leaf(epoch)])
    note = appended.note
    for witness in cloud.cosigners:
        note = note.add(*await witness.cosign(cloud.log, note))
    cloud.publisher._history.advance(appended.checkpoint.size)
    size = appended.checkpoint.size
    bundle = EpochBundle(
        str(note), epoch, appended.first, cloud.log.prove_inclusion(appended.first, size),
        replace(honest.release, proof=cloud.log.prove_inclusion(honest.release.index, size)), None,
    )  # fmt: skip
    return encode_bundle(bundle)


class ToVictim:
    """Shows the victim another epoch than everybody else."""

    def __init__(self, cloud: SealedCloud, bundle: bytes) -> None:
        self.log, self.bundle = cloud.epochs.log, bundle
        self._others = cloud.epochs

    async def read(self) -> bytes | None:
        return self.bundle if is_victim() else self._others.bundle


def steering(attack: Attack, victim: Callable[[str], bool]) -> Callable[[SealedCloud, Upstream], NodeBook]:
    def make(cloud: SealedCloud, upstream: Upstream) -> NodeBook:
        return SteeringBook(
            cloud, upstream, attack, rate=1.0, captured=CAPTURED, is_victim=victim, source=random.Random(1)
        )  # fmt: skip

    return make


class Slow(NodeBook):
    """Takes its time with one user's requests."""

    async def find(self, node_id: str) -> str | None:
        if is_victim():
            await asyncio.sleep(0.3)
        return await super().find(node_id)


def pay_less(cloud: SealedCloud, upstream: Upstream) -> NodeBook:
    """Tells every node but the captured one that nothing was paid for, so that users ask again until that one answers."""
    ask = upstream.ask

    def lie(method: str, url: str, headers: dict[str, str], *rest: Any, **named: Any) -> Any:
        is_captured = httpx.URL(url).host == f"node-{CAPTURED}.test"
        return ask(method, url, headers if is_captured else {**headers, BUDGET_FIELD: "0"}, *rest, **named)

    upstream.ask = lie  # type: ignore[method-assign]
    return NodeBook([], upstream, cloud.now)


def entries(cloud: SealedCloud) -> dict[str, NodeEntry]:
    assert cloud.epochs.bundle is not None
    return {node.member: node for node in parse_bundle(cloud.epochs.bundle).epoch.nodes}


def in_order(nodes: object) -> tuple[NodeEntry, ...]:
    return tuple(sorted(nodes, key=lambda node: node.node_id))  # type: ignore[call-overload]


async def leave_out(cloud: SealedCloud) -> None:
    """Restarts the gateway with one node of three."""
    await cloud.enter(Spell({CAPTURED: 1}), signed=False)


async def add_stranger(cloud: SealedCloud) -> None:
    nodes = entries(cloud)
    extra = NodeEntry("ff" * 32, 1, b"keys", "00" * 32, "stranger")
    cloud.epochs.bundle = await log_alone(cloud, nodes=in_order((*nodes.values(), extra)))


async def raise_capacity(cloud: SealedCloud) -> None:
    nodes = entries(cloud)
    raised = {**nodes, CAPTURED: replace(nodes[CAPTURED], capacity=100)}
    cloud.epochs.bundle = await log_alone(cloud, nodes=in_order(raised.values()))


async def stand_in(cloud: SealedCloud) -> None:
    """Puts a node of its own in another member's place."""
    node = Node(PrivateKey.generate("a", Kind.NOTE), 1, cloud.now, cloud.config)
    node.attest(cloud.release, str(cloud.log.checkpoint()[1]), cloud.time)
    cloud.network.open(node.url, node)
    await cloud.book.look()
    nodes = entries(cloud)
    entry = NodeEntry(node.node_id, 1, node.ring.publish(), sha256(node.evidence).hexdigest(), "a")
    cloud.epochs.bundle = await log_alone(cloud, nodes=in_order({**nodes, "a": entry}.values()))


async def hand_out_two_epochs(cloud: SealedCloud) -> None:
    """Logs an epoch with another key of the gateway, and gives each to somebody else."""
    first = cloud.epochs.bundle
    assert first is not None
    cloud.time += 61
    keys = cloud.gateway_ring.publish()
    second = await log_alone(cloud, gateway=GatewayEntry(GATEWAY, keys), not_before=int(cloud.time))
    cloud.epochs.bundle = first
    _serve_epochs(cloud, ToVictim(cloud, second))


async def hurry(cloud: SealedCloud) -> None:
    """Many epochs within a second."""
    for _ in range(7):
        cloud.epochs.bundle = await log_alone(cloud)


async def show_other_tree(cloud: SealedCloud) -> None:
    """Shows the victim an old copy of the log after it saw the newer one."""
    old = cloud.epochs.bundle
    assert old is not None
    cloud.time += 61
    cloud.epochs.bundle = await log_alone(cloud, not_before=int(cloud.time))
    looks = 0

    class Flapping(ToVictim):
        async def read(self) -> bytes | None:
            nonlocal looks
            if is_victim():
                looks += 1
                return self._others.bundle if looks == 1 else old
            return self._others.bundle

    _serve_epochs(cloud, Flapping(cloud, old))


async def sign_with_another_key(cloud: SealedCloud) -> None:
    """An issuer that shows one user keys of their own."""
    own = issuer_app(Issuer(KeyShelf(cloud.directory / "own", budget=1), cloud.quota, lambda: cloud.credentials,
                            cloud.issuer._limits, now=cloud.now), ISSUER, cloud.issuer_key, cloud.now)  # fmt: skip
    honest = cloud.network.hosts[httpx.URL(ISSUER).host]
    other = httpx.ASGITransport(own)

    class Choosing(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return await (other if is_victim() else honest).handle_async_request(request)

    cloud.network.hosts[httpx.URL(ISSUER).host] = Choosing()  # type: ignore[assignment]


async def withhold_evidence(cloud: SealedCloud) -> None:
    """A relay that keeps one node's evidence from one user, so that it is left out."""
    digest = entries(cloud)["a"].evidence_sha256
    relay = cloud.network.hosts["relay.test"]

    class Keeping(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if is_victim() and digest in str(request.url):
                return httpx.Response(404)
            return await relay.handle_async_request(request)

    cloud.network.hosts["relay.test"] = Keeping()  # type: ignore[assignment]


def _serve_epochs(cloud: SealedCloud, epochs: ToVictim) -> None:
    cloud.epochs = epochs  # type: ignore[assignment]
    cloud.make_gateway()


@dataclass(frozen=True)
class Operator:
    """A kind of operator, and the kind of charge by which it has to be named."""

    kind: str
    make_book: Callable[[SealedCloud, Upstream], NodeBook] | None = None
    act: Callable[[SealedCloud], Awaitable[None]] | None = None


OPERATORS = {
    "delivers one user's requests to the captured node": Operator("loss", steering(Attack.STEER, lambda u: u == VICTIM)),
    "withholds one user's requests from the other nodes": Operator("loss", steering(Attack.DROP, lambda u: u == VICTIM)),
    "withholds everybody's requests from the other nodes": Operator("loss", steering(Attack.DROP, lambda u: True)),
    "tells the other nodes that less was paid for": Operator("loss", pay_less),
    "lets one user wait": Operator("timing", lambda cloud, upstream: Slow([], upstream, cloud.now)),
    "leaves nodes out": Operator("membership", act=leave_out),
    "adds a node": Operator("membership", act=add_stranger),
    "raises a capacity": Operator("capacity", act=raise_capacity),
    "puts a node of its own in a member's place": Operator("membership", act=stand_in),
    "hands out two epochs": Operator("partition", act=hand_out_two_epochs),
    "makes epochs in short succession": Operator("pace", act=hurry),
    "shows one user an old log": Operator("partition", act=show_other_tree),
    "signs one user's tokens with another key": Operator("issuer", act=sign_with_another_key),
    "keeps evidence from one user": Operator("evidence", act=withhold_evidence),
}
