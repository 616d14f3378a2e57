"""Captures in real time: sealed requests go to a node in a process of its own, and every chunk that comes back is timed.

What is timed are the chunks between node and gateway, one layer of sealing before the relay, who sees the same chunks later.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from benchmarks.harness import make_progress
from benchmarks.traffic.captures import Capture
from benchmarks.traffic.prompts import Prompt
from benchmarks.traffic.recording import make_body
from cloister.trust.sealing import (
    CHUNKED,
    Content,
    HttpRequest,
    KeyConfiguration,
    MessageReader,
    OhttpContext,
    RequestHead,
    ResponseHead,
    ResponseOpener,
    bucket_bytes,
    encode_request,
    parse_keys,
    seal_chunked_request,
)
from cloister.trust.shape import Unshaper

START_TIMEOUT_S: Final = 60.0
ANSWER_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node that can be asked."""

    host: str
    port: int
    configuration: KeyConfiguration
    shaped: bool


@contextmanager
def run_node(
    profile: str, model: str, num_threads: int | None, quant: str = "none", drafting: Mapping[str, object] | None = None
) -> Iterator[str]:
    """Runs a node while the block runs; yields its address."""
    command = [sys.executable, "-m", "benchmarks.traffic.node", profile, model, str(num_threads or 0), quant]
    command += [json.dumps(drafting)] if drafting else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not (address := re.match(r"http://\S+", process.stdout.readline())):
                raise SystemExit(f"the node under {profile} did not start; try: {' '.join(command[1:])}")
            yield address[0]
        finally:
            process.terminate()


async def capture(
    address: str, prompts: Sequence[Prompt], lengths: Sequence[int], num_at_once: int, *, shaped: bool
) -> list[Capture]:
    """Asks every prompt, `num_at_once` at a time, and times what comes back.

    Raises:
        SystemExit: an answer is not a good one, or not whole.
    """
    node = await meet(address, shaped=shaped)
    captures: list[Capture | None] = [None] * len(prompts)
    places = asyncio.Semaphore(num_at_once)
    with make_progress() as progress:
        task = progress.add_task("capture", total=len(prompts))

        async def one(number: int) -> None:
            prompt = prompts[number]
            async with places, asyncio.timeout(ANSWER_TIMEOUT_S):
                times_s, chunks = await ask(node, make_body(prompt, lengths[number]))
            captures[number] = Capture(prompt.label, prompt.group, times_s, chunks)
            progress.advance(task)

        await asyncio.gather(*(one(number) for number in range(len(prompts))))
    return [each for each in captures if each is not None]


async def ask(node: Node, body: bytes) -> tuple[list[float], list[int]]:
    """Returns times and sizes of the chunks of one answer, which must be whole and good.

    Raises:
        SystemExit: it is not.
    """
    sealed, exchange = seal(node, body)
    reader = Reader(exchange, shaped=node.shaped)
    times_s, sizes = [], []
    async for time_s, chunk in post(node, sealed):
        times_s.append(time_s)
        sizes.append(len(chunk))
        reader.feed(chunk)
    if reader.close()[-14:] != b"data: [DONE]\n\n":
        raise SystemExit("an answer has no end; the figures would mean nothing")
    return times_s, sizes


def seal(node: Node, body: bytes) -> tuple[bytes, OhttpContext]:
    """Returns a sealed completion request, padded to its bucket, and what opens the answer."""
    fields = ((b"content-type", b"application/json"),)
    request = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/completions", fields), body)
    padded = encode_request(request, padded_to=bucket_bytes(len(encode_request(request))))
    return seal_chunked_request(node.configuration, padded)


async def post(node: Node, sealed: bytes) -> AsyncIterator[tuple[float, bytes]]:
    """Yields each chunk that comes back and the seconds since the request was sent.

    Raises:
        SystemExit: the node refuses the request.
    """
    reader, writer = await asyncio.open_connection(node.host, node.port)
    try:
        writer.write(_http("POST /ohttp", CHUNKED.request_type, sealed))
        await writer.drain()
        began_s = time.monotonic()
        if b" 200 " not in await reader.readline():
            raise SystemExit("the node refused a request; the figures would mean nothing")
        while await reader.readline() != b"\r\n":
            pass
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size)
            yield time.monotonic() - began_s, chunk
            await reader.readline()
    finally:
        writer.close()


class Reader:
    """Opens an answer as the client does, chunk by chunk.

    Raises:
        SystemExit: it is not a good one.
    """

    def __init__(self, exchange: OhttpContext, *, shaped: bool) -> None:
        self._opener, self._unshaper, self._reader = ResponseOpener(exchange), Unshaper(required=shaped), MessageReader()
        self._said = b""

    def feed(self, chunk: bytes) -> bytes:
        """Returns what this chunk says."""
        return self._take(b"".join(self._opener.feed(chunk)))

    def close(self) -> bytes:
        """Returns all that was said, the end included."""
        self._take(self._opener.close())
        self._unshaper.close()
        return self._said

    def _take(self, plain: bytes) -> bytes:
        said = b""
        for part in self._reader.feed(self._unshaper.feed(plain)):
            if isinstance(part, ResponseHead) and part.status != 200:
                raise SystemExit(f"an answer has status {part.status}; the figures would mean nothing")
            if isinstance(part, Content):
                said += part.data
        self._said += said
        return said


async def meet(address: str, *, shaped: bool) -> Node:
    """Waits until the node gives its key."""
    host, port = urlsplit(address).hostname or "", urlsplit(address).port or 0
    return Node(host, port, await _read_key(host, port), shaped)


async def _read_key(host: str, port: int) -> KeyConfiguration:
    ends_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_http("GET /.well-known/ohttp-gateway"))
            reply = await reader.read()
            writer.close()
            return parse_keys(reply.partition(b"\r\n\r\n")[2])[0]
        except (OSError, IndexError):
            if time.monotonic() > ends_s:
                raise SystemExit("the node gives no key; run it by hand to see why") from None
            await asyncio.sleep(0.2)


def _http(what: str, kind: str = "", body: bytes = b"") -> bytes:
    lines = [f"{what} HTTP/1.1", "host: node", "connection: close", f"content-length: {len(body)}"]
    lines += [f"content-type: {kind}"] if kind else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def write(path: Path, captures: Sequence[Capture]) -> None:
    """Keeps captures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in captures), encoding="utf-8")


def read(path: Path) -> list[Capture]:
    """Returns what was kept."""
    return [Capture(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
