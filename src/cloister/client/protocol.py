"""Fetches over HTTP that precede sealing, as steps that yield a request and receive its reply. No I/O.

`FetchSteps` is a generator: it yields an `Ask`, gets a `Reply`, and returns its result; so the same code serves blocking and
asynchronous transports.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

from cloister.client.errors import RelayUnreachableError

T = TypeVar("T")

DEADLINE_S = 30.0
"""Timeout of one such request, from the first byte sent to the last one received."""


@dataclass(frozen=True)
class Ask:
    """A request to the relay or the issuer.

    Attributes:
        who: name of the server for messages: "the relay", "the issuer".
        most_bytes: maximum length of the reply; a longer one is refused.
    """

    who: str
    url: str
    method: str = "GET"
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)
    most_bytes: int = 1 << 20


@dataclass(frozen=True)
class Reply:
    """The complete reply."""

    status: int
    media_type: str
    body: bytes


FetchSteps = Generator[Ask, Reply, T]


def unreachable(ask: Ask, error: Exception) -> RelayUnreachableError:
    """Returns the error for a connection that failed or timed out; of `error` it states only the type."""
    address = ask.url.split("/.well-known")[0]
    reason = type(error).__name__
    return RelayUnreachableError(f"{ask.who} at {address} cannot be reached ({reason}); check its address and that it runs")


def too_long(ask: Ask) -> RelayUnreachableError:
    """Returns the error for a reply longer than `most_bytes`."""
    return RelayUnreachableError(f"{ask.who} sent more than {ask.most_bytes:,} bytes where a small file was asked for")
