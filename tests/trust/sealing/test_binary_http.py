"""Binary HTTP (RFC 9292) as bytes, whole and piece by piece."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.trust.sealing import (
    BinaryHttpWriter,
    Content,
    HttpRequest,
    HttpResponse,
    MessageError,
    MessageReader,
    RequestHead,
    ResponseHead,
    Trailers,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from cloister.trust.sealing.messages import MAX_VARINT, decode_varint, encode_varint, varint_bytes
from tests.thinning import examples

EXAMPLES = {
    example["anchor"]: bytes.fromhex(example["value"])
    for example in json.loads((Path(__file__).parents[2] / "vectors/bhttp/rfc9292-examples.json").read_text())
    if example["form"] == "hex-dump"
}
HELLO = HttpRequest(
    RequestHead(
        "GET",
        "https",
        "",
        "/hello.txt",
        (
            (b"user-agent", b"curl/7.16.3 libcurl/7.16.3 OpenSSL/0.9.7l zlib/1.2.3"),
            (b"host", b"www.example.com"),
            (b"accept-language", b"en, mi"),
        ),
    )
)
names = st.from_regex(r"[a-z0-9!#$%&'*+.^_`|~-]{1,12}", fullmatch=True).map(str.encode)
values = st.from_regex(r"([!-~]([ -~]{0,20}[!-~])?)?", fullmatch=True).map(str.encode)
fields = st.lists(st.tuples(names, values), max_size=4).map(tuple)
heads = st.builds(
    RequestHead,
    method=st.sampled_from(["GET", "POST", "OPTIONS"]),
    scheme=st.sampled_from(["https", "http"]),
    authority=st.sampled_from(["", "example.com", "[::1]:8000"]),
    path=st.from_regex(r"/[!-~]{0,20}", fullmatch=True),
    fields=fields,
)
requests = st.builds(HttpRequest, head=heads, content=st.binary(max_size=200), trailers=fields)
responses = st.builds(
    HttpResponse,
    head=st.builds(ResponseHead, status=st.integers(200, 599), fields=fields),
    content=st.binary(max_size=200),
    trailers=fields,
    informational=st.lists(st.builds(ResponseHead, status=st.integers(100, 199), fields=fields), max_size=2).map(tuple),
)


def read_in_pieces(message: bytes, size: int) -> list[object]:
    reader = MessageReader()
    parts: list[object] = []
    for start in range(0, len(message), size):
        parts += reader.feed(message[start : start + size])
    return [*parts, *reader.close()]


def write(message: HttpRequest | HttpResponse) -> bytes:
    writer = BinaryHttpWriter()
    informational = message.informational if isinstance(message, HttpResponse) else ()
    written = b"".join(writer.head(head) for head in (*informational, message.head))
    return written + writer.content(message.content) + writer.end(message.trailers)


def test_the_known_length_example_is_written_and_read_back() -> None:
    assert decode_request(EXAMPLES["ex-bink-request"]) == HELLO
    assert encode_request(HELLO) == EXAMPLES["ex-bink-request"][:-2], "empty parts at the end are left out"
    assert encode_request(HELLO, padded_to=len(EXAMPLES["ex-bink-request"])) == EXAMPLES["ex-bink-request"]


def test_the_indeterminate_length_example_is_written_and_read_back() -> None:
    writer = BinaryHttpWriter()
    assert decode_request(EXAMPLES["ex-bini-request"]) == HELLO
    assert writer.head(HELLO.head) + writer.end(padding=10) == EXAMPLES["ex-bini-request"]


def test_the_example_with_informational_responses_is_read_and_written() -> None:
    response = decode_response(EXAMPLES["ex-bini-response"])
    assert [head.status for head in response.informational] == [102, 103]
    assert response.informational[1].fields[1] == (b"link", b"</script.js>; rel=preload; as=script")
    assert response.head.status == 200
    assert response.content == b"Hello World! My content includes a trailing CRLF.\r\n"
    assert write(response) == EXAMPLES["ex-bini-response"]


def test_the_example_with_a_trailer_is_read_and_written() -> None:
    response = decode_response(EXAMPLES["ex-bink-chunked"])
    assert response == HttpResponse(ResponseHead(200), b"This content contains CRLF.\r\n", ((b"trailer", b"text"),))
    assert encode_response(response) == EXAMPLES["ex-bink-chunked"]


@pytest.mark.parametrize("anchor", ["ex-bink-request", "ex-bini-request"])
def test_an_example_may_stop_only_where_what_is_missing_would_be_empty(anchor: str) -> None:
    message = EXAMPLES[anchor].rstrip(b"\0")
    may_stop: dict[int, HttpRequest] = {}
    for length in range(len(message) + 1):
        with contextlib.suppress(MessageError):
            may_stop[length] = decode_request(message[:length])
    control_data = RequestHead("GET", "https", "", "/hello.txt")
    allowed = {23: HttpRequest(control_data)}
    if anchor == "ex-bink-request":  # the other form still lacks the zero behind its fields
        allowed[len(message)] = HELLO
    assert may_stop == allowed


def test_a_message_that_stops_inside_its_content_is_invalid() -> None:
    whole = encode_response(HttpResponse(ResponseHead(200), b"four"))
    with pytest.raises(MessageError):
        decode_response(whole[:-1])
    writer = BinaryHttpWriter()
    broken_off = writer.head(ResponseHead(200)) + writer.content(b"four")
    with pytest.raises(MessageError):
        decode_response(broken_off)
    assert decode_response(broken_off + b"\0").content == b"four", "only the empty trailers may be missing"


def test_padding_is_zeros_and_nothing_else() -> None:
    padded = encode_request(HELLO, padded_to=1024)
    assert len(padded) == 1024
    assert decode_request(padded) == HELLO
    with pytest.raises(MessageError):
        decode_request(padded[:-1] + b"\1")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x04",
        b"\x01\x40\x63",  # status 99
        b"\x01\x42\x58",  # status 600
        b"\x01\x40\x64",  # only an informational response
        b"\x01\x40\xc8\x03\x00\x01a",  # a field name of no length
        b"\x01\x40\xc8\x04\x01:\x01a",  # a pseudo-field
        b"\x01\x40\xc8\x05\x01a\x02\r\n",
        b"\x01\x40\xc8\x05\x01a\x02 b",
        b"\x01\x40\xc8\x03\x01a\x09",  # a value longer than its section
        b"\x00\x03GET\x05https\x00\x05hello",  # a path without a slash
        b"\x00\x03GET\x05https\x04a\r\nb\x01/",
    ],
)
def test_what_http_does_not_allow_is_invalid(message: bytes) -> None:
    with pytest.raises(MessageError):
        read_in_pieces(message, 1)


def test_fields_that_http_does_not_allow_are_not_written() -> None:
    for line in [(b"a b", b"c"), (b":path", b"/"), (b"a", b"b\r\nc: d"), (b"a", b" b")]:
        with pytest.raises(MessageError):
            encode_response(HttpResponse(ResponseHead(200, (line,))))


def test_a_head_that_never_ends_is_refused_before_it_fills_memory() -> None:
    reader = MessageReader(max_head_bytes=1000)
    reader.feed(b"\x03\x40\xc8" + b"\x04name\x0512345" * 90)
    with pytest.raises(MessageError, match="longer than 1000 bytes"):
        reader.feed(b"\x04name\x0512345" * 10)
    with pytest.raises(MessageError):
        reader.feed(b"")


def test_content_is_handed_on_before_its_chunk_is_whole() -> None:
    reader = MessageReader()
    writer = BinaryHttpWriter()
    assert reader.feed(writer.head(ResponseHead(200))) == [ResponseHead(200)]
    chunk = writer.content(b"a long chunk")
    assert reader.feed(chunk[:5]) == [Content(chunk[1:5])]
    assert reader.feed(chunk[5:]) == [Content(chunk[5:])]
    assert reader.feed(writer.end([(b"a", b"b")])) == [Trailers(((b"a", b"b"),))]
    assert reader.close() == []


@settings(max_examples=examples(100), deadline=None)
@given(requests, st.integers(1, 50), st.integers(0, 300))
def test_requests_come_back_as_they_were(request: HttpRequest, size: int, padded_to: int) -> None:
    assert decode_request(encode_request(request, padded_to=padded_to)) == request
    assert decode_request(write(request)) == request
    known, streamed = read_in_pieces(encode_request(request), size), read_in_pieces(write(request), size)
    for parts in (known, streamed):
        assert parts[0] == request.head
        assert b"".join(part.data for part in parts if isinstance(part, Content)) == request.content


@settings(max_examples=examples(100), deadline=None)
@given(responses)
def test_responses_come_back_as_they_were(response: HttpResponse) -> None:
    assert decode_response(encode_response(response)) == response
    assert decode_response(write(response)) == response


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 3), st.binary(max_size=80), st.integers(1, 80))
def test_noise_is_read_or_refused_alike_however_it_is_cut(form: int, noise: bytes, size: int) -> None:
    outcomes = []
    for step in (size, 1000):
        try:
            parts = read_in_pieces(bytes([form]) + noise, step)
        except MessageError:
            outcomes.append(None)
        else:
            content = b"".join(part.data for part in parts if isinstance(part, Content))
            outcomes.append(([part for part in parts if not isinstance(part, Content)], content))
    assert outcomes[0] == outcomes[1]


def test_a_request_that_is_cut_too_finely_is_refused_before_it_costs_its_reader_a_minute() -> None:
    writer = BinaryHttpWriter()
    message = writer.head(HELLO.head) + writer.content(b"a") * 100_000 + writer.end()
    with pytest.raises(MessageError, match="too finely"):
        decode_request(message)
    usual = BinaryHttpWriter()
    few = usual.head(HELLO.head) + usual.content(b"a") * 1000 + usual.content(b"b" * 1_000_000) + usual.end()
    assert len(decode_request(few).content) == 1_001_000
    answer = BinaryHttpWriter()
    fine = answer.head(ResponseHead(200)) + answer.content(b"a") * 100_000 + answer.end()
    assert len(decode_response(fine).content) == 100_000, "an answer is cut as its server flushes"


def test_a_section_of_more_fields_than_anybody_sends_is_refused() -> None:
    head = RequestHead("GET", "https", "", "/", ((b"a", b""),) * 512)
    assert len(decode_request(encode_request(HttpRequest(head))).head.fields) == 512
    with pytest.raises(MessageError, match="more than 512 fields"):
        decode_request(encode_request(HttpRequest(RequestHead("GET", "https", "", "/", ((b"a", b""),) * 513))))


@given(st.integers(0, MAX_VARINT))
def test_integers_come_back_as_they_were(value: int) -> None:
    encoded = encode_varint(value)
    assert varint_bytes(encoded[0]) == len(encoded)
    assert decode_varint(encoded) == value


def test_integers_have_the_lengths_of_rfc_9000() -> None:
    encoded = {2**62 - 1: 8, 2**30: 8, 2**30 - 1: 4, 2**14: 4, 2**14 - 1: 2, 64: 2, 63: 1, 0: 1}
    assert {value: len(encode_varint(value)) for value in encoded} == encoded
    assert decode_varint(bytes.fromhex("4025")) == 37, "more bytes than needed are allowed"
    with pytest.raises(ValueError, match="from 0"):
        encode_varint(2**62)
