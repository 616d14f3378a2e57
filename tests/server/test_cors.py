"""Pages of other origins: none may read a reply unless the operator named theirs, and a preflight needs no key."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from cloister.policy import Credentials
from cloister.server.middleware.cors import parse_origins
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError
from tests.server.running_server import MODEL, ScriptedEngine, make_gate, says, serving_script
from tests.server.test_bad_input import check_error

GOOD, EVIL = "https://chat.example.org", "https://evil.example"
CONFIG = ServerConfig(port=0, api_keys="keys.json", allowed_origins=f"{GOOD}, http://localhost:3000", drain_timeout_s=1.0)
KEYS, KEY = Credentials.empty().add("ann")
ASK = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type, x-sdk-lang"}


@contextmanager
def reached(model_path, **changes: object):
    with (
        serving_script(
            model_path, ScriptedEngine(says("ok")), gate=make_gate("team", KEYS), config=replace(CONFIG, **changes)
        ) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client


def complete(client: httpx.Client, **headers: str) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)


def test_a_preflight_of_a_named_origin_is_answered_without_a_key(model_path):
    with reached(model_path) as client:
        reply = client.options("/v1/chat/completions", headers={"origin": GOOD, **ASK})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == GOOD
        assert reply.headers["access-control-allow-methods"] == "GET, POST, DELETE"
        assert reply.headers["access-control-allow-headers"] == ASK["access-control-request-headers"]
        assert reply.headers["vary"] == "origin"
        assert reply.content == b""


def test_a_preflight_of_another_origin_is_refused(model_path):
    with reached(model_path) as client:
        reply = client.options("/v1/chat/completions", headers={"origin": EVIL, **ASK})
        assert check_error(reply, 403)["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
        assert EVIL not in reply.text


def test_a_named_origin_may_read_replies_and_errors_and_still_needs_its_key(model_path):
    with reached(model_path) as client:
        reply = complete(client, origin=GOOD, authorization=f"Bearer {KEY}")
        assert reply.status_code == 200
        refused = complete(client, origin=GOOD)
        assert refused.status_code == 401
        for each in (reply, refused):
            assert each.headers["access-control-allow-origin"] == GOOD
            assert "x-request-id" in each.headers["access-control-expose-headers"]
            assert "cloister-ignored-fields" in each.headers["access-control-expose-headers"]
            assert "x-ratelimit-remaining-tokens" in each.headers["access-control-expose-headers"]


def test_another_origin_may_read_nothing(model_path):
    with reached(model_path) as client:
        for origin in (EVIL, "null", f"{GOOD}.evil.example", GOOD.upper() + ":8443"):
            reply = complete(client, origin=origin, authorization=f"Bearer {KEY}")
            assert not [name for name in reply.headers if name.startswith("access-control")]
            assert reply.headers["vary"] == "origin"


def test_no_origin_is_named_unless_somebody_names_it(model_path):
    with reached(model_path, allowed_origins=None) as client:
        preflight = client.options("/v1/chat/completions", headers={"origin": GOOD, **ASK})
        assert preflight.status_code == 401
        reply = complete(client, origin=GOOD, authorization=f"Bearer {KEY}")
        assert reply.status_code == 200
        assert not [name for r in (preflight, reply) for name in r.headers if name.startswith("access-control")]


def test_everybody_is_every_origin(model_path):
    with reached(model_path, allowed_origins="*") as client:
        for origin in (EVIL, "null"):
            reply = client.options("/v1/models", headers={"origin": origin, "access-control-request-method": "GET"})
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, origin)


@pytest.mark.parametrize("asked", ["x-a\tb", "authorization,,x", "x" * 2000, "a: b"])
def test_what_is_no_list_of_names_is_not_repeated(model_path, asked):
    with reached(model_path) as client:
        headers = {"origin": GOOD, **ASK, "access-control-request-headers": asked}
        assert client.options("/v1/models", headers=headers).headers["access-control-allow-headers"] == (
            "authorization, content-type"
        )


@pytest.mark.parametrize("setting", ["chat.example.org", "https://a.example/", "https://a.example/path", "ftp://a", "https://"])
def test_what_is_no_origin_is_refused_with_an_example(setting):
    with pytest.raises(ConfigError, match=r"such as https://chat\.example\.org"):
        parse_origins(setting)


@pytest.mark.parametrize(("origin", "status"), [(None, 400), ("own", 400), (GOOD, 400), (EVIL, 403)])
def test_a_page_of_another_origin_cannot_send_what_has_no_body(model_path, origin, status):
    """A browser sends it without a preflight."""
    with (
        serving_script(model_path, ScriptedEngine(says("ok")), config=replace(CONFIG, api_keys=None)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        headers = {} if origin is None else {"origin": server.url if origin == "own" else origin}
        for verb in ("drain", "return"):
            reply = client.post(f"/v1/replicas/0/{verb}", headers={"content-type": "text/plain", **headers})
            error = check_error(reply, status)
            assert error["code"] == "origin_not_allowed" if status == 403 else "one engine" in error["message"]
        assert check_error(client.post("/v1/replicas/text/drain"), 404)["code"] == "unknown_route"
