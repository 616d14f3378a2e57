"""Opening a URL: every address of a redirect chain is checked before it is requested, and the head of a reply has a
deadline."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import httpx

from cloister.types.errors import ModelError

T = TypeVar("T")

HEAD_TIMEOUT_S: Final = 20.0
"""Timeout until a server begins its reply, including the connection."""
_MOST_REDIRECTS: Final = 10


class AddressRules:
    """Rules for addresses from which a file may be fetched.

    Args:
        first: the first address: an index, or the URL of the file. A public one must only lead to public ones, which prevents
            server-side request forgery (CWE-918).
        is_pinned: a known digest verifies the file, so plain HTTP is allowed.
        trusted_hosts: hosts that may use plain HTTP and may be private.
    """

    def __init__(self, first: str, *, is_pinned: bool = False, trusted_hosts: Collection[str] = ()) -> None:
        self._first = first
        self._is_pinned = is_pinned
        self._trusted_hosts = trusted_hosts

    def check(self, url: httpx.URL) -> None:
        """Raises ModelError for an address that may not be used."""
        if url.scheme not in ("http", "https"):
            raise ModelError("the address of the file is no web address; it begins with https://", param="source")
        if url.host in self._trusted_hosts:
            return
        if _is_private(url.host) and not _is_private(httpx.URL(self._first).host):
            raise ModelError("a server on the internet led to a private address, which it may not; is the index the right one?")
        if url.scheme == "http" and not self._is_pinned and not _is_loopback(url.host):
            raise ModelError(
                "over plain HTTP anybody on the way may change the file; give an https:// URL, or the file's digest with "
                "--sha256",
                param="source",
            )


@contextmanager
def open_reply(
    client: httpx.Client,
    url: str,
    rules: AddressRules,
    headers: Mapping[str, str],
    auth: httpx.Auth | None = None,
) -> Iterator[httpx.Response]:
    """Yields the final reply of a URL, after redirects, with its body unread.

    Args:
        auth: login of the URL's host; None uses the one in the URL.

    Raises:
        ModelError: an address of a redirect is not allowed.
        httpx.HTTPError: there is no reply within `HEAD_TIMEOUT_S`.
        httpx.InvalidURL: an address is malformed.
    """
    request = client.build_request("GET", url, headers={"accept-encoding": "identity", **headers})
    for _ in range(_MOST_REDIRECTS):
        rules.check(request.url)
        reply = _send(client, request, auth)
        following, auth = reply.next_request, None  # httpx sends a login only to its own host
        if following is None:
            try:
                yield reply
            finally:
                reply.close()
            return
        reply.close()
        request = following
    raise httpx.TooManyRedirects("redirects without end", request=request)


def _send(client: httpx.Client, request: httpx.Request, auth: httpx.Auth | None) -> httpx.Response:
    """Sends a request. httpx's timeout restarts with every byte, so a separate thread waits for the reply."""
    login = auth or httpx.USE_CLIENT_DEFAULT
    send = partial(client.send, request, auth=login, stream=True, follow_redirects=False)
    try:
        return call_within(HEAD_TIMEOUT_S, send)
    except TimeoutError:
        raise httpx.ReadTimeout("the reply did not begin in time", request=request) from None


def call_within(timeout_s: float, function: Callable[[], T]) -> T:
    """Calls a function on a separate thread, and returns or raises its result; on TimeoutError the thread is abandoned."""
    found: Future[T] = Future()

    def call() -> None:
        try:
            found.set_result(function())
        except Exception as error:  # any exception is raised in the waiting thread
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found.result(timeout_s)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_private(host: str) -> bool:
    """Whether a host is on this machine or its networks; an unresolvable name is not."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return any(not _is_global(ipaddress.ip_address(address.partition("%")[0])) for address in found)


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_global
