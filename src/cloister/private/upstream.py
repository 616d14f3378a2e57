"""Requests to the next program: pooled connections, streaming in both directions, a timeout on each wait.

Of a client's headers it forwards only the media type. It sends no cookies and never retries.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from cloister.private.problems import ProblemError
from cloister.types.errors import ConfigError

CONNECT_TIMEOUT_S: Final = 5.0
WRITE_TIMEOUT_S: Final = 60.0
ANSWER_TIMEOUT_S: Final = 600.0
"""Read timeout before and within a response: as long as a request may wait in an engine."""
MAX_CONNECTIONS: Final = 2048
MAX_IDLE: Final = 128
IDLE_S: Final = 3.0
"""Shorter than the keep-alive time of servers, so that no connection is closed while a request is sent on it."""
SMALL_REPLY_BYTES: Final = 1 << 20
_URL: Final = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?")


@dataclass(frozen=True)
class UpstreamResponse:
    """The head of a response, and its streamed body.

    Attributes:
        media_type: without parameters; empty if there is none.
    """

    status: int
    media_type: str
    fields: httpx.Headers
    pieces: AsyncIterator[bytes]


class Upstream:
    """HTTP client for one kind of program.

    Args:
        name: kind of program, for messages: "gateway", "node".
        tls: how to verify https servers; None trusts the system's authorities.
        timeout_s: read timeout of a response.
        transport: sends the requests; None opens connections.
    """

    def __init__(
        self,
        name: str,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._transport = transport or httpx.AsyncHTTPTransport(
            verify=tls if tls is not None else True,
            trust_env=False,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_IDLE, keepalive_expiry=IDLE_S),
        )

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        pieces: AsyncIterator[bytes] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncIterator[UpstreamResponse]:
        """Sends a request and yields the response when its head has arrived; leaving the context ends it.

        Raises:
            ProblemError: the program cannot be reached (502), does not respond in time (504), or has no free connection (503).
                Reading the response's `pieces` raises the same. Exceptions of the request's own `pieces` propagate.
        """
        timeouts = {
            "connect": CONNECT_TIMEOUT_S,
            "pool": CONNECT_TIMEOUT_S,
            "write": WRITE_TIMEOUT_S,
            "read": timeout_s or self._timeout_s,
        }
        request = httpx.Request(method, url, headers=dict(headers), content=pieces, extensions={"timeout": timeouts})
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            raise self._problem(error) from None
        try:
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            yield UpstreamResponse(response.status_code, kind, response.headers, self._read(response))
        finally:
            await response.aclose()

    async def get(self, url: str, *, most_bytes: int = SMALL_REPLY_BYTES) -> bytes:
        """Returns a small file.

        Raises:
            ProblemError: as `ask`; or the response is longer than `most_bytes`, or its status is not 200 (502).
        """
        content = bytearray()
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S), self.ask("GET", url, {}, timeout_s=CONNECT_TIMEOUT_S) as answer:
                async for piece in answer.pieces:
                    content += piece
                    if len(content) > most_bytes:
                        raise ProblemError(502, f"The {self._name}'s answer is longer than it may be.")
        except TimeoutError:
            raise ProblemError(504, f"The {self._name} did not answer in time.") from None
        if answer.status != 200:
            raise ProblemError(502, f"The {self._name} answered with status {answer.status} where a file was asked for.")
        return bytes(content)

    async def close(self) -> None:
        """Closes every connection."""
        await self._transport.aclose()

    async def _read(self, response: httpx.Response) -> AsyncIterator[bytes]:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            async for piece in response.stream:
                yield piece
        except httpx.TransportError as error:
            raise self._problem(error) from None

    def _problem(self, error: httpx.TransportError) -> ProblemError:
        if isinstance(error, httpx.PoolTimeout):
            return ProblemError(503, f"Too many requests are on their way to the {self._name}; try again in a moment.")
        if isinstance(error, httpx.ConnectTimeout | httpx.ReadTimeout | httpx.WriteTimeout):
            return ProblemError(504, f"The {self._name} did not answer in time; try again in a moment.")
        if isinstance(error, httpx.ConnectError):
            return ProblemError(502, f"The {self._name} cannot be reached; try again in a moment.")
        return ProblemError(502, f"The {self._name} broke off its answer; try again.")


def check_url(url: str, setting: str) -> str:
    """Returns the URL of a program without a trailing slash.

    Raises:
        ConfigError: it is not an http or https URL with a host.
    """
    if not _URL.fullmatch(url):
        raise ConfigError(f"{setting} must be a URL such as https://gateway.example, without query or user", param=setting)
    return url.rstrip("/")


def trust_only(authorities: Path | None) -> ssl.SSLContext | None:
    """Returns an SSL context that trusts the authorities in a PEM file; None for None.

    Raises:
        ConfigError: the file cannot be used.
    """
    if authorities is None:
        return None
    try:
        return ssl.create_default_context(cafile=authorities.expanduser())
    except (OSError, ssl.SSLError):
        raise ConfigError(f"{authorities} has no certificates in PEM, or cannot be read") from None
