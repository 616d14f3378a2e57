"""One flood as a program of its own: opens sockets, keeps them in one unfinished state, and replaces those that are closed.

Run by `benchmarks.floods`; on standard input anything ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import resource
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from cloister.trust.sealing import CHUNKED, WHOLE

PIECE = bytes(64 * 1024)
WORDS = "The quick brown fox jumps over the lazy dog. "
TRICKLE_S = 1.0


@dataclass
class Rate:
    """Lets so many units pass a second, bursts of a tenth of a second included."""

    per_s: float
    _next_s: float = field(default_factory=time.monotonic)

    async def wait(self, num: float = 1) -> None:
        now = time.monotonic()
        self._next_s = max(self._next_s, now - 0.1) + num / self.per_s
        if self._next_s > now:
            await asyncio.sleep(self._next_s - now)


@dataclass
class Flood:
    """What one flood does.

    Attributes:
        sources: addresses that its sockets come from, in turn.
        opened: how often a socket may be opened, in sockets a second.
        bandwidth: bytes a second of all of them.
        key: of the API, for floods that are admitted.
        path: that they post to.
    """

    address: tuple[str, int]
    kind: str
    body_bytes: int
    sources: Iterator[str]
    opened: Rate
    bandwidth: Rate
    tls: ssl.SSLContext | None = None
    key: str = ""
    path: str = "/v1/completions"

    async def hold(self) -> None:
        """Keeps one socket, again and again."""
        do: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = getattr(self, f"_{self.kind}")
        while True:
            await self.opened.wait()
            writer: asyncio.StreamWriter | None = None
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*self.address, local_addr=(next(self.sources), 0), ssl=self.tls)
                await do(reader, writer)
            if writer is not None:
                writer.close()

    async def _idle(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def _handshakes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Has the server answer a ClientHello, which costs it a signature, and says nothing any more."""
        outgoing = ssl.MemoryBIO()
        tls = ssl._create_unverified_context().wrap_bio(ssl.MemoryBIO(), outgoing)
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        writer.write(outgoing.read())
        await reader.read()

    async def _heads(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nx-a: ")
        await self._trickle(reader, writer)

    async def _slow_bodies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(CHUNKED.request_type, 16_000_000))
        await self._trickle(reader, writer)

    async def _large_bodies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All of a body but its last piece, and then a byte from time to time."""
        kind = WHOLE.request_type if self.body_bytes > 2**22 else "application/json"
        writer.write(_head(kind, self.body_bytes))
        over = asyncio.create_task(reader.read(64))  # a refusal
        for _ in range(self.body_bytes // len(PIECE) - 1):
            if over.done():
                return
            await self.bandwidth.wait(len(PIECE))
            writer.write(PIECE)
            await writer.drain()
        while not over.done():
            await asyncio.sleep(TRICKLE_S)
            writer.write(b"x")

    async def _long_prompts(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A whole request whose text has as many bytes, and then waits for what is said."""
        text = WORDS * (self.body_bytes // len(WORDS))
        body = json.dumps({"prompt": text}).encode()
        fields = f"host: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\ncontent-type: application/json"
        writer.write(f"POST {self.path} HTTP/1.1\r\n{fields}\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), len(PIECE)):
            await self.bandwidth.wait(len(PIECE))
            writer.write(body[start : start + len(PIECE)])
            await writer.drain()
        await reader.read(64)

    async def _trickle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over = asyncio.create_task(reader.read(64))
        while not over.done():
            await asyncio.sleep(TRICKLE_S)
            writer.write(b"x")
            await writer.drain()


def _head(kind: str, num_bytes: int) -> bytes:
    path = "/" if kind != "application/json" else "/v1/completions"
    fields = f"host: 127.0.0.1\r\ncontent-type: {kind}\r\ncontent-length: {num_bytes}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


async def run(options: argparse.Namespace) -> None:
    numbers = itertools.cycle(range(options.num_networks))
    sources = (f"127.{1 + number // 250}.{1 + number % 250}.1" for number in numbers)
    flood = Flood(
        (options.host, options.port),
        options.kind,
        options.body_bytes,
        sources,
        Rate(options.sockets_per_s),
        Rate(options.bytes_per_s),
        ssl._create_unverified_context() if options.tls else None,
        options.key,
        options.path,
    )
    tasks = [asyncio.create_task(flood.hold()) for _ in range(options.num_sockets)]
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # sockets that a server closed, by the thousand
    await asyncio.to_thread(sys.stdin.read, 1)
    for task in tasks:
        task.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["idle", "handshakes", "heads", "slow_bodies", "large_bodies", "long_prompts"])
    parser.add_argument("--key", default="", help="API key of long_prompts")
    parser.add_argument("--path", default="/v1/completions", help="path of long_prompts")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-sockets", type=int, default=4000)
    parser.add_argument("--num-networks", type=int, default=1)
    parser.add_argument("--sockets-per-s", type=float, default=400)
    parser.add_argument("--bytes-per-s", type=float, default=20 * 2**20)
    parser.add_argument("--body-bytes", type=int, default=16 * 2**20)
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    socket.setdefaulttimeout(10)
    asyncio.run(run(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
