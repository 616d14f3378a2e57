"""Who shares with whom is the credential's to say: nothing that a client writes into a request widens or moves its scope."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cloister.policy import Credentials, Gate, Policy
from cloister.types.scope import Scope, ScopeKind
from tests.server.running_server import ScriptedEngine, says, serving_script, write_model

CREDENTIALS, ANN = Credentials.empty().add("ann")
CREDENTIALS, BOB = CREDENTIALS.add("bob")
SALT = CREDENTIALS.tenants["ann"]

FIELDS = [
    {},
    {"scope": "public"},
    {"salt": SALT.hex()},
    {"tenant": "ann"},
    {"user": "ann"},
    {"safety_identifier": "ann"},
    {"prompt_cache_key": "ann"},
    {"metadata": {"tenant": "ann"}},
    {"store": True},
]
HEADERS = [{"x-tenant": "ann"}, {"x-cache-salt": SALT.hex()}, {"x-api-key": "clo-wrong"}, {"openai-organization": "ann"}]


@pytest.fixture(scope="module", params=["open", "team", "private", "paranoid"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, ScriptedEngine]]:
    path: Path = write_model(tmp_path_factory.mktemp("model"))
    engine = ScriptedEngine(says("yes"))
    gate = Gate(Policy(request.param), CREDENTIALS, loopback=True)
    with serving_script(path, engine, gate=gate) as running:
        yield request.param, running.url, engine


def scopes_of(url: str, engine: ScriptedEngine, api_key: str) -> list[Scope]:
    engine.taken.clear()
    statuses = []
    tries = [(fields, {}) for fields in FIELDS] + [({}, headers) for headers in HEADERS]
    for fields, headers in tries:
        body = {"model": engine.model.name, "messages": [{"role": "user", "content": "hello"}], **fields}
        sent = {**headers, "authorization": f"Bearer {api_key}"}
        statuses.append(httpx.post(f"{url}/v1/chat/completions", json=body, headers=sent, timeout=300).status_code)
    assert statuses[0] == 200
    assert set(statuses) <= {200, 400, 403}
    assert statuses.count(200) == len(engine.taken)
    return [request.scope for request in engine.taken]


def test_no_field_or_header_of_a_request_moves_its_scope(server: tuple[str, str, ScriptedEngine]) -> None:
    profile, url, engine = server
    bobs = scopes_of(url, engine, BOB)
    assert all(SALT not in scope.salt and SALT.hex().encode() not in scope.salt for scope in bobs)
    if profile in ("open", "team"):
        assert set(bobs) == {Scope(ScopeKind.TENANT, CREDENTIALS.tenants["bob"])}
        assert set(scopes_of(url, engine, ANN)) == {Scope(ScopeKind.TENANT, SALT)}
    else:
        assert {scope.kind for scope in bobs} == {ScopeKind.REQUEST}
        assert len({scope.salt for scope in bobs}) == len(bobs)  # not even the next request of one key


def test_a_cache_salt_narrows_and_never_widens(server: tuple[str, str, ScriptedEngine]) -> None:
    profile, url, engine = server
    engine.taken.clear()
    for key, salt in ((ANN, "x"), (ANN, "x"), (ANN, "y"), (BOB, "x"), (BOB, SALT.hex())):
        body = {"model": engine.model.name, "input": "hello", "cache_salt": salt}
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.post(f"{url}/v1/responses", json=body, headers=headers, timeout=300).status_code == 200
    scopes = [request.scope for request in engine.taken]
    if profile in ("open", "team"):
        assert scopes[0] == scopes[1]
        assert len({scope.seed for scope in scopes}) == 4  # bob has ann's salts, and they open nothing of hers
        tenants = [Scope(ScopeKind.TENANT, CREDENTIALS.tenants[name]) for name in ("ann", "bob")]
        assert [scope.owner for scope in scopes] == [tenants[i].seed for i in (0, 0, 0, 1, 1)]
        assert not {scope.seed for scope in scopes} & {tenant.seed for tenant in tenants}
    else:
        assert len({scope.salt for scope in scopes}) == len(scopes)


def test_a_session_secret_narrows_and_never_widens(server: tuple[str, str, ScriptedEngine]) -> None:
    profile, url, engine = server
    engine.taken.clear()
    body = {"model": engine.model.name, "messages": [{"role": "user", "content": "hello"}]}
    for key in (ANN, BOB):
        headers = {"authorization": f"Bearer {key}", "cloister-session": "ab" * 32}
        status = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300).status_code
        assert status == (403 if profile == "paranoid" else 200)
    if profile in ("open", "team"):
        anns, bobs = (request.scope for request in engine.taken)
        assert anns.seed != bobs.seed  # bob saw the secret, and it opens nothing of ann's
        assert {anns.kind, bobs.kind} == {ScopeKind.SESSION}
