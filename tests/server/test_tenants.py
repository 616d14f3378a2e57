"""Figures of tenants: an operator sees them, and nobody else learns of anybody."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from cloister.policy import Credentials
from cloister.server.metrics import tenants
from cloister.server.metrics.tenants import TenantFigures
from cloister.types.events import Arrived, Ended, Preempted, Scheduled
from cloister.types.request import FinishReason, Request, SamplingParams
from tests.server.running_server import MODEL, ScriptedEngine, make_gate, says, serving, serving_script, start_speaking
from tests.server.test_bad_input import check_error

PATH = "/metrics/tenants"


@contextmanager
def served(model_path: Path, profile: str = "team") -> Iterator[dict[str, httpx.Client]]:
    """Yields a client with the key of each tenant; `boss` is an operator's."""
    credentials, keys = Credentials.empty(), {}
    for name in ("ann", "bob", "boss"):
        credentials, keys[name] = credentials.add(name, is_operator=name == "boss")
    with serving(model_path, lambda: start_speaking(model_path), gate=make_gate(profile, credentials)) as server:
        headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(httpx.Client(base_url=server.url, headers=of_name))
                for name, of_name in headers.items()
            }


def complete(client: httpx.Client, prompt: str, max_tokens: int) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_an_operator_sees_what_each_tenant_did_and_a_tenant_sees_nothing(model_path: Path) -> None:
    with served(model_path) as clients:
        assert clients["boss"].get("/v1/policy").json()["tenants"] is True
        complete(clients["ann"], "hello", 3)
        complete(clients["ann"], "hello", 3)
        complete(clients["bob"], "x", 1)
        told = clients["boss"].get(PATH).json()
        idle = {"running": 0, "waiting": 0}
        assert told["data"] == [
            {"name": "ann", "requests": 2, "prompt_tokens": 10, "generation_tokens": 6, **idle},
            {"name": "bob", "requests": 1, "prompt_tokens": 1, "generation_tokens": 1, **idle},
        ]
        error = check_error(clients["ann"].get(PATH), 403)
        assert "only an operator" in error["message"]
        assert "bob" not in clients["boss"].get("/metrics").text


FIGURES = ["/metrics", "/metrics/history", "/load"]


@pytest.mark.parametrize(
    ("profile", "path"),
    [*itertools.product(["open", "team"], FIGURES), ("private", "/metrics"), ("paranoid", "/metrics")],
)
def test_figures_that_move_with_the_requests_of_other_tenants_are_for_operators(
    model_path: Path, profile: str, path: str
) -> None:
    with served(model_path, profile) as clients:
        assert "only an operator" in check_error(clients["ann"].get(path), 403)["message"]
        assert clients["boss"].get(path).status_code == 200


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_tells_operators_of_no_tenant(model_path: Path, profile: str) -> None:
    with served(model_path, profile) as clients:
        error = check_error(clients["boss"].get(PATH), 403)
        assert f"T6.profiling.tenant-figures.{profile}" in error["message"]
        assert clients["boss"].get("/v1/policy").json()["tenants"] is False


def test_a_server_without_keys_knows_of_no_tenants(model_path: Path) -> None:
    with serving_script(model_path, ScriptedEngine(says("x"))) as server:
        assert check_error(httpx.get(server.url + PATH), 404)["code"] == "no_tenants"
        assert httpx.get(server.url + "/v1/policy").json()["tenants"] is False


def asked(request_id: str, tenant: str) -> Request:
    return Request(request_id=request_id, token_ids=[1, 2], sampling=SamplingParams(), tenant=tenant)


def test_what_runs_and_waits_is_counted_until_it_ends_however_it_ends() -> None:
    figures = TenantFigures()

    def now() -> tuple[int, int]:
        (one,) = figures.report().data
        return one.running, one.waiting

    figures.begin(asked("a", "ann"))
    figures.observe(Arrived("a", 0.0, 2))
    assert now() == (0, 1)
    figures.observe(Scheduled("a", 0.0, 0.0, 0, 2))
    assert now() == (1, 0)
    figures.observe(Preempted("a", 0.0))
    assert now() == (0, 1)
    figures.observe(Scheduled("a", 0.0, 0.0, 0, 2, resumed=True))
    figures.observe(Ended("a", 1, 0, 1.0, FinishReason.STOP, 2, 5, 0, arrival_s=0.0, first_token_s=0.5, last=True))
    figures.end("a")
    assert now() == (0, 0)
    figures.begin(asked("b", "ann"))
    figures.end("b")  # the engine did not take it
    assert now() == (0, 0)
    (one,) = figures.report().data
    assert (one.requests, one.prompt_tokens, one.generation_tokens) == (2, 2, 5)


def spend(figures: TenantFigures, request_id: str, tenant: str, num_tokens: int) -> None:
    """One request from its beginning to its end."""
    figures.begin(asked(request_id, tenant))
    figures.observe(Scheduled(request_id, 0.0, 0.0, 0, 2))
    figures.observe(
        Ended(request_id, 1, 0, 1.0, FinishReason.STOP, 2, num_tokens, 0, arrival_s=0.0, first_token_s=0.5, last=True)
    )
    figures.end(request_id)


def test_who_uses_most_does_not_hide_behind_a_crowd_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_TENANTS", 4)
    figures = TenantFigures()
    spend(figures, "early", "ann", 100)
    for i in range(20):
        spend(figures, f"crowd {i}", f"name {i}", 1)
    spend(figures, "late", "mallory", 1000)
    for i in range(20):
        spend(figures, f"crowd {i} again", f"name {i}", 1)
    told = figures.report().data
    assert [(one.name, one.generation_tokens) for one in told if one.name is not None][:2] == [("mallory", 1000), ("ann", 100)]
    assert len(told) <= 5
    assert sum(one.requests for one in told) == 42
    assert sum(one.generation_tokens for one in told) == 1140


def test_a_tenant_with_a_request_open_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_TENANTS", 2)
    figures = TenantFigures()
    for name in ("ann", "bob"):
        figures.begin(asked(name, name))
    spend(figures, "c", "carol", 5)
    assert [(one.name, one.waiting) for one in figures.report().data] == [(None, 0), ("ann", 1), ("bob", 1)]


def test_people_without_number_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_TENANTS", 2)
    figures = TenantFigures()
    for i in range(5):
        figures.begin(asked(str(i), f"person {i % 4}"))
    assert [(one.name, one.requests) for one in figures.report().data] == [("person 0", 2), ("person 1", 1), (None, 2)]
