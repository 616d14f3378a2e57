"""The page and the policy over HTTP: who gets them, with which headers, and what a browser may keep."""

from __future__ import annotations

import re

import httpx
import pytest

from cloister.policy import Credentials
from cloister.server.routes.page import read_page
from cloister.types.config import ServerConfig
from tests.server.running_server import make_gate, serving, start_speaking


@pytest.fixture(scope="module")
def guarded(model_path):
    """A server that asks for keys."""
    credentials, _ = Credentials.empty().add("ann", tenant="lab")
    gate = make_gate("team", credentials)
    with (
        serving(model_path, lambda: start_speaking(model_path), gate=gate) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client


def policy_of(profile: str, model_path, credentials: Credentials | None = None) -> dict[str, object]:
    gate = make_gate(profile, credentials)
    with serving(model_path, lambda: start_speaking(model_path), gate=gate) as server:
        return httpx.get(f"{server.url}/v1/policy").json()


def addresses(html: str) -> set[str]:
    """Everything that the page loads, and where its links lead."""
    return set(re.findall(r'(?:src|href)="([^"#]+)', html))


def test_the_page_is_at_the_root(client):
    reply = client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Cloister</title>" in reply.text


def test_all_that_the_page_loads_is_on_the_same_server(client):
    named = addresses(client.get("/").text) - {"/"}
    assert named
    for path in named:
        assert path.startswith("/page/")
        assert client.get(path).status_code == 200


def test_every_module_that_a_module_imports_is_there():
    assets = read_page().assets
    for name, asset in assets.items():
        imported = re.findall(r'(?:from|import) "([^"]+)"', asset.body.decode()) if name.endswith(".js") else []
        assert {path.removeprefix("./") for path in imported} <= set(assets), name


def test_no_file_has_inline_code_or_makes_markup_of_text():
    for name, asset in read_page().assets.items():
        text = asset.body.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), name
        assert not re.search(r'<script(?![^>]*src=)|<style|\sstyle="|\son\w+="', text), name


def test_the_page_may_load_and_reach_nothing_but_its_server(client):
    page = client.get("/")
    for reply in (page, *(client.get(path) for path in addresses(page.text) - {"/"})):
        rules = dict(rule.strip().partition(" ")[::2] for rule in reply.headers["content-security-policy"].split(";"))
        assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "microphone=()" in reply.headers["permissions-policy"]


def test_a_browser_keeps_files_for_ever_and_asks_for_the_page_each_time(client):
    page = client.get("/")
    assert page.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == page.headers["content-security-policy"]
    for path in addresses(page.text) - {"/"}:
        assert "immutable" in client.get(path).headers["cache-control"]


def test_a_file_of_another_build_is_not_served(client):
    path = next(iter(addresses(client.get("/").text) - {"/"}))
    reply = client.get(path.replace(read_page().digest, "0" * 16))
    assert reply.status_code == 404
    assert "no-store" in reply.headers["cache-control"]


def test_head_answers_without_a_body(client):
    reply = client.head("/")
    assert (reply.status_code, reply.content) == (200, b"")


def test_the_page_needs_no_key_and_what_it_asks_for_does(guarded):
    page = guarded.get("/")
    assert page.status_code == 200
    assert all(guarded.get(path).status_code == 200 for path in addresses(page.text))
    assert guarded.get("/v1/policy").json()["api_key"] is True
    for path in ("/v1/models", "/metrics", "/pager", "/v1/policy/"):
        assert guarded.get(path).status_code == 401


def test_the_page_can_be_switched_off(model_path):
    config = ServerConfig(port=0, drain_timeout_s=1.0, page=False)
    with serving(model_path, lambda: start_speaking(model_path), config=config) as server:
        asset = f"/page/{read_page().digest}/theme.css"
        assert [httpx.get(server.url + path).status_code for path in ("/", asset, "/v1/policy")] == [404, 404, 200]


def test_the_policy_says_who_shares_what(model_path):
    credentials, _ = Credentials.empty().add("ann", tenant="lab")
    assert "Everybody on this machine" in policy_of("open", model_path)["summary"]
    assert "one tenant" in policy_of("open", model_path, credentials)["summary"]
    assert "one tenant" in policy_of("team", model_path, credentials)["summary"]
    assert "Nothing that you send is reused" in policy_of("team", model_path)["summary"]
    assert "Nothing that you send is reused" in policy_of("private", model_path, credentials)["summary"]


def test_the_policy_says_what_a_profile_refuses(model_path):
    report = {profile: policy_of(profile, model_path) for profile in ("open", "private", "paranoid")}
    assert [report[profile]["streaming"] for profile in report] == [True, True, False]
    assert [report[profile]["keeping"] for profile in report] == [True, True, False]
    assert [report[profile]["metrics"] for profile in report] == ["all", "counts", "counts"]
    assert {profile: report[profile]["profile"] for profile in report} == {profile: profile for profile in report}
