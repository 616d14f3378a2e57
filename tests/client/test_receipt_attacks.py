"""What a node or a network might pass off as a receipt, and what lengths tell of who asks for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.client.envelope import BrokenAnswerError, SealedEnvelope, seal_for_node
from cloister.client.receipts import ReceiptOrder, order_receipt
from cloister.private.sealed_reply import AnswerEnding
from cloister.private.unsealing import LocalUnsealer
from cloister.trust.attestation.evidence import Statement
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.receipts import FIELD, Receipt, ReceiptError, encode64
from cloister.trust.sealing import (
    CHUNKED,
    BinaryHttpWriter,
    Header,
    HttpRequest,
    ResponseHead,
    ResponseSealer,
    UnsealError,
    header_bytes,
)
from cloister.types.errors import PolicyError
from tests.client.test_envelope import GATEWAY, NODE, NODE_ENTRY, NOW, ask, epoch_of, open_request

PROFILE = "team"
HELLO = b"hello"
NODE_KEYS = LocalUnsealer(NODE, lambda: 0.0)


def make_evidence(profile: str = PROFILE, receipt_key: bytes | None = None) -> bytes:
    statement = Statement(
        release="00" * 32,
        model="00" * 32,
        profile=profile,
        profile_digest="00" * 32,
        hardening={},
        keys=NODE.ring.publish(),
        capacity=1,
        not_before=int(NOW),
        not_after=int(NOW) + 3600,
        receipt_key=NODE.ring.publish_receipt_key() if receipt_key is None else receipt_key,
    )
    return SoftwareAttester().attest(statement.encode()).encode()


def order(keep: Callable[[Receipt], None] = lambda receipt: None) -> ReceiptOrder:
    return order_receipt(epoch_of(PROFILE), b"bundle", make_evidence(), keep)


def write(content: bytes = b"{}", asked: ReceiptOrder | None = None) -> SealedEnvelope:
    return seal_for_node(ask(content), NODE_ENTRY, epoch_of(PROFILE), 'PrivateToken token="t"', NOW, asked)


class Conversation:
    """A request that asks for a receipt, at its node, which may say what it likes."""

    def __init__(self, content: bytes = b"{}") -> None:
        self.kept: list[Receipt] = []
        envelope = write(content, order(self.kept.append))
        outer, self._gateway = open_request(GATEWAY, envelope.sealed)
        self.request, self.exchange = open_request(NODE, outer.content)
        self._answer = envelope.answer

    def end(self, content: bytes = HELLO, *, status: int = 200, profile: str = PROFILE) -> bytes:
        """The end of an answer, with the receipt of a node under `profile`."""
        writer = BinaryHttpWriter()
        writer.head(ResponseHead(200))
        ending = AnswerEnding(NODE_KEYS, self.exchange, self.request, profile)
        ending.add(content)
        return asyncio.run(ending.end(writer, status))

    def read(self, end: bytes, content: bytes = HELLO, status: int = 200) -> bytes:
        """What the client makes of the answer."""
        inner, writer = ResponseSealer(self.exchange), BinaryHttpWriter()
        message = inner.finish(writer.head(ResponseHead(status)) + writer.content(content) + end)
        outer, carried = ResponseSealer(self._gateway), BinaryHttpWriter()
        head = carried.head(ResponseHead(200, ((b"content-type", CHUNKED.response_type.encode()),)))
        received = self._answer.feed(outer.finish(head + carried.content(message) + carried.end()))
        return received + self._answer.close()

    def refusal(self, end: bytes, content: bytes = HELLO, status: int = 200) -> str:
        with pytest.raises(BrokenAnswerError) as caught:
            self.read(end, content, status)
        assert self.kept == []
        return str(caught.value)


def test_an_honest_receipt_is_kept_when_the_answer_is_complete() -> None:
    talk = Conversation()
    assert talk.read(talk.end()) == HELLO
    assert len(talk.kept) == 1


def test_the_receipt_of_another_answer_is_refused() -> None:
    talk = Conversation()
    assert "not one of this node" in talk.refusal(talk.end(b"hullo"))


def test_the_receipt_of_another_status_is_refused() -> None:
    talk = Conversation()
    assert "not one of this node" in talk.refusal(talk.end(status=200), status=403)


def test_the_receipt_of_a_part_of_the_answer_is_refused() -> None:
    talk = Conversation()
    assert "not one of this node" in talk.refusal(talk.end(HELLO[:2]))


def test_a_receipt_cannot_be_replayed_under_another_request_not_even_an_equal_one() -> None:
    first, second = Conversation(), Conversation()
    assert "not one of this node" in second.refusal(first.end())


def test_a_key_that_was_not_attested_signs_in_vain() -> None:
    talk = Conversation()
    signature = Ed25519PrivateKey.generate().sign(b"anything")
    writer = BinaryHttpWriter()
    writer.head(ResponseHead(200))
    assert "not one of this node" in talk.refusal(writer.end(((FIELD, encode64(signature)),)))


def test_a_node_that_answered_under_another_profile_than_its_evidence_says_gives_itself_away() -> None:
    talk = Conversation()
    assert "not one of this node" in talk.refusal(talk.end(profile="open"))


@pytest.mark.parametrize(
    "end", [b"\0\0", b"\0\0" + bytes(103), b"\0\x10cloister-receipt\x03abc\0"], ids=["bare", "padded", "short"]
)
def test_an_answer_without_the_receipt_that_was_asked_for_is_broken(end: bytes) -> None:
    assert "without the receipt" in Conversation().refusal(end)


def test_a_stream_that_ended_early_has_no_receipt() -> None:
    talk = Conversation()
    assert "broke off" in talk.refusal(b"")


def test_a_node_signs_nothing_for_a_request_that_it_did_not_open() -> None:
    envelope = write()
    outer, _ = open_request(GATEWAY, envelope.sealed)
    header = Header.parse(outer.content[: header_bytes(outer.content)])
    with pytest.raises(UnsealError):
        NODE.sign(header, b"anything", 0.0)


def test_an_answer_that_outlasts_the_key_ends_without_a_receipt_and_in_the_same_length() -> None:
    talk = Conversation()
    late = LocalUnsealer(NODE, lambda: 1e9)
    lengths = set()
    for unsealer in (NODE_KEYS, late):
        writer = BinaryHttpWriter()
        writer.head(ResponseHead(200))
        lengths.add(len(asyncio.run(AnswerEnding(unsealer, talk.exchange, talk.request, PROFILE).end(writer, 200))))
    assert len(lengths) == 1


@pytest.mark.parametrize("profile", ["open", "team", "private"])
def test_the_end_of_an_answer_is_as_long_for_who_asks_as_for_who_does_not(profile: str) -> None:
    asking, silent = Conversation(), Conversation()
    silent.request = HttpRequest(ask().head, b"{}")
    ends = [talk.end(profile=profile) for talk in (asking, silent)]
    assert len(ends[0]) == len(ends[1])
    assert any(ends[0])
    assert not any(ends[1])  # zeros, which are padding


def test_an_answer_is_signed_for_who_asks_and_for_who_does_not_so_that_times_do_not_tell() -> None:
    signed: list[bytes] = []

    class Counting(LocalUnsealer):
        async def sign(self, header: Header, message: bytes) -> bytes:
            signed.append(message)
            return await super().sign(header, message)

    for fields in (Conversation().request.head.fields, ()):
        talk, writer = Conversation(), BinaryHttpWriter()
        writer.head(ResponseHead(200))
        request = HttpRequest(replace(talk.request.head, fields=fields), b"{}")
        asyncio.run(AnswerEnding(Counting(NODE, lambda: 0.0), talk.exchange, request, PROFILE).end(writer, 200))
    assert len(signed) == 2
    assert len(signed[0]) == len(signed[1])


def test_a_request_is_as_long_for_who_asks_as_for_who_does_not_at_every_length() -> None:
    """Around the edge of a bucket the field would else tip a request over it."""
    wanted = order()
    for size in range(600, 1000):
        content = b"x" * size
        assert len(write(content).sealed) == len(write(content, wanted).sealed), size


def test_paranoid_leaves_nothing_that_can_be_shown() -> None:
    with pytest.raises(PolicyError, match=r"T6\.receipts\.paranoid"):
        order_receipt(epoch_of("paranoid"), b"bundle", make_evidence("paranoid"), lambda receipt: None)
    talk = Conversation()
    with pytest.raises(PolicyError, match=r"T6\.receipts\.paranoid"):
        talk.end(profile="paranoid")


def test_a_node_whose_evidence_binds_no_key_is_not_asked() -> None:
    with pytest.raises(ReceiptError, match="binds no key"):
        order_receipt(epoch_of(PROFILE), b"bundle", make_evidence(receipt_key=b""), lambda receipt: None)


def test_a_wish_that_cannot_be_read_is_refused() -> None:
    talk = Conversation()
    head = talk.request.head
    for value in (b"?1", encode64(bytes(63)), encode64(bytes(64)) + b"="):
        fields = (*(line for line in head.fields if line[0] != FIELD), (FIELD, value))
        with pytest.raises(ReceiptError, match="64 bytes in base64url"):
            AnswerEnding(NODE_KEYS, talk.exchange, HttpRequest(replace(head, fields=fields), b"{}"), PROFILE)
