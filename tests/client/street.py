"""A private cloud at loopback sockets: relay, gateway, issuer, log, witnesses, and nodes in front of the embedded model."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.app import build_gate, resolve_settings
from cloister.app.site import open_plain
from cloister.client import Session
from cloister.privacy.attestation import AttestationPolicy
from cloister.privacy.attestation.evidence import Statement
from cloister.privacy.attestation.software import SoftwareAttester
from cloister.privacy.credentials import Credentials
from cloister.privacy.sealing import KeyRing, Receiver, ReplayCache
from cloister.privacy.shape import shape_of
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
from cloister.privacy.transparency.issuer_keys import IssuerIdentity
from cloister.privacy.transparency.log import Log
from cloister.privacy.transparency.membership import build_membership, membership_entry, sign_member
from cloister.privacy.transparency.note import Kind, PrivateKey
from cloister.privacy.transparency.publisher import Publisher
from cloister.privacy.transparency.release import Release, release_entry
from cloister.privacy.transparency.trust import Trust
from cloister.privacy.transparency.witness import NearWitness, Witness
from cloister.sealed.dates import REPLAY_WINDOW_S
from cloister.sealed.epochs import EpochKeeper, EpochSettings
from cloister.sealed.gateway import GatewayConfig, gateway_app
from cloister.sealed.issuer import issuer_app
from cloister.sealed.issuer_file import sign_keys
from cloister.sealed.node import NodeConfig, node_app
from cloister.sealed.nodes import NodeBook
from cloister.sealed.relay import RelayConfig, relay_app
from cloister.sealed.serving import Lifespan
from cloister.sealed.unsealing import LocalUnsealer
from cloister.sealed.upstream import Upstream
from cloister.server.connection import Connection
from cloister.server.serve import Site, address_of, bind

T = TypeVar("T")
PROFILE = "private"
SECRET = "relay-" + "0" * 40


class Loop:
    """One event loop in a thread, which programs and engine share."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@dataclass
class Program:
    """An application at a socket."""

    url: str
    server: uvicorn.Server
    task: asyncio.Task[None]

    async def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        await self.task


async def start(app: ASGIApp) -> Program:
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, http=Connection, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    return Program(address_of(listener), server, task)


def _late(made: list[ASGIApp]) -> ASGIApp:
    """An application that is made when the address is known at which it will be."""

    async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
        await made[0](scope, receive, send)

    return pass_on


@dataclass
class Node:
    """A node, and how many requests it opened."""

    name: str
    program: Program
    ring: KeyRing
    opened: list[str]
    evidence: Callable[[], bytes | None]

    @property
    def node_id(self) -> str:
        return hashlib.sha256(self.ring.publish()).hexdigest()


@dataclass
class Street:
    """All of it.

    Attributes:
        running: requests that the server inside the nodes works on.
    """

    directory: Path
    site: Site
    loop: Loop
    programs: list[Program] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    running: int = 0

    async def open(self, num_nodes: int) -> None:
        self._member_keys = [PrivateKey.generate(f"node{number}.test", Kind.NOTE) for number in range(num_nodes)]
        self._make_log()
        credentials, self.api_key = Credentials.empty().add("ann")
        self._quota = QuotaBook(self.directory / "quota.db")
        self._store = open_spend_store(f"sqlite:///{self.directory}/spent.db")
        shelf = KeyShelf(self.directory / "keys", budget=512)
        issuer = Issuer(shelf, self._quota, lambda: credentials, IssuerLimits(1000), now=time.time)
        late: list[ASGIApp] = []
        self.issuer = await self._start(_late(late))
        self.issuer_key = PrivateKey.generate("issuer.test", Kind.NOTE)
        late.append(issuer_app(issuer, self.issuer.url, self.issuer_key))
        self.trust = replace(self.trust, issuer=IssuerIdentity(self.issuer.url, self.issuer_key.public))
        for number in range(num_nodes):
            self.nodes.append(await self._make_node(f"node {number}", self._member_keys[number]))
        await self._open_gateway(issuer, self.issuer.url)

    def session(self, **changes: object) -> Session:
        settings: dict[str, object] = {"trust": self.trust, "api_key": self.api_key}
        settings["policy"], settings["remember"] = AttestationPolicy(accept_software=True), False
        return Session(self.relay.url, **{**settings, **changes})  # type: ignore[arg-type]

    async def close(self) -> None:
        for program in reversed(self.programs):
            await program.stop()
        for upstream in self._upstreams:
            await upstream.close()
        self._quota.close()
        self._store.close()

    async def _start(self, app: ASGIApp) -> Program:
        self.programs.append(await start(app))
        return self.programs[-1]

    def _make_log(self) -> None:
        log_key, release_key = (PrivateKey.generate(f"{name}.test", Kind.NOTE) for name in ("log", "release"))
        self.log = Log.create(self.directory / "log", log_key)
        keys = [PrivateKey.generate(f"witness{number}.test", Kind.COSIGNATURE) for number in range(2)]
        witnesses = [Witness(self.directory / f"witness{n}", key, [self.log.key]) for n, key in enumerate(keys)]
        self.trust = Trust(self.log.key, tuple(w.key for w in witnesses), (release_key.public,))
        self.publisher = Publisher(self.log, self.trust, [NearWitness(witness) for witness in witnesses])
        digests = dict.fromkeys(("wheel", "lock", "interpreter", "files", "model", "profile_digest"), "00" * 32)
        self.release = Release(number=1, version="0.1.0", profile=PROFILE, configuration={"setting quant": '"none"'}, **digests)
        self.log.append([release_entry(self.release, source={}, builder="urn:test", keys=[release_key])])
        members = build_membership(1, "log.test", int(time.time()), {key.public: 1 for key in self._member_keys})
        self.log.append([membership_entry(members, [release_key])])
        self._cosigners = [NearWitness(witness) for witness in witnesses]

    async def _make_node(self, name: str, key: PrivateKey) -> Node:
        ring, opened = KeyRing(time.monotonic()), list[str]()
        unsealer = LocalUnsealer(Receiver(ring, ReplayCache(REPLAY_WINDOW_S)))

        async def count(*given: Any) -> None:
            opened.append(given[0]["path"])
            self.running += 1
            try:
                await self.site.app(*given)
            finally:
                self.running -= 1

        _, note = self.log.checkpoint()
        for witness in self._cosigners:
            note = note.add(*await witness.cosign(self.log, note))
        statement = Statement(
            release=self.release.digest,
            model=self.release.model,
            profile=PROFILE,
            profile_digest=self.release.profile_digest,
            configuration=self.release.configuration,
            hardening={"test.none": "applied: for a test"},
            keys=ring.publish(),
            capacity=1,
            not_before=int(time.time()),
            not_after=int(time.time()) + 3600,
            checkpoint=str(note),
            receipt_key=ring.publish_receipt_key(),
        )
        document = sign_member(key, SoftwareAttester().attest(statement.encode())).encode()
        config = NodeConfig(shape=shape_of(PROFILE), evidence=lambda: document)
        program = await self._start(node_app(count, config, unsealer, Lifespan(None)))
        return Node(name, program, ring, opened, lambda: document)

    async def _open_gateway(self, issuer: Issuer, issuer_url: str) -> None:
        late: list[ASGIApp] = []
        self.gateway = await self._start(_late(late))
        url, keys = self.gateway.url, issuer.current_keys()
        challenge = challenge_between(issuer_url, url)
        redeemer = Redeemer([AcceptedKey(k.encoded, challenge, k.taken_until, k.budget) for k in keys], self._store, time.time)
        unsealer = LocalUnsealer(Receiver(KeyRing(time.monotonic(), life_s=86400.0), ReplayCache(REPLAY_WINDOW_S)))
        upstream, to_gateway, to_issuer = Upstream("node"), Upstream("gateway"), Upstream("issuer")
        self._upstreams = [upstream, to_gateway, to_issuer]
        book = NodeBook([node.program.url for node in self.nodes], upstream)
        await book.look()
        issuers = sign_keys(keys, issuer_url, self.issuer_key)
        settings = EpochSettings(url, self.release.digest, PROFILE)
        self.keeper = EpochKeeper(settings, self.publisher, unsealer, book, lambda: issuers, self.log.directory)
        await self.keeper.renew()
        config = GatewayConfig(url, (SECRET,))
        late.append(gateway_app(config, unsealer, redeemer, book, upstream, Lifespan(upstream), self.keeper))
        config_of_relay = RelayConfig(url, SECRET, issuer_url=issuer_url)
        self.relay = await self._start(relay_app(config_of_relay, to_gateway, to_issuer))


@contextlib.asynccontextmanager
async def open_site() -> AsyncIterator[Site]:
    """The server with the embedded model, as `cloister serve` has it, without a socket of its own."""
    settings = resolve_settings({"max_num_seqs": 4, "max_model_len": 1024})
    site = await open_plain(settings, build_gate(settings), lambda line: None)
    try:
        yield site
    finally:
        await site.engine.drain(1.0)
        site.close()


@contextlib.contextmanager
def open_street(directory: Path, num_nodes: int = 2) -> Iterator[Street]:
    """Opens everything, in a thread of its own."""
    loop = Loop()
    stack = contextlib.AsyncExitStack()
    try:
        street = Street(directory, loop.run(stack.enter_async_context(open_site())), loop)
        loop.run(street.open(num_nodes))
        try:
            yield street
        finally:
            loop.run(street.close())
    finally:
        loop.run(stack.aclose())
        loop.close()
