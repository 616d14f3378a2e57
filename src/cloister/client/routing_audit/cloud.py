"""A sealed cloud in one process: issuer, relay, gateway, nodes, log and witnesses, each the application of the real program.

A `Network` joins them. The one here calls applications without sockets, for trials of routing; tests use loopback sockets.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from time import time as wall_clock
from typing import Any, Protocol

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.client.routing_audit.records import Spell
from cloister.policy.credentials import Credentials
from cloister.private.gateway import GatewayConfig, gateway_app
from cloister.private.http_io import REPLAY_WINDOW_S
from cloister.private.issuer import issuer_app, sign_keys
from cloister.private.node import NodeConfig, node_app
from cloister.private.nodes import NodeBook
from cloister.private.relay import RelayConfig, relay_app
from cloister.private.serving import Lifespan
from cloister.private.unsealing import LocalUnsealer
from cloister.private.upstream import ANSWER_TIMEOUT_S, Upstream
from cloister.trust.attestation.evidence import Statement
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.sealing import KeyRing, Receiver, ReplayCache
from cloister.trust.shape import TrafficShape
from cloister.trust.tokens import (
    AcceptedKey,
    Issuer,
    IssuerLimits,
    KeyShelf,
    QuotaBook,
    Redeemer,
    challenge_between,
    open_spend_store,
)
from cloister.trust.tokens.blind_rsa import RsaPrivateKey, generate
from cloister.trust.transparency.epoch import GatewayEntry, IssuerEntry
from cloister.trust.transparency.issuer_keys import IssuerIdentity
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.membership import NOTICE_S, build_membership, membership_entry, sign_member
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.trust.transparency.publisher import Contents, Publisher
from cloister.trust.transparency.release import Release, release_entry
from cloister.trust.transparency.trust import Trust
from cloister.trust.transparency.witness import NearWitness, Witness

EPOCH_S = 300
RELAY, GATEWAY, ISSUER = "http://relay.test", "http://gateway.test", "https://issuer.test"

current_user: ContextVar[str] = ContextVar("current_user")
"""The sender of the request. Honest programs ignore it; a gateway that colludes with the relay would know it."""

MakeBook = Callable[["SealedCloud", Upstream], NodeBook]


class Network(Protocol):
    """Connects programs with each other and with clients."""

    def open(self, url: str, app: ASGIApp) -> str:
        """Makes an application reachable, replacing one with the same URL, and returns its address."""
        ...

    def shut(self, url: str) -> None:
        """Makes an application unreachable; unknown ones are ignored."""
        ...

    def make_upstream(self, name: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Upstream:
        """Returns a program's connection to the next one."""
        ...

    def carrier(self) -> httpx.AsyncBaseTransport:
        """Returns a client's HTTP transport."""
        ...


class DirectNetwork(httpx.AsyncBaseTransport):
    """Calls applications by host, without sockets; unknown hosts refuse connections."""

    def __init__(self) -> None:
        self.hosts: dict[str, httpx.AsyncBaseTransport] = {}

    def open(self, url: str, app: ASGIApp) -> str:
        self.hosts[httpx.URL(url).host] = httpx.ASGITransport(app, raise_app_exceptions=False)
        return url

    def shut(self, url: str) -> None:
        self.hosts.pop(httpx.URL(url).host, None)

    def make_upstream(self, name: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Upstream:
        return Upstream(name, timeout_s=timeout_s, transport=self)

    def carrier(self) -> httpx.AsyncBaseTransport:
        return self

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = self.hosts.get(request.url.host)
        if host is None:
            raise httpx.ConnectError("nobody listens there", request=request)
        return await host.handle_async_request(request)


@dataclass(frozen=True)
class CloudConfig:
    """Settings of a cloud's programs.

    Attributes:
        profile: profile of the nodes. Answers under `team` have no traffic shape, so that a trial measures routing, not the
            cadence.
        shape: traffic shape of the nodes' answers; None for none.
        hardening: hardening measures that the nodes report.
        inner: the server inside every node; None counts marked requests (`Node.opened`).
        gateway_url, issuer_url: their public URLs, to which tokens and epochs are bound.
        budget: output tokens that one blind token pays for.
        tokens_per_epoch: number of tokens that the issuer sells to one key.
        epoch_s: validity of an epoch and its evidence.
        answer_timeout_s: the gateway's read timeout for nodes.
        issuer_timeout_s: the relay's read timeout for the issuer.
        gateway: further fields of `GatewayConfig`.
        make_key: generates the issuer's RSA keys.
        relay_secret: authenticates the relay to the gateway.
        node_secret: authenticates the gateway to a node.
    """

    profile: str = "team"
    shape: TrafficShape | None = None
    hardening: Mapping[str, str] = field(default_factory=dict)
    inner: ASGIApp | None = None
    gateway_url: str = GATEWAY
    issuer_url: str = ISSUER
    budget: int = 1
    tokens_per_epoch: int = 1_000_000
    epoch_s: int = EPOCH_S
    answer_timeout_s: float = ANSWER_TIMEOUT_S
    issuer_timeout_s: float = ANSWER_TIMEOUT_S
    gateway: Mapping[str, Any] = field(default_factory=dict)
    make_key: Callable[[int], RsaPrivateKey] = generate
    relay_secret: str = field(default_factory=secrets.token_urlsafe, repr=False)
    node_secret: str = field(default_factory=secrets.token_urlsafe, repr=False)


class Node:
    """One node: its keys for one epoch, and the requests that it opened.

    Attributes:
        opened: mark of a request -> how often it was opened.
        strays: number of requests that did not open.
    """

    def __init__(
        self,
        key: PrivateKey,
        capacity: int,
        now: Callable[[], float],
        config: CloudConfig | None = None,
    ) -> None:
        config = config or CloudConfig()
        self.name, self.capacity, self.url = key.name, capacity, f"http://node-{key.name}.test"
        self._key, self._life_s, self._hardening = key, config.epoch_s, config.hardening
        self.ring = KeyRing(now())
        self.opened: Counter[str] = Counter()
        self.strays = 0
        self._evidence: bytes | None = None
        unsealer = LocalUnsealer(Receiver(self.ring, ReplayCache(REPLAY_WINDOW_S)), now)
        told = NodeConfig(config.shape, config.node_secret, lambda: self._evidence, config.profile)
        self._app = node_app(config.inner or self._count, told, unsealer, Lifespan(None), now)

    @property
    def node_id(self) -> str:
        """Its name in the epoch."""
        return self._statement.node_id

    def attest(self, release: Release, checkpoint: str, now: float) -> None:
        """Creates its evidence for an epoch."""
        self._statement = Statement(
            release=release.digest,
            model=release.model,
            profile=release.profile,
            profile_digest=release.profile_digest,
            configuration=release.configuration,
            hardening=dict(self._hardening),
            keys=self.ring.publish(),
            capacity=self.capacity,
            not_before=int(now),
            not_after=int(now) + self._life_s,
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
        """The node's application; counts refused requests."""
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
    """The gateway's source of the epoch file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.bundle: bytes | None = None

    async def read(self) -> bytes | None:
        return self.bundle


class SealedCloud:
    """Everything that answers sealed requests, wired and running.

    Args:
        directory: an empty one, for log, keys and stores.
        make_book: creates the gateway's node book, or an adversary's (`adversary`).
        network: connects the programs; None calls them directly.
        time: start of a manual clock, which only `enter` advances; None uses the machine's clock.

    Attributes:
        time: current time of the clock, Unix seconds.
        nodes: current nodes by name.
        issuers: the issuer's keys for the next epoch.
        members: capacities of the members.
        relay_url, gateway_url, issuer_url: addresses.
    """

    def __init__(
        self,
        directory: Path,
        make_book: MakeBook | None = None,
        *,
        config: CloudConfig | None = None,
        network: Network | None = None,
        time: float | None = 2_000_000_000.0,
    ) -> None:
        self.time = time or 0.0
        self._is_live = time is None
        self.config = config = config or CloudConfig()
        self.nodes: dict[str, Node] = {}
        self.names: dict[str, str] = {}
        self.members: dict[str, int] = {}
        self._member_keys: dict[str, PrivateKey] = {}
        self._memberships = 0
        self._every: list[Node] = []
        self.directory = directory
        self.network = network if network is not None else DirectNetwork()
        self._upstream = self.network.make_upstream("node", config.answer_timeout_s)
        self.book = (make_book or _honest_book)(self, self._upstream)
        self._make_log()
        self._make_issuer()
        self.make_gateway()

    def now(self) -> float:
        """Unix seconds."""
        return wall_clock() if self._is_live else self.time

    def carrier(self) -> httpx.AsyncBaseTransport:
        """Returns a client's HTTP transport."""
        return self.network.carrier()

    def opened(self) -> dict[str, list[str]]:
        """Returns for each mark the nodes that report having opened it."""
        by_mark: dict[str, list[str]] = {}
        for node in self._every:
            for mark, times in node.opened.items():
                by_mark.setdefault(mark, []).extend([node.name] * times)
        return by_mark

    @property
    def strays(self) -> int:
        """Number of requests that reached a node which could not open them."""
        return sum(node.strays for node in self._every)

    async def enter(self, spell: Spell, *, signed: bool = True) -> None:
        """Begins a spell: gives nodes new keys, and publishes an epoch with them; those that are down stop answering.

        Args:
            signed: whether to log an equal membership first and wait until it is valid; otherwise only the gateway's epoch
                changes.
        """
        if signed and dict(spell.capacities) != self.members:
            await self.change_members(dict(spell.capacities))
        self.time += self.config.epoch_s
        for node in self.nodes.values():
            self.network.shut(node.url)
        self.nodes = {name: Node(self._member_key(name), c, self.now, self.config) for name, c in spell.capacities.items()}
        self._every += self.nodes.values()
        await self._cosign()
        for node in self.nodes.values():
            node.attest(self.release, str(self.log.checkpoint()[1]), self.now())
            node.url = self.network.open(node.url, node)
            self.names[node.node_id] = node.name
        self.book.change_urls([node.url for node in self.nodes.values()])
        await self.book.look()
        await self._publish()
        for name in spell.down:
            self.network.shut(self.nodes[name].url)

    def honest_keys(self) -> tuple[IssuerEntry, ...]:
        """Returns the issuer's current key entries."""
        return sign_keys(self.issuer.current_keys(), self.config.issuer_url, self.issuer_key)

    async def change_members(self, capacities: dict[str, int]) -> None:
        """Logs a membership and waits until it is valid; the first one is valid immediately."""
        is_first = not self._memberships
        self._memberships += 1
        begins = int(self.now()) + (0 if is_first else NOTICE_S)
        keys = {self._member_key(name).public: capacity for name, capacity in capacities.items()}
        membership = build_membership(self._memberships, self.log.key.name, begins, keys)
        self.log.append([membership_entry(membership, [self._release_key])])
        self.members = capacities
        if not is_first:
            self.epochs.bundle = (await self.publisher.publish(self._contents, self.now(), self.config.epoch_s)).bundle
            self.time = begins

    def close(self) -> None:
        """Closes files."""
        self.quota.close()
        self._store.close()

    def _make_log(self) -> None:
        profile = self.config.profile
        log_key, self._release_key = (PrivateKey.generate(f"{name}.test", Kind.NOTE) for name in ("log", "release"))
        keys = [PrivateKey.generate(f"witness{number}.test", Kind.COSIGNATURE) for number in range(2)]
        self.log = Log.create(self.directory / "log", log_key)
        self.epochs = _Epochs(self.log.directory)
        witnesses = [Witness(self.directory / f"witness{n}", key, [self.log.key]) for n, key in enumerate(keys)]
        releases = (self._release_key.public,)
        self.issuer_key = PrivateKey.generate("issuer.test", Kind.NOTE)
        issuer = IssuerIdentity(self.config.issuer_url, self.issuer_key.public)
        self.trust = Trust(self.log.key, tuple(w.key for w in witnesses), releases, issuer, profiles=frozenset({profile}))
        self.cosigners = [NearWitness(witness, self.now) for witness in witnesses]
        self.publisher = Publisher(self.log, self.trust, self.cosigners)
        digests = dict.fromkeys(("wheel", "lock", "interpreter", "files", "model", "profile_digest"), "00" * 32)
        settings = {"setting quant": '"none"'}
        self.release = Release(number=1, version="0", profile=profile, configuration=settings, **digests)  # type: ignore[arg-type]
        self.log.append([release_entry(self.release, source={}, builder="urn:cloister:trial", keys=[self._release_key])])

    def _make_issuer(self) -> None:
        self.credentials = Credentials.empty()
        self.quota = QuotaBook(self.directory / "quota.db")
        shelf = KeyShelf(self.directory / "keys", budget=self.config.budget, make_key=self.config.make_key)
        limits = IssuerLimits(self.config.tokens_per_epoch)
        self.issuer = Issuer(shelf, self.quota, lambda: self.credentials, limits, now=self.now)
        self.issuers = self.honest_keys()
        self.start_issuer()

    def start_issuer(self) -> None:
        """Starts the issuer's program, with new sealing keys."""
        self.issuer_url = self.network.open(ISSUER, issuer_app(self.issuer, self.config.issuer_url, self.issuer_key, self.now))

    def make_gateway(self) -> None:
        """Starts gateway and relay."""
        self._store = open_spend_store(f"sqlite:///{self.directory}/spent.db")
        self.challenge = challenge_between(self.config.issuer_url, self.config.gateway_url)
        keys = self.issuer.current_keys()
        accepted = [AcceptedKey(key.encoded, self.challenge, key.taken_until, key.budget) for key in keys]
        self.gateway_ring = KeyRing(self.now(), life_s=7 * 86400.0)
        self.gateway_receiver = Receiver(self.gateway_ring, ReplayCache(REPLAY_WINDOW_S))
        unsealer = LocalUnsealer(self.gateway_receiver, self.now)
        config = GatewayConfig(
            self.config.gateway_url, (self.config.relay_secret,), self.config.node_secret, **self.config.gateway
        )
        tokens = Redeemer(accepted, self._store, self.now)
        gateway = gateway_app(config, unsealer, tokens, self.book, self._upstream, Lifespan(None), self.epochs, self.now)
        self.gateway_url = self.network.open(GATEWAY, gateway)
        to_gateway = self.network.make_upstream("gateway")
        to_issuer = self.network.make_upstream("issuer", self.config.issuer_timeout_s)
        relay = RelayConfig(self.gateway_url, self.config.relay_secret, issuer_url=self.issuer_url)
        self.relay_url = self.network.open(RELAY, relay_app(relay, to_gateway, to_issuer))

    async def _cosign(self) -> None:
        """Has witnesses cosign the current log; this checkpoint is the nonce of the next evidence."""
        _, note = self.log.checkpoint()
        for witness in self.cosigners:
            note = note.add(*await witness.cosign(self.log, note))
        self.log.cosigned(note)

    def _member_key(self, name: str) -> PrivateKey:
        return self._member_keys.setdefault(name, PrivateKey.generate(name, Kind.NOTE))

    async def _publish(self) -> None:
        self._contents = Contents(
            gateway=GatewayEntry(self.config.gateway_url, self.gateway_ring.publish()),
            issuers=self.issuers,
            evidence=tuple(node.evidence for node in self.nodes.values()),
            release=self.release.digest,
            profile=self.config.profile,
        )
        self.epochs.bundle = (await self.publisher.publish(self._contents, self.now(), self.config.epoch_s)).bundle


def _honest_book(cloud: SealedCloud, upstream: Upstream) -> NodeBook:
    return NodeBook([], upstream, cloud.now)
