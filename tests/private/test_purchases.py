"""Tokens bought through a relay, at loopback sockets: who carries a purchase can neither read, change, repeat nor weigh it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cloister.client import token_purchase
from cloister.client.errors import NoTokensError
from cloister.client.protocol import Ask, Reply
from cloister.client.token_purchase import Buyer
from cloister.private import issuer as issuer_module
from cloister.private.purchases import ANSWER_STEP_S, wait_s
from cloister.trust.sealing import KEMS, X25519, HttpRequest, RequestHead, parse_keys
from cloister.trust.tokens import Token, authorization
from cloister.trust.tokens.issuance import Pending
from cloister.trust.tokens.purchase import PURCHASE_BYTES, PURCHASE_PATH, REQUEST_TYPE, STATEMENT_PATH
from cloister.trust.transparency.epoch import Epoch, GatewayEntry, NodeEntry
from tests.loopback import Seen
from tests.private.inner import ANSWER, Inner
from tests.private.messages import ask, http
from tests.sealed_cloud import GATEWAY_NAME, LoopbackCloud, open_cloud

COUNT = 3
"""Tokens of a batch here: what each costs is known from elsewhere."""


@dataclass
class Market:
    """A cloud with an issuer behind its relay, and what a client sends."""

    cloud: LoopbackCloud
    answers: list[tuple[Ask, Reply]] = field(default_factory=list)
    before: int = 0

    @property
    def issuer(self) -> list[Seen]:
        return self.cloud.issuing.seen

    @property
    def epoch(self) -> Epoch:
        now, issuers = int(self.cloud.now()), self.cloud.honest_keys()
        node = NodeEntry("ab" * 32, 1, b"keys", "00" * 32)
        gateway = GatewayEntry(GATEWAY_NAME, b"keys")
        return Epoch(1, now, now + 600, gateway, issuers, (node,), "00" * 32, "private", ())

    def buyer(self, api_key: str | None = None) -> Buyer:
        issuer = self.cloud.trust.issuer
        assert issuer is not None
        return Buyer(issuer, f"{self.cloud.relay_url}/", api_key or self.cloud.api_key)

    def buy(
        self,
        buyer: Buyer,
        count: int = COUNT,
        carry: Callable[[Ask, Callable[[Ask], Reply]], Reply] | None = None,
        late_s: float = 0.0,
    ) -> list[Token]:
        step = buyer.buy(self.epoch, self.cloud.now() - late_s, count)
        try:
            given = next(step)
            while True:
                reply = self._carry(given) if carry is None else carry(given, self._carry)
                self.answers.append((given, reply))
                given = step.send(reply)
        except StopIteration as done:
            tokens: list[Token] = done.value
            return tokens

    def counted(self) -> int:
        """Tokens that the issuer counted for its only customer in this test."""
        row = self.cloud.quota._database.execute("SELECT sum(count) FROM issued").fetchone()
        return int(row[0] or 0) - self.before

    @staticmethod
    def _carry(given: Ask) -> Reply:
        reply = http.request(given.method, given.url, headers=given.headers, content=given.body)
        return Reply(reply.status_code, reply.headers.get("content-type", ""), reply.content)


@contextmanager
def open_market(**options: float) -> Iterator[Market]:
    with open_cloud(Inner(), **options) as cloud:  # type: ignore[arg-type]
        yield Market(cloud)


@pytest.fixture(scope="module")
def opened() -> Iterator[Market]:
    with open_market() as market:
        yield market


@pytest.fixture
def market(opened: Market) -> Iterator[Market]:
    """The one market of all tests, with nothing written down yet."""
    cloud, credentials = opened.cloud, opened.cloud.credentials
    cloud.start_issuer()
    for record in (cloud.relay, cloud.gateway, cloud.issuing):
        record.seen.clear()
    yield replace(opened, answers=[], before=opened.counted())
    cloud.credentials = credentials


def test_a_token_bought_through_the_relay_is_spent_and_nobody_on_the_way_saw_key_message_or_token(
    market: Market, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made: list[Pending] = []
    draw = token_purchase.request_tokens
    monkeypatch.setattr(token_purchase, "request_tokens", lambda *given: made.append(draw(*given)) or made[-1])  # type: ignore[func-returns-value]
    tokens = market.buy(market.buyer())
    cloud = market.cloud
    answer = ask(
        cloud, HttpRequest(RequestHead("POST", "https", "localhost", "/v1/echo"), b"hi"), token=authorization(tokens[0])
    )
    assert answer.content == ANSWER + b"hi", "the token pays"

    (pending,) = made
    secrets = [cloud.api_key.encode(), *(request.blinded for request in pending.requests)]
    secrets += [part for token in tokens for part in (token.nonce, token.authenticator)]
    carried = b"".join(seen.everything for record in (cloud.relay, cloud.gateway) for seen in record.seen)
    assert not [secret for secret in secrets if secret in carried]
    assert not [secret for secret in secrets if secret.hex() in caplog.text or repr(secret) in caplog.text]
    assert cloud.api_key not in caplog.text
    assert [seen.path for seen in cloud.gateway.posts()] == ["/"], "the gateway is not on the way of a purchase"


def test_the_issuer_sees_nothing_of_the_client_but_what_was_sealed(market: Market) -> None:
    headers = {"user-agent": "ann's", "cookie": "a=b", "x-forwarded-for": "192.0.2.7", "date": "yesterday"}
    market.buy(
        market.buyer(),
        carry=lambda given, go_on: go_on(Ask(given.who, given.url, given.method, {**given.headers, **headers}, given.body)),
    )
    statement, purchase = market.issuer
    assert (statement.path, purchase.path) == (STATEMENT_PATH, PURCHASE_PATH)
    assert dict(purchase.headers).keys() == {b"host", b"content-type", b"content-length"}
    assert not [value for value in headers.values() if value.encode() in statement.everything + purchase.everything]


def test_every_purchase_and_every_answer_have_one_length(market: Market) -> None:
    cloud = market.cloud
    market.buy(market.buyer(), 1)
    market.buy(market.buyer(), 20)
    for api_key, count in (("k", 1), ("k" * 500, 20), (cloud.api_key, 20)):
        if api_key == cloud.api_key:
            cloud.credentials = cloud.credentials.remove("ann")
        with pytest.raises(NoTokensError, match="API key"):
            market.buy(market.buyer(api_key), count)
    sizes = {(len(given.body), len(reply.body)) for given, reply in market.answers if given.method == "POST"}
    assert len(sizes) == 1
    ((asked, answered),) = sizes
    assert PURCHASE_BYTES < answered < asked < PURCHASE_BYTES + KEMS[0].enc_bytes + 64
    assert {seen.status for seen in market.issuer} == {200}


def test_the_relay_cannot_tell_a_refusal_from_a_batch_by_the_time_that_it_takes(market: Market) -> None:
    def time_it(given: Ask, go_on: Callable[[Ask], Reply]) -> Reply:
        began_s = time.monotonic()
        reply = go_on(given)
        if given.method == "POST":
            taken_s.append(time.monotonic() - began_s)
        return reply

    taken_s: list[float] = []
    for count in (1, 20):
        market.buy(market.buyer(), count, carry=time_it)
    with pytest.raises(NoTokensError, match="API key"):
        market.buy(market.buyer("another"), carry=time_it)
    with pytest.raises(NoTokensError, match="clock"):
        market.buy(market.buyer(), carry=time_it, late_s=-400)
    assert min(taken_s) >= ANSWER_STEP_S


@pytest.mark.parametrize(("elapsed_s", "leaves_s"), [(0.0, 0.25), (0.001, 0.25), (0.249, 0.25), (0.251, 0.5), (1.9, 2.0)])
def test_answers_leave_at_multiples_of_one_time_after_their_request_was_opened(elapsed_s: float, leaves_s: float) -> None:
    assert elapsed_s + wait_s(elapsed_s) == pytest.approx(leaves_s)


def test_what_does_not_fit_a_purchase_is_refused_before_it_is_sent(market: Market) -> None:
    with pytest.raises(NoTokensError, match="more than the 8,192 bytes"):
        market.buy(market.buyer("k" * 9000))
    assert not [seen for seen in market.issuer if seen.method == "POST"]


def test_a_purchase_that_is_sent_again_is_refused_and_counted_once(market: Market) -> None:
    market.buy(market.buyer())
    sent = market.answers[-1][0]
    for url in (sent.url, f"{market.cloud.relay_url}/issuer"):
        copy = http.post(url, content=sent.body, headers=sent.headers)
        assert (copy.status_code, copy.headers["content-type"]) == (400, "application/problem+json")
    assert market.counted() == COUNT


def test_a_purchase_that_is_dated_otherwise_is_refused_so_that_no_copy_outlives_the_memory_of_copies(market: Market) -> None:
    with pytest.raises(NoTokensError, match="set this machine's clock"):
        market.buy(market.buyer(), late_s=-400)
    assert market.counted() == 0


def test_a_batch_whose_answer_was_lost_is_bought_once_and_given_again(market: Market) -> None:
    buyer, lost = market.buyer(), list[Reply]()

    def lose(given: Ask, go_on: Callable[[Ask], Reply]) -> Reply:
        reply = go_on(given)
        if given.method == "POST":
            lost.append(reply)
            return Reply(502, "application/problem+json", b'{"title":"The issuer broke off its answer."}')
        return reply

    with pytest.raises(NoTokensError, match="did not carry the purchase"):
        market.buy(buyer, carry=lose)
    assert lost[0].status == 200
    assert len(market.buy(buyer)) == COUNT
    assert market.counted() == COUNT
    assert len(market.buy(buyer)) == COUNT
    assert market.counted() == 2 * COUNT, "the next batch is another one"


def test_an_answer_that_was_changed_on_the_way_brings_no_token(market: Market) -> None:
    def change(given: Ask, go_on: Callable[[Ask], Reply]) -> Reply:
        reply = go_on(given)
        changed = reply.body[:-1] + bytes([reply.body[-1] ^ 1])
        return Reply(reply.status, reply.media_type, changed) if given.method == "POST" else reply

    with pytest.raises(NoTokensError, match="changed on the way"):
        market.buy(market.buyer(), carry=change)


def test_an_issuer_that_was_started_anew_is_asked_for_its_new_key(market: Market) -> None:
    buyer = market.buyer()
    market.buy(buyer)
    market.cloud.start_issuer()
    assert len(market.buy(buyer)) == COUNT
    assert [given.method for given, _ in market.answers] == ["GET", "POST", "POST", "GET", "POST"]


def test_a_relay_that_refuses_every_purchase_is_not_asked_for_ever(market: Market) -> None:
    def refuse(given: Ask, go_on: Callable[[Ask], Reply]) -> Reply:
        return Reply(400, "application/problem+json", b"") if given.method == "POST" else go_on(given)

    with pytest.raises(NoTokensError, match="did not carry"):
        market.buy(market.buyer(), carry=refuse)
    assert len(market.answers) == 4


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [("text/plain", b"", 415), (REQUEST_TYPE, b"noise", 400), (REQUEST_TYPE, bytes(3 * PURCHASE_BYTES), 413)],
    ids=["another type", "noise", "too long"],
)
def test_the_relay_carries_nothing_else_to_the_issuer(market: Market, kind: str, body: bytes, status: int) -> None:
    reply = http.post(f"{market.cloud.relay_url}/issuer", content=body, headers={"content-type": kind})
    assert reply.status_code == status
    assert http.get(f"{market.cloud.relay_url}/issuer").status_code == 405
    for path in ("/.well-known/private-token-issuer-directory", "/token-request", "/ohttp"):
        assert http.get(market.cloud.relay_url + path).status_code == 404
    assert market.counted() == 0


def test_an_issuer_that_is_silent_ends_the_wait_at_the_relay() -> None:
    with open_market(issuer_timeout_s=0.3) as market:

        async def silent(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        market.cloud.issuing.app = silent
        with pytest.raises(NoTokensError, match="504"):
            market.buy(market.buyer())


def test_a_purchase_that_does_not_arrive_ends_the_wait_at_the_issuer(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_module, "BODY_S", 0.2)
    url = httpx.URL(market.cloud.issuer_url)
    with socket.create_connection((url.host, url.port or 80), timeout=300) as connection:
        head = f"POST /ohttp HTTP/1.1\r\nhost: issuer\r\ncontent-type: {REQUEST_TYPE}\r\ncontent-length: 8000\r\n\r\n"
        connection.sendall(head.encode() + b"x")
        assert connection.recv(4096).startswith(b"HTTP/1.1 504 ")


def test_a_client_that_asks_for_post_quantum_encryption_shows_no_api_key_to_an_issuer_without(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        token_purchase, "parse_keys", lambda keys: [one for one in parse_keys(keys) if one.kem_id == X25519.kem_id]
    )
    market.buy(market.buyer())  # who does not ask for it is served
    asker = market.buyer()
    asker._needs_post_quantum = True
    num_before = len([given for given, _ in market.answers if given.method == "POST"])
    with pytest.raises(NoTokensError, match=r"issuer offers DHKEM.* only"):
        market.buy(asker)
    assert len([given for given, _ in market.answers if given.method == "POST"]) == num_before
