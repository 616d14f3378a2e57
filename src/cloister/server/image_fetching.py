"""Images that requests name by URL: fetched over HTTPS from public addresses, with limits on bytes, redirects and time.

A server that fetches what a user names can be made to reach what only it can reach (server-side request forgery, CWE-918). So
every name is resolved here, every address is checked, and the connection goes to the checked address itself: another answer of
the name server (DNS rebinding) changes nothing. Errors and logs hold nothing of a URL.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Final

import anyio

from cloister.server.image_decoding import refusal

if TYPE_CHECKING:
    import httpx

FETCH_TIMEOUT_S: Final = 10.0
"""Time for all images of one request, redirects included."""
MAX_REDIRECTS: Final = 3
SIDE_BY_SIDE: Final = 8
"""Requests whose images are fetched at once."""
_FAILED: Final = "cannot be fetched; its address must be public and answer in time. Or send a data URL"
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
_MOST_PORT: Final = 65535
_NEVER: Final = (
    IPv6Network("2002::/16"),  # 6to4, which holds an IPv4 address
    IPv6Network("3fff::/20"),  # documentation
    IPv4Network("192.0.0.0/24"),  # of IETF protocols: PCP and TURN answer there from the network of this machine
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
)
_PLATFORM: Final = IPv4Address("168.63.129.16")
"""A public address, but Azure's host answers virtual machines there, with their metadata."""


def is_public(address: str) -> bool:
    """Whether an IP address is a public one: not private, loopback, link-local, multicast, reserved, or a stand-in for an IPv4
    address."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if not found.is_global or any(found in network for network in _NEVER):
        return False
    if isinstance(found, IPv6Address):
        return found in _GLOBAL_UNICAST and found.scope_id is None  # only local ones have a zone (`%eth0`)
    return not found.is_multicast and not found.is_reserved and found != _PLATFORM


async def resolve(host: str) -> list[str]:
    """Returns the addresses of a name.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(frozen=True, slots=True)
class ImageFetcher:
    """Fetches the images of requests. Used from one event loop.

    Attributes:
        max_bytes: of all images of one request.
        resolve: name -> addresses.
        permits: whether an address may be connected to.
        tls: trusted authorities; None for those of the system.
    """

    max_bytes: int
    resolve: Callable[[str], Awaitable[list[str]]] = resolve
    permits: Callable[[str], bool] = is_public
    tls: ssl.SSLContext | None = None
    slots: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(SIDE_BY_SIDE), compare=False)

    async def fetch(self, urls: dict[int, str]) -> dict[int, bytes]:
        """Returns the files of one request.

        Args:
            urls: number of an image, from 1, for errors -> its URL.

        Raises:
            InvalidRequestError: one cannot be fetched; the message does not say why, so that nobody can use it to explore
            networks.
        """
        import httpx  # most servers fetch nothing

        files: dict[int, bytes] = {}
        # A transport, not a client: it follows no redirects, keeps no cookies and logs no URL. No connection is kept: it would
        # serve another name with the same address, whose certificate nobody has checked.
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(verify=self.tls or _public_authorities(), trust_env=False, limits=limits)
        async with self.slots, transport:
            deadline_s = anyio.current_time() + FETCH_TIMEOUT_S
            for number, url in urls.items():
                most = self.max_bytes - sum(map(len, files.values()))
                try:
                    with anyio.fail_at(deadline_s):
                        files[number] = await self._fetch(transport, url, most)
                except _TooLongError:
                    raise refusal(number, f"and those before it have more than {self.max_bytes >> 10} KiB") from None
                except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):  # TimeoutError is an OSError
                    raise refusal(number, _FAILED) from None
        return files

    async def _fetch(self, transport: httpx.AsyncHTTPTransport, url: str, most: int) -> bytes:
        import httpx

        target = httpx.URL(url)
        for _ in range(MAX_REDIRECTS + 1):
            reply = await transport.handle_async_request(await self._request(target))
            try:
                if not reply.has_redirect_location:
                    return await _read(reply, most)
                # the request has the address in place of the name
                target = target.join(reply.headers["location"])
            finally:
                await reply.aclose()
        raise ValueError("too many redirects")

    async def _request(self, url: httpx.URL) -> httpx.Request:
        """Returns a request to the checked address of a URL, whose certificate must be that of its name."""
        import httpx

        if url.scheme != "https" or not url.host or url.userinfo or (url.port or 0) > _MOST_PORT:
            raise ValueError("an image is fetched over HTTPS, without a login")
        name = url.raw_host.decode("ascii").strip("[]")
        addresses = await self.resolve(name)
        if not addresses or not all(map(self.permits, addresses)):
            raise ValueError("the address is not public")
        headers = {
            "host": url.netloc.decode("ascii"),
            "accept": "image/*",
            "accept-encoding": "identity",
            "user-agent": "cloister",
        }
        return httpx.Request("GET", url.copy_with(host=addresses[0]), headers=headers, extensions={"sni_hostname": name})


@cache
def _public_authorities() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()  # SSL_CERT_FILE, or httpx's own


class _TooLongError(Exception):
    """A file exceeds its limit."""


async def _read(reply: httpx.Response, most: int) -> bytes:
    if reply.status_code != 200 or reply.headers.get("content-encoding", "identity") != "identity":
        raise ValueError("the reply is not a file")
    if (length := reply.headers.get("content-length", "")).isdecimal() and int(length) > most:
        raise _TooLongError
    parts = bytearray()
    async for part in reply.aiter_raw():
        parts += part
        if len(parts) > most:
            raise _TooLongError
    return bytes(parts)
