"""Messages sealed in chunks, and everything that those who carry them could do to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.trust.sealing import (
    CHUNKED,
    KEMS,
    MAX_CHUNK_BYTES,
    WHOLE,
    ChunkOpener,
    Header,
    Kem,
    KeyConfiguration,
    KeyRing,
    OhttpContext,
    Receiver,
    ReplayCache,
    RequestSealer,
    ResponseOpener,
    ResponseSealer,
    UnsealError,
    header_bytes,
    open_response,
    seal_chunked_request,
    seal_request,
    seal_response,
)
from cloister.trust.sealing.messages import decode_varint, encode_varint, varint_bytes
from tests.thinning import examples

PIECES = [b"first", b"second", b"third", b"fourth"]


def make_receiver() -> Receiver:
    return Receiver(KeyRing(0.0), ReplayCache(3600.0))


def configuration_of(receiver: Receiver, kem: Kem = KEMS[0]) -> KeyConfiguration:
    return next(one for one in receiver.ring.configurations if one.kem_id == kem.kem_id)


each_kem = pytest.mark.parametrize("kem", KEMS, ids=lambda kem: kem.name)


def open_whole(receiver: Receiver, sealed: bytes, size: int = 1 << 20) -> tuple[bytes, OhttpContext]:
    """What a server does with a request: header, chunks, acceptance after the first."""
    exchange = receiver.begin(Header.parse(sealed), CHUNKED, 0.0)
    opener = ChunkOpener(exchange.context)
    opened = []
    for start in range(header_bytes(sealed), len(sealed), size):
        opened += opener.feed(sealed[start : start + size])
    opened.append(opener.close())
    receiver.accept(exchange.header, 0.0)
    return b"".join(opened), exchange


def split(sealed: bytes, start: int) -> list[bytes]:
    """The chunks of a message from `start` on, each with its length before it."""
    chunks = []
    while start < len(sealed):
        num_length = varint_bytes(sealed[start])
        length = decode_varint(sealed[start : start + num_length])
        end = len(sealed) if length == 0 else start + num_length + length
        chunks.append(sealed[start:end])
        start = end
    return chunks


def sealed_request(receiver: Receiver, kem: Kem = KEMS[0]) -> tuple[bytes, list[bytes]]:
    sealer = RequestSealer(configuration_of(receiver, kem))
    sealed = b"".join([*(sealer.seal(piece) for piece in PIECES), sealer.finish(b"end")])
    return sealed[: header_bytes(sealed)], split(sealed, header_bytes(sealed))


def sealed_response() -> tuple[OhttpContext, bytes, list[bytes]]:
    receiver = make_receiver()
    sealed, client = seal_chunked_request(configuration_of(receiver), b"a request")
    _, exchange = open_whole(receiver, sealed)
    sealer = ResponseSealer(exchange)
    response = b"".join([*(sealer.seal(piece) for piece in PIECES), sealer.finish(b"end")])
    return client, response[: client.nonce_bytes], split(response, client.nonce_bytes)


def open_sealed_response(client: OhttpContext, sealed: bytes) -> bytes:
    opener = ResponseOpener(client)
    return b"".join([*opener.feed(sealed), opener.close()])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.binary(max_size=400), max_size=5), st.binary(max_size=3 * MAX_CHUNK_BYTES), st.integers(1, 4000))
def test_messages_come_back_as_they_were_however_they_are_cut(pieces: list[bytes], end: bytes, size: int) -> None:
    receiver = make_receiver()
    sealer = RequestSealer(configuration_of(receiver))
    sealed = b"".join([*(sealer.seal(piece) for piece in pieces), sealer.finish(end)])
    opened, exchange = open_whole(receiver, sealed, size)
    assert opened == b"".join(pieces) + end
    answering, client = ResponseSealer(exchange), ResponseOpener(sealer.exchange)
    for piece in pieces:
        assert b"".join(client.feed(answering.seal(piece))) == piece, "a piece can be read before the next is there"
    last = answering.finish(end)
    opened_end = b"".join(part for start in range(0, len(last), size) for part in client.feed(last[start : start + size]))
    assert opened_end + client.close() == end


Damage = Callable[[list[bytes]], list[bytes]]
DAMAGES: dict[str, Damage] = {
    **{f"chunk {i} is missing": lambda chunks, i=i: chunks[:i] + chunks[i + 1 :] for i in range(5)},
    **{f"chunk {i} comes twice": lambda chunks, i=i: chunks[: i + 1] + chunks[i:] for i in range(4)},
    **{f"chunks {i} and {i + 1} are exchanged": lambda c, i=i: [*c[:i], c[i + 1], c[i], *c[i + 2 :]] for i in range(3)},
    **{f"it stops before chunk {i}": lambda chunks, i=i: chunks[:i] for i in range(5)},
    **{f"it stops inside chunk {i}": lambda chunks, i=i: [*chunks[:i], chunks[i][:-1]] for i in range(5)},
    **{f"chunk {i} is called the last": lambda chunks, i=i: [*chunks[:i], b"\0" + chunks[i][1:]] for i in range(4)},
    "the last chunk is called one of many": lambda c: [*c[:-1], encode_varint(len(c[-1]) - 1) + c[-1][1:]],
    "something follows the last chunk": lambda chunks: [*chunks, b"x"],
    "an empty chunk is put in": lambda chunks: [*chunks[:2], b"\x10" + bytes(16), *chunks[2:]],
    "a chunk is longer than anybody takes": lambda chunks: [encode_varint(2**40), *chunks],
    "the last chunk never ends": lambda chunks: [*chunks[:-1], b"\0", bytes(2**17)],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_request_is_not_opened_when(damage: Damage) -> None:
    receiver = make_receiver()
    header, chunks = sealed_request(receiver)
    with pytest.raises(UnsealError):
        open_whole(receiver, header + b"".join(damage(chunks)))
    assert open_whole(receiver, header + b"".join(chunks))[0] == b"".join(PIECES) + b"end", "the undamaged one is"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_response_is_not_opened_when(damage: Damage) -> None:
    client, nonce, chunks = sealed_response()
    with pytest.raises(UnsealError):
        open_sealed_response(client, nonce + b"".join(damage(chunks)))
    assert open_sealed_response(client, nonce + b"".join(chunks)) == b"".join(PIECES) + b"end", "the undamaged one is"


@each_kem
def test_no_bit_of_a_request_can_be_changed(kem: Kem) -> None:
    receiver = make_receiver()
    header, chunks = sealed_request(receiver, kem)
    sealed = header + b"".join(chunks)
    # the highest bit of an X25519 key is no part of it (RFC 7748, section 5), yet it is hashed into the secret
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnsealError):
            open_whole(receiver, bytes(changed))
    assert open_whole(receiver, sealed)


def test_no_bit_of_a_response_can_be_changed() -> None:
    client, nonce, chunks = sealed_response()
    sealed = nonce + b"".join(chunks)
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnsealError):
            open_sealed_response(client, bytes(changed))


def test_a_response_to_another_request_is_not_opened() -> None:
    (client, _, _), (_, nonce, chunks) = sealed_response(), sealed_response()
    with pytest.raises(UnsealError):
        open_sealed_response(client, nonce + b"".join(chunks))


def test_nothing_is_opened_after_an_error() -> None:
    client, nonce, chunks = sealed_response()
    opener = ResponseOpener(client)
    with pytest.raises(UnsealError):
        opener.feed(nonce + chunks[1])
    with pytest.raises(UnsealError):
        opener.feed(chunks[0])
    with pytest.raises(UnsealError):
        opener.close()


def test_a_message_of_one_form_is_not_opened_as_the_other() -> None:
    receiver = make_receiver()
    sealed, _ = seal_request(configuration_of(receiver), b"a request")
    whole = receiver.begin(Header.parse(sealed), WHOLE, 0.0)
    assert whole.context.open(sealed[header_bytes(sealed) :]) == b"a request"
    with pytest.raises(UnsealError):
        open_whole(receiver, sealed[: header_bytes(sealed)] + b"\0" + sealed[header_bytes(sealed) :])


def test_a_whole_response_is_opened_by_who_asked_and_nobody_else() -> None:
    receiver = make_receiver()
    (sealed, client), (_, stranger) = (seal_request(configuration_of(receiver), b"a request") for _ in range(2))
    exchange = receiver.begin(Header.parse(sealed), WHOLE, 0.0)
    exchange.context.open(sealed[header_bytes(sealed) :])
    response = seal_response(exchange, b"an answer")
    assert open_response(client, response) == b"an answer"
    for opener, message in [(stranger, response), (client, response[:-1]), (client, b""), (client, response[:20])]:
        with pytest.raises(UnsealError):
            open_response(opener, message)


def test_a_request_is_opened_once() -> None:
    receiver = make_receiver()
    sealed, _ = seal_chunked_request(configuration_of(receiver), b"a request")
    assert open_whole(receiver, sealed)[0] == b"a request"
    with pytest.raises(UnsealError):
        open_whole(receiver, sealed)


def test_of_two_copies_at_the_same_moment_one_is_taken() -> None:
    receiver = make_receiver()
    sealed, _ = seal_chunked_request(configuration_of(receiver), b"a request")
    header = Header.parse(sealed)
    both = [receiver.begin(header, CHUNKED, 0.0) for _ in range(2)]
    for exchange in both:
        opener = ChunkOpener(exchange.context)
        opener.feed(sealed[header_bytes(sealed) :])
        assert opener.close() == b"a request"
    receiver.accept(header, 0.0)
    with pytest.raises(UnsealError):
        receiver.accept(header, 0.0)


def low_order(sealed: bytes) -> bytes:
    return sealed[: header_bytes(sealed) - 32] + bytes(32) + sealed[header_bytes(sealed) :]


FAILURES: dict[str, Callable[[bytes], bytes]] = {
    "unknown key": lambda sealed: bytes([sealed[0] ^ 1]) + sealed[1:],
    "unknown KEM": lambda sealed: sealed[:1] + b"\x00\x10" + sealed[3:],
    "the other KEM": lambda sealed: sealed[:1] + (b"\x00\x20" if sealed[1:3] == b"\x64\x7a" else b"\x64\x7a") + sealed[3:],
    "unknown KDF": lambda sealed: sealed[:3] + b"\x00\x09" + sealed[5:],
    "unknown cipher": lambda sealed: sealed[:5] + b"\xff\xff" + sealed[7:],
    "key of low order": low_order,
    "wrong tag": lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
    "broken off": lambda sealed: sealed[:-1],
    "no more than a header": lambda sealed: sealed[: header_bytes(sealed)],
    "less than a header": lambda sealed: sealed[: header_bytes(sealed) - 1],
    **{
        f"sealed to somebody else's {kem.name}": lambda sealed, kem=kem: seal_chunked_request(
            KeyConfiguration(sealed[0], kem.generate().public_bytes(), kem_id=kem.kem_id), b"a request"
        )[0]
        for kem in KEMS
    },
}


@each_kem
@pytest.mark.parametrize("change", FAILURES.values(), ids=FAILURES.keys())
def test_every_failure_is_the_same_error_and_says_nothing_about_its_cause(change: Callable[[bytes], bytes], kem: Kem) -> None:
    receiver = make_receiver()
    sealed, _ = seal_chunked_request(configuration_of(receiver, kem), b"a request")
    with pytest.raises(UnsealError) as failure:
        open_whole(receiver, change(sealed))
    error = failure.value
    assert (type(error), str(error), error.code, error.status) == (UnsealError, str(UnsealError()), "unsealing_failed", 400)
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    assert open_whole(receiver, sealed), "a failed copy does not use the request up"


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_noise_is_refused_and_never_more_than_refused(noise: bytes, size: int) -> None:
    receiver = make_receiver()
    with pytest.raises(UnsealError):
        open_whole(receiver, noise, size)
    client, _, _ = sealed_response()
    with pytest.raises(UnsealError):
        open_sealed_response(client, noise)
