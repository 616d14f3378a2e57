"""A sealed cloud and its client in one process, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from cloister.client import AsyncSealedTransport, Session
from cloister.client.routing_audit.cloud import RELAY, CloudConfig, SealedCloud
from cloister.client.routing_audit.records import Spell
from cloister.trust.attestation import AttestationPolicy
from tests.rsa_keys import shared_keys

NODES = Spell({"a": 1, "b": 1})
PURCHASE = f"POST {RELAY}/issuer"
Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Wire(httpx.AsyncBaseTransport):
    """The client's network, which records what it is asked and may answer something else."""

    def __init__(self, cloud: SealedCloud) -> None:
        self.inner = cloud.carrier()
        self.asked: list[str] = []
        self.tamper: Callable[[httpx.Request, Handler], Awaitable[httpx.Response]] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url}")
        if self.tamper is not None:
            return await self.tamper(request, self.inner.handle_async_request)
        return await self.inner.handle_async_request(request)

    @property
    def sent(self) -> int:
        """Sealed requests that left the client."""
        return self.asked.count(f"POST {RELAY}/")


class World:
    """A sealed cloud in this process, and what a client needs to reach it through a network that a test watches."""

    def __init__(self, directory: Path, config: CloudConfig | None = None) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.cloud = SealedCloud(directory, config=config or CloudConfig(make_key=shared_keys()))
        self.wire = Wire(self.cloud)
        self.cloud.credentials, self.api_key = self.cloud.credentials.add("ann")

    def session(self, **changes: object) -> Session:
        settings: dict[str, object] = {"trust": self.cloud.trust, "api_key": self.api_key, "now": self.cloud.now}
        settings["policy"], settings["remember"] = AttestationPolicy(accept_software=True), False
        return Session(RELAY, **{**settings, **changes})  # type: ignore[arg-type]

    def client(self, session: Session | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=AsyncSealedTransport(session or self.session(), self.wire), base_url="http://cloister"
        )


async def ask(client: httpx.AsyncClient, mark: str = "m", **given: object) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"mark": mark}, **given)  # type: ignore[arg-type]


def ask_once(world: World, session: Session | None = None) -> httpx.Response:
    return asyncio.run(ask(world.client(session)))
