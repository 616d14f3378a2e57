"""Starts a server or a sealed node in separate processes to be searched, and sends it requests."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx

from cloister.client.envelope import Answer, strip_request
from cloister.trust.residue.processes import Process
from cloister.trust.sealing import (
    CHUNKED,
    Content,
    MessageReader,
    OhttpContext,
    ResponseHead,
    ResponseOpener,
    bucket_bytes,
    choose_configuration,
    encode_request,
    parse_keys,
    seal_chunked_request,
)
from cloister.trust.shape import Unshaper, shape_of
from cloister.types.errors import EngineError

NODE_PATH = "/ohttp"
KEYS_PATH = "/.well-known/ohttp-gateway"


class DirectTransport(httpx.AsyncBaseTransport):
    """Seals every request to the node at `url`, with its current key.

    Args:
        shaped: whether its profile requires a traffic shape.
    """

    def __init__(self, url: str, *, shaped: bool) -> None:
        self._url = url
        self._shaped = shaped
        self._transport = httpx.AsyncHTTPTransport(verify=ssl.create_default_context(), limits=httpx.Limits(max_connections=64))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        keys = await self._pass("GET", KEYS_PATH, b"", request)
        target = request.url.raw_path
        fields = tuple((name.lower(), value) for name, value in request.headers.raw)
        inner = strip_request(request.method, target, fields, await request.aread(), time.time())
        message = encode_request(inner)
        sealed, exchange = seal_chunked_request(
            choose_configuration(parse_keys(await keys.aread())), message.ljust(bucket_bytes(len(message)), b"\0")
        )
        reply = await self._pass("POST", NODE_PATH, sealed, request)
        if reply.status_code != 200 or reply.headers.get("content-type") != CHUNKED.response_type:
            return reply
        return await open_answer(reply, NodeAnswerReader(exchange, shaped=self._shaped))

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _pass(self, method: str, path: str, content: bytes, like: httpx.Request) -> httpx.Response:
        headers = {"content-type": CHUNKED.request_type, "host": httpx.URL(self._url).netloc.decode()}
        asked: dict[str, Any] = {"content": content} if content else {}
        outgoing = httpx.Request(method, self._url + path, headers=headers, extensions=like.extensions, **asked)
        return await self._transport.handle_async_request(outgoing)


class NodeAnswerReader:
    """Opens the answer of a node to a request that was sealed to it alone.

    Args:
        exchange: of the request.
        shaped: whether the node's profile requires a traffic shape.
    """

    def __init__(self, exchange: OhttpContext, *, shaped: bool) -> None:
        self.head: ResponseHead | None = None
        self._chunks, self._message, self._unshaper = ResponseOpener(exchange), MessageReader(), Unshaper(required=shaped)

    def feed(self, data: bytes) -> bytes:
        return b"".join(self._open(plain) for plain in self._chunks.feed(data))

    def close(self) -> bytes:
        content = self._open(self._chunks.close())
        self._unshaper.close()
        return content

    def _open(self, plain: bytes) -> bytes:
        content = b""
        for part in self._message.feed(self._unshaper.feed(plain)):
            if isinstance(part, ResponseHead) and part.is_final:
                self.head = part
            elif isinstance(part, Content):
                content += part.data
        return content


class OpenedStream(httpx.AsyncByteStream):
    """Streams the content of a sealed answer."""

    def __init__(self, reply: httpx.Response, reader: Answer | NodeAnswerReader) -> None:
        assert isinstance(reply.stream, httpx.AsyncByteStream)
        self._reply, self._reader = reply, reader
        self._pieces = aiter(reply.stream)
        self._content = b""
        self._is_over = False

    async def read_head(self) -> ResponseHead:
        """Reads until the head has arrived.

        Raises:
            httpx.RemoteProtocolError: the answer ended before.
        """
        while self._reader.head is None and not self._is_over:
            await self._read()
        if self._reader.head is None:
            raise httpx.RemoteProtocolError("the sealed answer has no head")
        return self._reader.head

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            content, self._content = self._content, b""
            if content:
                yield content
            if self._is_over:
                return
            await self._read()

    async def aclose(self) -> None:
        await self._reply.aclose()

    async def _read(self) -> None:
        piece = await anext(self._pieces, None)
        if piece is None:
            self._is_over = True
            self._content += self._reader.close()
        else:
            self._content += self._reader.feed(piece)


async def open_answer(reply: httpx.Response, reader: Answer | NodeAnswerReader) -> httpx.Response:
    """Returns the response inside a sealed reply, once its head has arrived."""
    stream = OpenedStream(reply, reader)
    head = await stream.read_head()
    return httpx.Response(head.status, headers=list(head.fields), stream=stream)


START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
_ADDRESS: Final = re.compile(r"Serving on (http\S+)")


class Path(Protocol):
    """A path from a client to a running node.

    Attributes:
        roots: pids that were started.
    """

    roots: tuple[int, ...]

    def client(self) -> httpx.AsyncClient:
        """Returns a client whose requests take the whole path."""
        ...

    def role(self, process: Process) -> str:
        """Returns a description of a process."""
        ...

    def holds_content(self, process: Process) -> bool:
        """Whether a process sees prompts or answers in any form while a request runs."""
        ...

    def stop(self) -> None: ...


@dataclass(slots=True)
class RunningProgram:
    """A running program of this package, with the address that it announced."""

    process: subprocess.Popen[str]
    address: str
    drain: threading.Thread

    @staticmethod
    def start(arguments: Sequence[str], announced: re.Pattern[str] = _ADDRESS) -> RunningProgram:
        """Starts `cloister ARGUMENTS` and waits until it serves.

        Raises:
            EngineError: it did not start; its output is on standard error.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cloister.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if found := announced.search(line):
                    drain = threading.Thread(target=_drain, args=(process,), daemon=True)
                    drain.start()
                    return RunningProgram(process, found[1], drain)
        finally:
            timer.cancel()
        process.stdout.close()
        process.wait()
        raise EngineError(f"`cloister {arguments[0]}` did not start; what it printed says why")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.drain.join(STOP_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


class ServeProgram:
    """A single `cloister serve`.

    Args:
        arguments: of `serve`, in addition to profile and port.
    """

    def __init__(self, profile: str, arguments: Sequence[str] = ()) -> None:
        self._program = RunningProgram.start(["serve", "--profile", profile, "--port", "0", "--no-log-requests", *arguments])
        self.roots: tuple[int, ...] = (self._program.process.pid,)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._program.address, timeout=60.0)

    def role(self, process: Process) -> str:
        if process.pid in self.roots:
            return "front"
        return "engine" if process.name == "cl-engine" else "other"  # a fork has the command of its template

    def holds_content(self, process: Process) -> bool:
        return self.role(process) in ("front", "engine")

    def stop(self) -> None:
        self._program.stop()


class SealedNode(ServeProgram):
    """A single `cloister serve --sealed`, without relay and gateway."""

    def __init__(self, profile: str, arguments: Sequence[str] = ()) -> None:
        super().__init__(profile, ("--sealed", *arguments))
        self._shaped = shape_of(profile) is not None

    def client(self) -> httpx.AsyncClient:
        transport = DirectTransport(self._program.address, shaped=self._shaped)
        return httpx.AsyncClient(base_url="https://localhost", timeout=60.0, transport=transport)

    def role(self, process: Process) -> str:
        if process.pid in self.roots:
            return "front"
        return process.name.removeprefix("cl-") if process.name.startswith("cl-") else "starter"

    def holds_content(self, process: Process) -> bool:
        return self.role(process) in ("worker", "engine")


def _drain(process: subprocess.Popen[str]) -> None:
    """Keeps a program's pipe from filling up."""
    assert process.stdout is not None
    for _ in process.stdout:
        time.sleep(0)
