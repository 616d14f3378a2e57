"""What a relay, a client or somebody on the line may try on the sealed way: spending twice, sending again, mixing parts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloister.trust.sealing import HttpRequest, OhttpContext, RequestHead
from cloister.trust.tokens import Token, authorization
from tests.private.inner import CountingApp
from tests.private.messages import Opening, ask, post
from tests.sealed_cloud import RELAY_SECRET, LoopbackCloud, open_cloud

REQUEST = HttpRequest(
    RequestHead("POST", "https", "node", "/v1/chat/completions", ((b"content-type", b"application/json"),)), b'{"n": 1}'
)


@pytest.fixture(scope="module")
def inner() -> CountingApp:
    return CountingApp()


@pytest.fixture(scope="module")
def cloud(inner: CountingApp) -> Iterator[LoopbackCloud]:
    with open_cloud(inner, num_nodes=2) as cloud:
        yield cloud


def open_answer(data: bytes, outer: OhttpContext, inner: OhttpContext) -> Opening:
    opening = Opening(outer, inner)
    opening.feed(data)
    opening.close()
    return opening


def test_one_token_on_sixteen_letters_at_once_pays_for_one(cloud: LoopbackCloud, inner: CountingApp) -> None:
    before = inner.num_answered
    token = authorization(cloud.buy(1)[0])
    letters = [cloud.seal(REQUEST, token=token, node=cloud.nodes["ab"[i % 2]]) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda letter: post(cloud, letter[0]), letters))
    answers = [open_answer(reply.content, *letter[1:]) for reply, letter in zip(replies, letters, strict=True)]
    assert sorted(answer.gateway_head.status for answer in answers if answer.gateway_head) == [200] + [401] * 15
    assert inner.num_answered == before + 1


def test_tokens_that_nobody_issued_pay_for_nothing(cloud: LoopbackCloud, inner: CountingApp) -> None:
    before = inner.num_answered
    good = cloud.buy(1)[0]
    forged = Token(bytes(32), good.challenge_digest, good.key_id, good.authenticator)
    for token in (authorization(forged), authorization(good)[:-30] + '"', "PrivateToken", f"Bearer {RELAY_SECRET}", ""):
        opening = ask(cloud, REQUEST, token=token)
        assert opening.gateway_head is not None
        assert opening.gateway_head.status == 401
    assert inner.num_answered == before


def test_a_letter_sent_again_is_refused_at_the_gateway_with_the_bytes_of_any_other_failure(
    cloud: LoopbackCloud, inner: CountingApp
) -> None:
    letter, outer, inner_exchange = cloud.seal(REQUEST)
    first = post(cloud, letter)
    assert open_answer(first.content, outer, inner_exchange).content == b"done"
    before = inner.num_answered
    again = post(cloud, letter)
    garbage = post(cloud, letter[:7] + bytes(len(letter) - 7))
    assert again.status_code >= 400
    assert (again.status_code, again.content) == (garbage.status_code, garbage.content)
    assert inner.num_answered == before


def test_the_inside_of_a_letter_sent_again_in_a_fresh_one_is_refused_at_the_node(
    cloud: LoopbackCloud, inner: CountingApp
) -> None:
    """A gateway that kept it, or a client with another token, cannot have one question answered twice."""
    kept: list[bytes] = []

    def keep(sealed: bytes) -> bytes:
        kept.append(sealed)
        return sealed

    assert ask(cloud, REQUEST, change_inner=keep).content == b"done"
    before = inner.num_answered
    opening = ask(cloud, REQUEST, change_inner=lambda sealed: kept[0])
    assert opening.gateway_head is not None
    assert opening.gateway_head.status in (502, 503)
    assert inner.num_answered == before


def test_the_inside_of_a_letter_opens_at_the_node_that_the_client_drew_and_at_no_other(
    cloud: LoopbackCloud, inner: CountingApp
) -> None:
    fresh: list[bytes] = []
    cloud.seal(REQUEST, node=cloud.nodes["a"], change_inner=lambda sealed: fresh.append(sealed) or sealed)
    before = inner.num_answered
    opening = ask(cloud, REQUEST, node=cloud.nodes["b"], change_inner=lambda sealed: fresh[0])
    assert opening.gateway_head is not None
    assert opening.gateway_head.status in (502, 503)
    assert inner.num_answered == before


def test_a_letter_with_an_old_date_is_refused_and_its_token_is_left(cloud: LoopbackCloud, inner: CountingApp) -> None:
    before = inner.num_answered
    token = authorization(cloud.buy(1)[0])
    old = ask(cloud, REQUEST, token=token, date_s=cloud.now() - 3600)
    assert old.gateway_head is not None
    assert old.gateway_head.status == 400
    assert inner.num_answered == before
    assert ask(cloud, REQUEST, token=token).content == b"done"


def test_a_client_that_writes_more_than_its_token_pays_for_gets_no_answer(cloud: LoopbackCloud, inner: CountingApp) -> None:
    before = inner.num_answered
    fields = (*REQUEST.head.fields, (b"cloister-token-budget", b"999999"))
    opening = ask(cloud, HttpRequest(RequestHead("POST", "https", "node", "/v1/chat/completions", fields), REQUEST.content))
    assert opening.gateway_head is not None
    assert opening.gateway_head.status == 502
    assert inner.num_answered == before
