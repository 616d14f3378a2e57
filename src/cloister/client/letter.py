"""A request, sealed twice: to the node that was drawn, then to the gateway that carries it there. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import urlsplit

from cloister.client.answer import Answer
from cloister.client.receipts import ReceiptOrder, ReceiptReader
from cloister.privacy.receipts import with_wish
from cloister.privacy.sealing import (
    CHUNKED,
    Fields,
    HttpRequest,
    RequestHead,
    bucket_bytes,
    choose_configuration,
    encode_request,
    parse_keys,
    seal_chunked_request,
)
from cloister.privacy.shape import shape_of
from cloister.privacy.tokens.redeem import with_budget
from cloister.privacy.transparency.epoch import Epoch, NodeEntry

TAKEN_FIELDS = frozenset({b"accept", b"content-type", b"cloister-session"})
"""Header fields that reach the node. The rest would tell who asks: API key, operating system, version of the SDK. The secret
of a session goes along, for whoever sends it means to be recognised."""

DATE_STEP_S = 60
"""Receivers take a date that is five minutes off, so half a minute more does no harm."""


@dataclass(frozen=True)
class Letter:
    """What goes to the relay, and what reads the answer."""

    sealed: bytes
    answer: Answer


def write_letter(
    request: HttpRequest,
    node: NodeEntry,
    epoch: Epoch,
    authorization: str,
    now: float,
    order: ReceiptOrder | None = None,
    budget: int | None = None,
) -> Letter:
    """Seals a request to a node and, around it, to the gateway.

    Args:
        request: as the node's server shall get it, but for `TAKEN_FIELDS` and the date that is added here.
        node: to whom.
        epoch: names the gateway, and the profile that the answer's shape follows from.
        authorization: spends one token.
        now: Unix seconds; the date of both layers, which their receivers hold against their clocks.
        order: for a receipt; None asks for none, in a letter of the same length.
        budget: output tokens that the token pays for, which the node holds against what the gateway says; None names none.

    Raises:
        RequestTooLargeError: it is longer than the largest bucket.
        KeyConfigurationError: a key of the epoch cannot be sealed to.
    """
    date = (b"date", write_date(now))
    asked, room = with_wish(with_budget(request, budget), order.wish if order else None)
    message = encode_request(asked)
    inner, inner_exchange = seal_chunked_request(
        choose_configuration(parse_keys(node.keys)), message.ljust(bucket_bytes(room), b"\0")
    )
    gateway = urlsplit(epoch.gateway.url)
    fields: Fields = ((b"authorization", authorization.encode()), (b"content-type", CHUNKED.request_type.encode()), date)
    head = RequestHead("POST", gateway.scheme, gateway.netloc, f"{gateway.path.rstrip('/')}/nodes/{node.node_id}", fields)
    outer, outer_exchange = seal_chunked_request(
        choose_configuration(parse_keys(epoch.gateway.keys)), encode_request(HttpRequest(head, inner))
    )
    receipt = ReceiptReader(order, asked, inner_exchange) if order else None
    return Letter(outer, Answer(outer_exchange, inner_exchange, shaped=shape_of(epoch.profile) is not None, receipt=receipt))


def strip_request(method: str, target: bytes, fields: Fields, content: bytes, now: float) -> HttpRequest:
    """Returns a request without what tells who asks.

    Args:
        target: path and query.
        fields: of the program that asks; those outside of `TAKEN_FIELDS` are left out.
    """
    kept = tuple((name.lower(), value) for name, value in fields if name.lower() in TAKEN_FIELDS)
    date = (b"date", write_date(now))
    return HttpRequest(RequestHead(method, "https", "localhost", target.decode("ascii"), (*kept, date)), content)


def write_date(now: float) -> bytes:
    """Returns a date, to the nearest minute: by how many seconds a clock is wrong would join the requests of one machine."""
    return formatdate(round(now / DATE_STEP_S) * DATE_STEP_S, usegmt=True).encode()
