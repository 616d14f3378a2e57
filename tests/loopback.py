"""Applications at loopback sockets, on one event loop in a thread, and a record of what each of them saw."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.private.upstream import ANSWER_TIMEOUT_S, Upstream, trust_only
from cloister.server.connection import Connection
from cloister.server.serve import address_of, bind

T = TypeVar("T")
STOP_TIMEOUT_S = 60.0


@dataclass
class Seen:
    """One request as a program saw it.

    Attributes:
        client: address and port of the one who connected.
        request, response: every byte of the bodies.
        pieces: the response's body as it was sent, with the time of each piece.
    """

    client: tuple[str, int]
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    request: bytes = b""
    status: int = 0
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False

    @property
    def response(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def everything(self) -> bytes:
        """All that went in or out, heads included."""
        lines = [name + b": " + value for name, value in (*self.headers, *self.response_headers)]
        return b"\n".join([repr(self.client).encode(), self.path.encode(), *lines, self.request, self.response])


class Recorder:
    """Writes down what an application is given and what it answers.

    Attributes:
        num_open: requests that are not answered yet.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.seen: list[Seen] = []
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = Seen(tuple(scope["client"]), scope["method"], scope["path"], list(scope["headers"]))
        self.seen.append(seen)

        async def record_receive() -> Message:
            message = await receive()
            seen.request += message.get("body", b"")
            return message

        async def record_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status, seen.response_headers = message["status"], list(message["headers"])
            else:
                seen.pieces.append((time.monotonic(), message.get("body", b"")))
                seen.is_whole = not message.get("more_body", False)
            await send(message)

        self.num_open += 1
        try:
            await self.app(scope, record_receive, record_send)
        finally:
            self.num_open -= 1

    def posts(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "POST"]


class Server(uvicorn.Server):
    """A server that ends as soon as it is told to, where uvicorn looks ten times a second and waits for its connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ending.wait()

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LoopbackNetwork:
    """Serves applications at free ports of this machine; `cloister.client.routing_audit.cloud.Network`.

    Args:
        certificates: (certificate, key) of those that are reached by TLS, by URL.

    Attributes:
        records: of what was opened, by URL and by address.
    """

    def __init__(self, certificates: Mapping[str, tuple[Path, Path]] | None = None) -> None:
        self._certificates = certificates or {}
        authorities = [str(certificate) for certificate, _ in self._certificates.values()]
        # with no certificate to check the system's are not read: that takes 30 ms for each upstream
        self._tls = trust_only(Path(authorities[0])) if authorities else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.records: dict[str, Recorder] = {}
        self._addresses: dict[str, str] = {}
        self._servers: dict[str, tuple[Server, Future[None]]] = {}
        self._upstreams: list[Upstream] = []

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 300.0) -> T:
        """Runs work on the loop that the servers run on, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def open(self, url: str, app: ASGIApp) -> str:
        if url in self._addresses:
            self.records[url].app = app
            return self._addresses[url]
        certificate, key = self._certificates.get(url, (None, None))
        record, listener = Recorder(app), bind("127.0.0.1", 0)
        server = Server(
            uvicorn.Config(
                record,
                http=Connection,
                log_config=None,
                lifespan="off",
                server_header=False,
                ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )
        address = address_of(listener, has_tls=certificate is not None)
        if certificate is not None:
            address = address.replace("127.0.0.1", "localhost")  # the name that certificates have
        serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), self._loop)
        self._addresses[url] = self._addresses[address] = address
        self.records[url] = self.records[address] = record
        self._servers[address] = (server, serving)
        return address

    def shut(self, url: str) -> None:
        address = self._addresses.get(url, url)
        self._addresses = {name: there for name, there in self._addresses.items() if there != address}
        if address not in self._servers:
            return
        server, serving = self._servers.pop(address)
        self._loop.call_soon_threadsafe(server.ending.set)
        if threading.current_thread() is not self._thread:
            serving.result(STOP_TIMEOUT_S)

    def make_upstream(self, name: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Upstream:
        self._upstreams.append(Upstream(name, tls=self._tls, timeout_s=timeout_s))
        return self._upstreams[-1]

    def carrier(self) -> httpx.AsyncBaseTransport:
        return httpx.AsyncHTTPTransport(verify=self._tls or True)

    def close(self) -> None:
        """Ends every server; each has to end in time."""
        for server, _ in self._servers.values():
            self._loop.call_soon_threadsafe(server.ending.set)
        for _, serving in self._servers.values():
            serving.result(STOP_TIMEOUT_S)
        for upstream in self._upstreams:
            self.run(upstream.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        self._loop.close()


@contextlib.contextmanager
def serve(app: ASGIApp) -> Iterator[str]:
    """Serves one application at a loopback socket, and yields its URL."""
    network = LoopbackNetwork()
    try:
        yield network.open("http://application.test", app)
    finally:
        network.close()
