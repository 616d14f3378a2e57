"""The whole path: issuer, relay, gateway and a sealed node as separate programs, and a client that seals twice and spends a
token for each request.

The trial builds the epoch itself: log, witnesses and evidence are tested elsewhere and involve no content.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import httpx

from cloister.client.envelope import seal_for_node, strip_request
from cloister.client.protocol import Ask, Reply
from cloister.client.residue_audit.node import KEYS_PATH, RunningProgram, SealedNode, open_answer
from cloister.client.token_purchase import LOW, Buyer, Wallet, signed_budget
from cloister.policy.credentials import Credentials
from cloister.policy.keyfile import write_credentials
from cloister.private.issuer import list_issuers, read_issuer_keys
from cloister.trust.residue.processes import Process
from cloister.trust.sealing import CHUNKED
from cloister.trust.tokens import Token, authorization
from cloister.trust.transparency.epoch import Epoch, GatewayEntry, NodeEntry
from cloister.trust.transparency.files import write_key
from cloister.trust.transparency.issuer_keys import IssuerIdentity
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.types.errors import EngineError

_AT: Final = re.compile(r" at (http\S+),")
_NOTHING: Final = "00" * 32


class Cloud(SealedNode):
    """A node behind a gateway behind a relay; tokens from an issuer.

    Args:
        num_tokens: number of tokens that requests will spend.
    """

    def __init__(self, profile: str, arguments: Sequence[str] = (), *, num_tokens: int = 2000) -> None:
        super().__init__(profile, arguments)
        self._profile = profile
        self._folder = tempfile.TemporaryDirectory(prefix="cloister-trial-")
        self._programs: list[tuple[str, RunningProgram]] = []
        try:
            self._open(Path(self._folder.name), num_tokens)
        except BaseException:
            self.stop()
            raise
        self.roots = (*self.roots, *(program.process.pid for _, program in self._programs))

    def client(self) -> httpx.AsyncClient:
        carrier = CloudTransport(self._relay, self._make_epoch, self._issuer, self._api_key)
        return httpx.AsyncClient(base_url="https://localhost", timeout=120.0, transport=carrier)

    def role(self, process: Process) -> str:
        names = {program.process.pid: name for name, program in self._programs}
        return names.get(process.pid) or super().role(process)

    def stop(self) -> None:
        for _, program in reversed(self._programs):
            program.stop()
        super().stop()
        self._folder.cleanup()

    def _open(self, folder: Path, num_tokens: int) -> None:
        credentials, self._api_key = Credentials.empty().add("trial")
        keys, relay_secret = folder / "api-keys.json", folder / "relay-secret"
        write_credentials(keys, credentials)
        relay_secret.write_text(secrets.token_hex(32) + "\n")
        relay_secret.chmod(0o600)
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        state = ["--url", url, "--state", str(folder / "issuer"), "--api-keys", str(keys)]
        identity = PrivateKey.generate("issuer.test", Kind.NOTE)
        write_key(folder / "issuer.key", identity)
        self._issuer = IssuerIdentity(url, identity.public)
        state += ["--key", str(folder / "issuer.key")]
        self._start("issuer", [*state, "--tokens-per-epoch", str(num_tokens), "--port", str(port)])
        shown = folder / "issuer-keys.json"
        command = [sys.executable, "-P", "-m", "cloister.cli", "issuer", *state, "--show-keys"]
        shown.write_bytes(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        self._issuers = list_issuers(read_issuer_keys(shown), time.time())
        gateway_port = _free_port()
        self._gateway = f"http://127.0.0.1:{gateway_port}"
        self._start(
            "gateway",
            [
                *("--url", self._gateway, "--node", self._program.address, "--relay-secrets", str(relay_secret)),
                *("--issuer-keys", str(shown), "--spend-store", f"sqlite:///{folder}/spent.db"),
                *("--profile", self._profile, "--port", str(gateway_port)),
            ],
        )
        relay = self._start(
            "relay", ["--gateway", self._gateway, "--secret-file", str(relay_secret), "--issuer", url, "--port", "0"]
        )
        self._relay = relay.address

    def _start(self, name: str, arguments: Sequence[str]) -> RunningProgram:
        program = RunningProgram.start([name, *arguments], _AT)
        self._programs.append((name, program))
        return program

    async def _make_epoch(self, transport: httpx.AsyncBaseTransport) -> Epoch:
        """Returns an epoch with the node's current key."""
        gateway_keys = await _fetch(transport, self._relay + KEYS_PATH)
        node_keys = await _fetch(transport, self._program.address + KEYS_PATH)
        node = NodeEntry(hashlib.sha256(node_keys).hexdigest(), 1, node_keys, _NOTHING)
        gateway, now = GatewayEntry(self._gateway, gateway_keys), int(time.time())
        return Epoch(1, now - 60, now + 1800, gateway, self._issuers, (node,), _NOTHING, self._profile, ())


class CloudTransport(httpx.AsyncBaseTransport):
    """Seals every request twice, spends a token for it, and sends it to the relay."""

    def __init__(
        self,
        relay: str,
        make_epoch: Callable[[httpx.AsyncBaseTransport], Awaitable[Epoch]],
        issuer: IssuerIdentity,
        api_key: str,
    ) -> None:
        self._relay = relay
        self._make_epoch = make_epoch
        self._issuer = issuer
        self._buyer = Buyer(issuer, f"{relay}/", api_key)
        self._wallet = Wallet()
        self._buying = asyncio.Lock()
        self._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=64))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        epoch = await self._make_epoch(self._transport)
        token = await self._take_token(epoch)
        fields = tuple((name.lower(), value) for name, value in request.headers.raw)
        plain = strip_request(request.method, request.url.raw_path, fields, await request.aread(), time.time())
        budget = signed_budget(epoch, self._issuer, token)
        envelope = seal_for_node(plain, epoch.nodes[0], epoch, authorization(token), time.time(), budget=budget)
        posted = httpx.Request(
            "POST", self._relay, content=envelope.sealed, headers={"content-type": CHUNKED.request_type},
            extensions=request.extensions,
        )  # fmt: skip
        reply = await self._transport.handle_async_request(posted)
        if reply.status_code != 200:
            return reply
        return await open_answer(reply, envelope.answer)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _take_token(self, epoch: Epoch) -> Token:
        async with self._buying:
            if len(self._wallet) <= LOW:
                self._wallet.add(await self._buy(epoch))
            token = self._wallet.pop()
            assert token is not None
            return token

    async def _buy(self, epoch: Epoch) -> list[Token]:
        step = self._buyer.buy(epoch, time.time())
        try:
            ask = next(step)
            while True:
                ask = step.send(await self._ask(ask))
        except StopIteration as done:
            tokens: list[Token] = done.value
            return tokens

    async def _ask(self, ask: Ask) -> Reply:
        asked = httpx.Request(ask.method, ask.url, headers=dict(ask.headers or {}), content=ask.body)
        reply = await self._transport.handle_async_request(asked)
        return Reply(reply.status_code, reply.headers.get("content-type", ""), await reply.aread())


async def _fetch(transport: httpx.AsyncBaseTransport, url: str) -> bytes:
    reply = await transport.handle_async_request(httpx.Request("GET", url))
    if reply.status_code != 200:
        raise EngineError(f"{url} answers {reply.status_code}")
    return await reply.aread()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
