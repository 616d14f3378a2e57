"""The budget that a client seals into its request, against a gateway that tells the node another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from cloister.private import gateway
from cloister.trust.sealing import HttpRequest, RequestHead
from tests.private.inner import CountingApp
from tests.private.messages import Opening, ask
from tests.sealed_cloud import LoopbackCloud, open_cloud

PAID = 512
FIELD = b"cloister-token-budget"


@pytest.fixture(scope="module")
def inner() -> CountingApp:
    return CountingApp()


@pytest.fixture(scope="module")
def cloud(inner: CountingApp) -> Iterator[LoopbackCloud]:
    with open_cloud(inner, budget=PAID) as cloud:
        yield cloud


def request(*sealed: bytes) -> HttpRequest:
    fields = tuple((FIELD, value) for value in sealed)
    return HttpRequest(RequestHead("POST", "https", "node", "/v1/completions", fields), b"{}")


@contextmanager
def told(value: str | None) -> Iterator[None]:
    """Has the gateway tell nodes this, whatever was paid; None leaves the field out."""
    honest = gateway.Upstream.ask

    def lie(self: gateway.Upstream, method: str, url: str, headers: dict[str, str], *rest: Any, **named: Any) -> Any:
        told = {**headers, FIELD.decode(): value or ""}
        if value is None:
            del told[FIELD.decode()]
        return honest(self, method, url, told, *rest, **named)

    with patch.object(gateway.Upstream, "ask", lie):
        yield


def is_refused_by_node(opening: Opening) -> bool:
    """Whether the node refused in the clear, which a client counts as a failed draw."""
    assert opening.gateway_head is not None
    return opening.gateway_head.status == 502 and opening.head is None


def test_a_budget_that_both_agree_on_is_what_the_answer_gets(cloud: LoopbackCloud, inner: CountingApp) -> None:
    assert ask(cloud, request(b"000000512")).content == b"done"
    assert inner.budgets[-1] == PAID


@pytest.mark.parametrize("value", ["0", "1", "511", "513", "999999999", None, "much", "1000000512"])
def test_a_gateway_that_tells_a_node_another_budget_than_the_client_is_refused_before_anything_runs(
    cloud: LoopbackCloud, inner: CountingApp, value: str | None
) -> None:
    before = len(inner.budgets)
    with told(value):
        opening = ask(cloud, request(b"000000512"))
    assert is_refused_by_node(opening)
    assert len(inner.budgets) == before


def test_a_node_says_in_the_clear_that_the_budgets_differ_and_neither_of_them(cloud: LoopbackCloud) -> None:
    with told("1"):
        ask(cloud, request(b"000000512"))
    seen = cloud.node.posts()[-1]
    assert seen.status == 409
    assert b"budget" in seen.response
    assert b"512" not in seen.response


@pytest.mark.parametrize("sealed", [b"999999999", b"000000001", b"512 tokens", b"", "\u0665\u0661\u0662".encode(), b"None"])
def test_a_client_that_writes_another_budget_than_its_token_has_gets_no_answer(
    cloud: LoopbackCloud, inner: CountingApp, sealed: bytes
) -> None:
    before = len(inner.budgets)
    assert is_refused_by_node(ask(cloud, request(sealed)))
    assert len(inner.budgets) == before


def test_a_client_that_writes_two_budgets_is_told_so_sealed(cloud: LoopbackCloud, inner: CountingApp) -> None:
    before = len(inner.budgets)
    opening = ask(cloud, request(b"000000512", b"000000512"))
    assert opening.head is not None
    assert opening.head.status == 400
    assert len(inner.budgets) == before


def test_a_client_that_writes_none_gets_what_the_gateway_says(cloud: LoopbackCloud, inner: CountingApp) -> None:
    with told("7"):
        assert ask(cloud, request()).content == b"done"
    assert inner.budgets[-1] == 7
