"""An audit counts a draw as lost however the gateway withholds it: by a refusal that ends the request, or by silence."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

import httpx
import pytest

from cloister.client.routing_audit.charges import judge_audit
from cloister.client.routing_audit.cloud import SealedCloud
from cloister.private.nodes import NodeBook
from cloister.private.problems import ProblemError
from cloister.private.upstream import Upstream
from tests.client.routing_audit.operators import CAPTURED, Operator, is_victim
from tests.client.routing_audit.test_audit import HONEST, Named, audit, kinds

held: ContextVar[list[str]] = ContextVar("held")
"""Requests that the gateway holds for ever; the test's network turns each into the silence that its client hears."""


class Withholding(NodeBook):
    """Answers one user's requests for other nodes than the captured one in a way of its own."""

    def __init__(self, cloud: SealedCloud, upstream: Upstream, silent: bool) -> None:
        super().__init__([], upstream, cloud.now)
        self._cloud, self._silent = cloud, silent

    async def find(self, node_id: str) -> str | None:
        honest = await super().find(node_id)
        if not is_victim() or honest == self._cloud.nodes[CAPTURED].url:
            return honest
        if not self._silent:
            raise ProblemError(400, "This request is wrong.")
        held.get().append(node_id)
        raise ProblemError(504, "This answer never comes.")


def withhold(silent: bool) -> Operator:
    return Operator("loss", lambda cloud, upstream: Withholding(cloud, upstream, silent))


def test_a_refusal_that_ends_the_request_is_a_loss(directory: Path) -> None:
    verdict = judge_audit(audit(directory, withhold(False), 22))
    assert "loss" in kinds(verdict), verdict


def test_silence_is_a_loss(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry = Named.handle_async_request

    async def hold(self: Named, request: httpx.Request) -> httpx.Response:
        held.set([])
        answer = await carry(self, request)
        if held.get():
            raise httpx.ReadTimeout("no answer", request=request)
        return answer

    monkeypatch.setattr(Named, "handle_async_request", hold)
    seen = audit(directory, withhold(True), 22)
    assert any(seconds == float("inf") for _, seconds in seen.times), "the victim waited for nothing"
    verdict = judge_audit(seen)
    assert "loss" in kinds(verdict), verdict


def test_requests_of_an_audit_have_the_lengths_of_those_of_users(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set()
    carry = Named.handle_async_request

    async def look(self: Named, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and request.url.path == "/":
            lengths.add(len(await request.aread()))
        return await carry(self, request)

    monkeypatch.setattr(Named, "handle_async_request", look)
    verdict = judge_audit(audit(directory, HONEST, 22))
    assert verdict.charges == ()
    assert len(lengths) > 2, "a gateway that leaves the shortest requests alone is never found"
