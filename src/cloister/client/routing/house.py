"""A private cloud in one process, for trials of its routing: the programs' own applications, wired without sockets.

Relay, gateway, issuer, nodes, log and witnesses are what `cloister relay` and its neighbours run. Only the server inside a node
is another one: it counts marked requests, since who opened what is all that a trial of routing asks.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.client.routing.records import Spell
from cloister.privacy.attestation.evidence import Statement
from cloister.privacy.attestation.software import SoftwareAttester
from cloister.privacy.credentials import Credentials
from cloister.privacy.sealing import KeyRing, Receiver, ReplayCache
from cloister.privacy.tokens import (
    AcceptedKey,
    Issuer,
    IssuerLimits,
    KeyShelf,
    QuotaBook,
    Redeemer,
    challenge_between,
    open_spend_store,
)
from cloister.privacy.transparency.epoch import GatewayEntry, IssuerEntry
from cloister.privacy.transparency.issuer_keys import IssuerIdentity
from cloister.privacy.transparency.log import Log
from cloister.privacy.transparency.membership import NOTICE_S, build_membership, membership_entry, sign_member
from cloister.privacy.transparency.note import Kind, PrivateKey
from cloister.privacy.transparency.publisher import Contents, Publisher
from cloister.privacy.transparency.release import Release, release_entry
from cloister.privacy.transparency.trust import Trust
from cloister.privacy.transparency.witness import NearWitness, Witness
from cloister.sealed.dates import REPLAY_WINDOW_S
from cloister.sealed.gateway import GatewayConfig, gateway_app
from cloister.sealed.issuer import issuer_app
from cloister.sealed.issuer_file import sign_keys
from cloister.sealed.node import NodeConfig, node_app
from cloister.sealed.nodes import NodeBook
from cloister.sealed.relay import RelayConfig, relay_app
from cloister.sealed.serving import Lifespan
from cloister.sealed.unsealing import LocalUnsealer
from cloister.sealed.upstream import Upstream

EPOCH_S = 300
RELAY, GATEWAY, ISSUER = "http://relay.test", "http://gateway.test", "https://issuer.test"
PROFILE = "team"
"""Its answers have no shape, so that a trial measures routing and not the clock."""

asking: ContextVar[str] = ContextVar("asking")
"""Who asks. Honest programs never look; a gateway that colludes with the relay would know."""

MakeBook = Callable[["House", Upstream], NodeBook]


class Ways(httpx.AsyncBaseTransport):
    """Carries requests to applications by host; one that is not there refuses connections."""

    def __init__(self) -> None:
        self._ways: dict[str, httpx.ASGITransport] = {}

    def open(self, url: str, app: ASGIApp) -> None:
        """Makes an application reachable."""
        self._ways[httpx.URL(url).host] = httpx.ASGITransport(app, raise_app_exceptions=False)

    def close_way(self, url: str) -> None:
        """Makes a host unreachable."""
        self._ways.pop(httpx.URL(url).host, None)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        way = self._ways.get(request.url.host)
        if way is None:
            raise httpx.ConnectError("nobody listens there", request=request)
        return await way.handle_async_request(request)


class NearUpstream(Upstream):
    """A program's way to the next one, without sockets."""

    def __init__(self, name: str, ways: Ways) -> None:
        super().__init__(name)
        self._transport = ways  # type: ignore[assignment]


class Node:
    """One node: its keys for one epoch, and whose requests it opened.

    Attributes:
        opened: mark of a request to how often it was opened.
        strays: requests that came and did not open.
    """

    def __init__(self, key: PrivateKey, capacity: int, now: Callable[[], float]) -> None:
        self.name, self.capacity, self.url = key.name, capacity, f"http://node-{key.name}.test"
        self._key = key
        self.ring = KeyRing(now())
        self.opened: Counter[str] = Counter()
        self.strays = 0
        self._evidence: bytes | None = None
        unsealer = LocalUnsealer(Receiver(self.ring, ReplayCache(REPLAY_WINDOW_S)), now)
        config = NodeConfig(evidence=lambda: self._evidence, profile=PROFILE)
        self._app = node_app(self._count, config, unsealer, Lifespan(None), now)

    @property
    def node_id(self) -> str:
        """Its name in the epoch."""
        return self._statement.node_id

    def attest(self, release: Release, checkpoint: str, now: float) -> None:
        """Makes its evidence for an epoch."""
        self._statement = Statement(
            release=release.digest,
            model=release.model,
            profile=release.profile,
            profile_digest=release.profile_digest,
            configuration=release.configuration,
            hardening={},
            keys=self.ring.publish(),
            capacity=self.capacity,
            not_before=int(now),
            not_after=int(now) + EPOCH_S,
            checkpoint=checkpoint,
            receipt_key=self.ring.publish_receipt_key(),
        )
        self._evidence = sign_member(self._key, SoftwareAttester().attest(self._statement.encode())).encode()

    @property
    def evidence(self) -> bytes:
        """Its evidence document."""
        assert self._evidence is not None, "it was attested"
        return self._evidence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The node as it is reached; counts what it refuses."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def watch(message: dict[str, object]) -> None:
            if message.get("status") == 400 and scope["method"] == "POST":
                self.strays += 1
            await send(message)

        await self._app(scope, receive, watch)  # type: ignore[arg-type]

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            self.opened[msgspec.json.decode(await Request(scope, receive).body())["mark"]] += 1
        await JSONResponse({"ok": True})(scope, receive, send)


class _Epochs:
    """Where the gateway takes the epoch file from."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.bundle: bytes | None = None

    async def read(self) -> bytes | None:
        return self.bundle


class House:
    """All of it.

    Args:
        directory: an empty one, for log, keys and stores.
        make_book: makes the gateway's book of nodes; an adversary's is another one (`adversary`).

    Attributes:
        time: the one clock, Unix seconds.
        nodes: those that are there now, by name.
        issuers: what the next epoch says of the issuer's keys.
        members: capacity of those that the membership names.
    """

    def __init__(self, directory: Path, make_book: MakeBook | None = None, *, time: float = 2_000_000_000.0) -> None:
        self.time = time
        self.nodes: dict[str, Node] = {}
        self.names: dict[str, str] = {}
        self.members: dict[str, int] = {}
        self._member_keys: dict[str, PrivateKey] = {}
        self._memberships = 0
        self._every: list[Node] = []
        self._directory = directory
        self._ways = Ways()
        self._upstream = NearUpstream("node", self._ways)
        self._book = (make_book or _honest_book)(self, self._upstream)
        self._make_log()
        self._make_issuer()
        self._make_gateway()

    def now(self) -> float:
        """Unix seconds."""
        return self.time

    def carrier(self) -> httpx.AsyncBaseTransport:
        """What a client speaks HTTP over."""
        return self._ways

    def opened(self) -> dict[str, list[str]]:
        """Returns for each mark the nodes that opened it, by their own account."""
        by_mark: dict[str, list[str]] = {}
        for node in self._every:
            for mark, times in node.opened.items():
                by_mark.setdefault(mark, []).extend([node.name] * times)
        return by_mark

    @property
    def strays(self) -> int:
        """Requests that came to a node which could not open them."""
        return sum(node.strays for node in self._every)

    async def enter(self, spell: Spell, *, signed: bool = True) -> None:
        """Begins a spell: nodes with new keys, and an epoch that names them; those that are down stop answering.

        Args:
            signed: whether a membership that says the same is logged first, and holds; else the gateway does it alone.
        """
        if signed and dict(spell.capacities) != self.members:
            await self.change_members(dict(spell.capacities))
        self.time += EPOCH_S
        for node in self.nodes.values():
            self._ways.close_way(node.url)
        self.nodes = {name: Node(self._member_key(name), c, self.now) for name, c in spell.capacities.items()}
        self._every += self.nodes.values()
        await self._cosign()
        for node in self.nodes.values():
            node.attest(self._release, str(self._log.checkpoint()[1]), self.time)
            self._ways.open(node.url, node)
            self.names[node.node_id] = node.name
        self._book.change_urls([node.url for node in self.nodes.values()])
        await self._book.look()
        await self._publish()
        for name in spell.down:
            self._ways.close_way(self.nodes[name].url)

    def honest_keys(self) -> tuple[IssuerEntry, ...]:
        """Returns what the issuer states of its keys now."""
        return sign_keys(self._issuer.current_keys(), ISSUER, self._issuer_key)

    async def change_members(self, capacities: dict[str, int], notice_s: int = NOTICE_S) -> None:
        """Logs a membership and waits until it holds; the first one holds at once."""
        is_first = not self._memberships
        self._memberships += 1
        begins = int(self.time) + (0 if is_first else notice_s)
        keys = {self._member_key(name).public: capacity for name, capacity in capacities.items()}
        membership = build_membership(self._memberships, self._log.key.name, begins, keys)
        self._log.append([membership_entry(membership, [self._release_key])])
        self.members = capacities
        if not is_first:
            self._epochs.bundle = (await self._publisher.publish(self._contents, self.time, EPOCH_S)).bundle
            self.time = begins

    def close(self) -> None:
        """Lets go of files."""
        self._quota.close()
        self._store.close()

    def _make_log(self) -> None:
        log_key, self._release_key = (PrivateKey.generate(f"{name}.test", Kind.NOTE) for name in ("log", "release"))
        keys = [PrivateKey.generate(f"witness{number}.test", Kind.COSIGNATURE) for number in range(2)]
        self._log = Log.create(self._directory / "log", log_key)
        self._epochs = _Epochs(self._log.directory)
        witnesses = [Witness(self._directory / f"witness{n}", key, [self._log.key]) for n, key in enumerate(keys)]
        releases = (self._release_key.public,)
        self._issuer_key = PrivateKey.generate("issuer.test", Kind.NOTE)
        issuer = IssuerIdentity(ISSUER, self._issuer_key.public)
        self.trust = Trust(self._log.key, tuple(w.key for w in witnesses), releases, issuer, profiles=frozenset({PROFILE}))
        self._cosigners = [NearWitness(witness, self.now) for witness in witnesses]
        self._publisher = Publisher(self._log, self.trust, self._cosigners)
        digests = dict.fromkeys(("wheel", "lock", "interpreter", "files", "model", "profile_digest"), "00" * 32)
        settings = {"setting quant": '"none"'}
        self._release = Release(number=1, version="0", profile=PROFILE, configuration=settings, **digests)  # type: ignore[arg-type]
        self._log.append([release_entry(self._release, source={}, builder="urn:cloister:trial", keys=[self._release_key])])

    def _make_issuer(self) -> None:
        self.credentials = Credentials.empty()
        self._quota = QuotaBook(self._directory / "quota.db")
        shelf = KeyShelf(self._directory / "keys", budget=1)
        self._issuer = Issuer(shelf, self._quota, lambda: self.credentials, IssuerLimits(1_000_000), now=self.now)
        self._ways.open(ISSUER, issuer_app(self._issuer, ISSUER, self._issuer_key, self.now))

    def _make_gateway(self) -> None:
        secret = secrets.token_urlsafe()
        self._store = open_spend_store(f"sqlite:///{self._directory}/spent.db")
        challenge = challenge_between(ISSUER, GATEWAY)
        keys = self._issuer.current_keys()
        self.issuers = self.honest_keys()
        accepted = [AcceptedKey(key.encoded, challenge, key.taken_until, key.budget) for key in keys]
        self._ring = KeyRing(self.time, life_s=7 * 86400.0)
        unsealer = LocalUnsealer(Receiver(self._ring, ReplayCache(REPLAY_WINDOW_S)), self.now)
        config = GatewayConfig(GATEWAY, (secret,))
        tokens = Redeemer(accepted, self._store, self.now)
        gateway = gateway_app(config, unsealer, tokens, self._book, self._upstream, Lifespan(None), self._epochs, self.now)
        self._ways.open(GATEWAY, gateway)
        to_gateway, to_issuer = NearUpstream("gateway", self._ways), NearUpstream("issuer", self._ways)
        self._ways.open(RELAY, relay_app(RelayConfig(GATEWAY, secret, issuer_url=ISSUER), to_gateway, to_issuer))

    async def _cosign(self) -> None:
        """Has witnesses cosign the log as it is, which is the nonce of the evidence to come."""
        _, note = self._log.checkpoint()
        for witness in self._cosigners:
            note = note.add(*await witness.cosign(self._log, note))
        self._log.cosigned(note)

    def _member_key(self, name: str) -> PrivateKey:
        return self._member_keys.setdefault(name, PrivateKey.generate(name, Kind.NOTE))

    async def _publish(self) -> None:
        self._contents = Contents(
            gateway=GatewayEntry(GATEWAY, self._ring.publish()),
            issuers=self.issuers,
            evidence=tuple(node.evidence for node in self.nodes.values()),
            release=self._release.digest,
            profile=PROFILE,
        )
        self._epochs.bundle = (await self._publisher.publish(self._contents, self.time, EPOCH_S)).bundle


def _honest_book(house: House, upstream: Upstream) -> NodeBook:
    return NodeBook([], upstream, house.now)
