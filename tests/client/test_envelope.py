from __future__ import annotations

import pytest

from cloister.client.envelope import Answer, BrokenAnswerError, SealedEnvelope, read_message, seal_for_node, strip_request
from cloister.client.errors import FailedTryError, FinalRefusalError
from cloister.trust.sealing import (
    CHUNKED,
    BinaryHttpWriter,
    Header,
    HttpRequest,
    HttpResponse,
    OhttpContext,
    Receiver,
    ReplayCache,
    ResponseHead,
    ResponseSealer,
    decode_request,
    encode_response,
    find_field,
    header_bytes,
)
from cloister.trust.sealing.keys import KeyRing
from cloister.trust.sealing.ohttp import ChunkOpener
from cloister.trust.shape import Shaper, shape_of
from cloister.trust.transparency.epoch import Epoch, GatewayEntry, IssuerEntry, NodeEntry
from cloister.types.errors import RequestTooLargeError

NOW = 1_800_000_000.0
GATEWAY = Receiver(KeyRing(0.0), ReplayCache(600.0))
NODE = Receiver(KeyRing(0.0), ReplayCache(600.0))
NODE_ENTRY = NodeEntry("ab" * 32, 1, NODE.ring.publish(), "00" * 32)


def epoch_of(profile: str) -> Epoch:
    gateway = GatewayEntry("https://gateway.example/cloud", GATEWAY.ring.publish())
    issuers = (IssuerEntry("https://issuer.example", b"key", 0),)
    return Epoch(1, int(NOW), int(NOW) + 600, gateway, issuers, (NODE_ENTRY,), "00" * 32, profile, ())


def ask(content: bytes = b'{"model":"m"}') -> HttpRequest:
    fields = (
        (b"Authorization", b"Bearer sk-secret"),
        (b"Content-Type", b"application/json"),
        (b"Accept", b"application/json"),
        (b"User-Agent", b"OpenAI/Python 3"),
        (b"x-stainless-os", b"Linux"),
    )
    return strip_request("POST", b"/v1/chat/completions?a=b", fields, content, NOW)


def open_request(receiver: Receiver, sealed: bytes) -> tuple[HttpRequest, OhttpContext]:
    header = Header.parse(sealed)
    exchange = receiver.begin(header, CHUNKED, 0.0)
    receiver.accept(header, 0.0)
    opener = ChunkOpener(exchange.context)
    return decode_request(b"".join(opener.feed(sealed[header_bytes(sealed) :])) + opener.close()), exchange


def write(profile: str = "open", request: HttpRequest | None = None) -> SealedEnvelope:
    return seal_for_node(request or ask(), NODE_ENTRY, epoch_of(profile), 'PrivateToken token="t"', NOW)


class Way:
    """The gateway and the node of one envelope, which may say what they like."""

    def __init__(self, envelope: SealedEnvelope) -> None:
        outer, outer_exchange = open_request(GATEWAY, envelope.sealed)
        _, inner_exchange = open_request(NODE, outer.content)
        self.answer = envelope.answer
        self._outer, self._inner = ResponseSealer(outer_exchange), ResponseSealer(inner_exchange)
        self._gateway, self.node = BinaryHttpWriter(), BinaryHttpWriter()

    def begin(self, status: int = 200, media_type: str = CHUNKED.response_type) -> bytes:
        return self._outer.seal(self._gateway.head(ResponseHead(status, ((b"content-type", media_type.encode()),))))

    def carry(self, plain: bytes, *, last: bool = False) -> bytes:
        """The node's plain text, sealed by it and then by the gateway."""
        sealed = self._inner.finish(plain) if last else self._inner.seal(plain)
        data = self._gateway.content(sealed)
        return self._outer.finish(data + self._gateway.end()) if last else self._outer.seal(data)


def test_the_gateway_sees_token_and_node_and_nothing_of_the_request() -> None:
    outer, _ = open_request(GATEWAY, write().sealed)
    assert (outer.head.method, outer.head.authority) == ("POST", "gateway.example")
    assert outer.head.path == f"/cloud/nodes/{'ab' * 32}"
    assert [name for name, _ in outer.head.fields] == [b"authorization", b"content-type", b"date"]
    assert find_field(outer.head.fields, b"date") == "Fri, 15 Jan 2027 08:00:00 GMT"
    assert b"chat" not in outer.content
    assert b"model" not in outer.content


def test_the_node_sees_the_request_and_nothing_of_who_asks() -> None:
    outer, _ = open_request(GATEWAY, write().sealed)
    inner, _ = open_request(NODE, outer.content)
    assert inner.content == b'{"model":"m"}'
    assert inner.head.path == "/v1/chat/completions?a=b"
    assert {name for name, _ in inner.head.fields} == {b"content-type", b"accept", b"date"}


def test_requests_of_one_bucket_are_equally_long() -> None:
    lengths = {len(write(request=ask(b"x" * size)).sealed) for size in (1, 300, 700)}
    assert len(lengths) == 1
    assert lengths != {len(write(request=ask(b"x" * 2000)).sealed)}


def test_a_letter_names_what_its_token_pays_for_and_is_as_long_whatever_that_is() -> None:
    lengths, named = set[tuple[int, int]](), set[str | None]()
    for size in range(500, 800):  # across the edge of the smallest bucket
        for budget in (1, 999_999_999):
            sealed = seal_for_node(ask(b"x" * size), NODE_ENTRY, epoch_of("private"), "t", NOW, budget=budget).sealed
            lengths.add((size, len(sealed)))
            if size == 500:
                outer, _ = open_request(GATEWAY, sealed)
                named.add(find_field(open_request(NODE, outer.content)[0].head.fields, b"cloister-token-budget"))
    assert named == {"000000001", "999999999"}
    assert len(lengths) == 300, "of one size both are equally long"
    assert len({length for _, length in lengths}) == 2, "an edge was crossed"


def test_a_program_cannot_write_the_budget_itself() -> None:
    fields = ((b"cloister-token-budget", b"1"), (b"content-type", b"application/json"))
    request = strip_request("POST", b"/v1/completions", fields, b"{}", NOW)
    assert find_field(request.head.fields, b"cloister-token-budget") is None


def test_a_request_beyond_the_largest_bucket_is_refused() -> None:
    with pytest.raises(RequestTooLargeError):
        write(request=ask(bytes(16 << 20)))


def test_each_flush_of_the_node_comes_out_at_once() -> None:
    way = Way(write())
    assert way.answer.feed(way.begin()) == b""
    way.answer.feed(way.carry(way.node.head(ResponseHead(200, ((b"content-type", b"text/event-stream"),)))))
    assert way.answer.head is not None
    assert way.answer.head.status == 200
    for word in (b"data: one\n\n", b"data: two\n\n"):
        assert way.answer.feed(way.carry(way.node.content(word))) == word
    assert way.answer.feed(way.carry(way.node.end(), last=True)) == b""
    assert way.answer.close() == b""


def test_an_answer_may_come_byte_by_byte() -> None:
    way = Way(write())
    message = way.node.head(ResponseHead(200)) + way.node.content(b"hello") + way.node.end()
    received = b"".join(way.answer.feed(bytes([byte])) for byte in way.begin() + way.carry(message, last=True))
    assert received + way.answer.close() == b"hello"


def cut(way: Way) -> bytes:
    return way.begin() + way.carry(way.node.head(ResponseHead(200)) + way.node.content(b"hello"))


def test_an_answer_that_breaks_off_is_seen() -> None:
    way = Way(write())
    assert way.answer.feed(cut(way)) == b"hello"
    with pytest.raises(BrokenAnswerError, match="broke off"):
        way.answer.close()


def test_a_gateway_that_ends_the_node_s_answer_early_is_seen() -> None:
    way = Way(write())
    way.answer.feed(cut(way))
    way.answer.feed(way._outer.finish(way._gateway.end()))
    with pytest.raises(BrokenAnswerError):
        way.answer.close()


def test_a_gateway_that_answers_in_the_node_s_place_is_seen() -> None:
    way = Way(write())
    way.answer.feed(way.begin())
    with pytest.raises(BrokenAnswerError):
        way.answer.feed(way._outer.seal(way._gateway.content(b"\x20" * 100)))


def test_a_changed_byte_is_seen() -> None:
    way = Way(write())
    sealed = bytearray(cut(way))
    sealed[-1] ^= 1
    with pytest.raises(BrokenAnswerError):
        way.answer.feed(bytes(sealed))


@pytest.mark.parametrize(("status", "kind"), [(502, FailedTryError), (401, FailedTryError), (413, FinalRefusalError)])
def test_a_refusal_of_the_gateway_says_whether_another_draw_may_help(status: int, kind: type[Exception]) -> None:
    way = Way(write())
    refusal = encode_response(HttpResponse(ResponseHead(status), b'{"title": "The node is away."}'))
    way.answer.feed(way._outer.finish(refusal))
    with pytest.raises(kind, match="The node is away"):
        way.answer.close()


def test_a_shape_that_the_profile_promises_is_asked_for() -> None:
    way = Way(write("private"))
    way.answer.feed(way.begin())
    with pytest.raises(BrokenAnswerError, match="not shaped"):
        way.answer.feed(way.carry(way.node.head(ResponseHead(200))))


def test_a_shaped_answer_comes_out_as_it_was_said() -> None:
    way = Way(write("private"))
    shape = shape_of("private")
    assert shape is not None
    shaper = Shaper(shape, 0.0)
    shaper.head(way.node.head(ResponseHead(200)))
    shaper.write(way.node.content(b"hello") + way.node.end(), 0.0, last=True)
    received, now = way.answer.feed(way.begin()), 0.0
    while not shaper.is_over:
        now += shape.tick_s
        frame = shaper.take(now)
        if frame is not None:
            received += way.answer.feed(way.carry(frame.data, last=frame.is_last))
    assert received + way.answer.close() == b"hello"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"title": "Too\\nlong"}', "Too long"),
        (b"<html>", ""),
        (b"[1]", ""),
        (b'{"error": 3}', ""),
        (b"\xff", ""),
    ],
)
def test_reasons_are_read_from_either_form_of_error(body: bytes, message: str) -> None:
    assert read_message(body) == message


def test_an_answer_of_another_request_is_none() -> None:
    one, other = Way(write()), Way(write())
    other_answer: Answer = other.answer
    with pytest.raises(BrokenAnswerError):
        other_answer.feed(cut(one))


def test_a_session_goes_to_the_node_where_the_program_names_one() -> None:
    fields = ((b"Cloister-Session", b"ab" * 32), (b"Cookie", b"a=1"))
    request = strip_request("POST", b"/v1/completions", fields, b"{}", NOW)
    outer, _ = open_request(GATEWAY, write(request=request).sealed)
    inner, _ = open_request(NODE, outer.content)
    assert find_field(inner.head.fields, b"cloister-session") == "ab" * 32
    assert find_field(outer.head.fields, b"cloister-session") is None
    assert find_field(inner.head.fields, b"cookie") is None


def test_the_date_does_not_tell_by_how_many_seconds_the_clock_is_wrong() -> None:
    seen = set()
    for wrong_s in (-29, -7, 0, 13, 29):
        fields = ((b"accept", b"*/*"),)
        request = strip_request("POST", b"/v1/completions", fields, b"{}", NOW + wrong_s)
        envelope = seal_for_node(request, NODE_ENTRY, epoch_of("open"), 'PrivateToken token="t"', NOW + wrong_s)
        outer, _ = open_request(GATEWAY, envelope.sealed)
        inner, _ = open_request(NODE, outer.content)
        seen |= {find_field(outer.head.fields, b"date"), find_field(inner.head.fields, b"date")}
    assert len(seen) == 1
