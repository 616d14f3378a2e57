"""Schemas of prompts: where modules stand, what the engine gets for a choice of them, whose they are, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cloister.policy import Credentials, Gate, Policy
from cloister.server.responses.keeping import ResponseStore
from cloister.types.request import AdapterInfo
from tests.server.running_server import INFO, MODEL, RunningServer, ScriptedEngine, says, serving_script
from tests.server.test_bad_input import SECRET, check_error

SIZE = 8
PATH = "/v1/prompt_schemas"
SCHEMA: dict[str, Any] = {
    "name": "trips",
    "prefix": "be brief",
    "modules": [
        {"name": "plan", "text": "stay {days} days", "parameters": [{"name": "days", "max_tokens": 6}]},
        {"union": [{"name": "rome", "text": "rome is old and warm"}, {"name": "oslo", "text": "oslo"}]},
        {"name": "end", "text": "be kind!"},
    ],
}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(says("yes"), model=msgspec.structs.replace(INFO, document_block_size=SIZE))


@pytest.fixture(scope="module")
def server(model_path: Path, engine: ScriptedEngine) -> Iterator[RunningServer]:
    with serving_script(model_path, engine, responses_kept=ResponseStore()) as server:
        assert httpx.post(server.url + PATH, json=SCHEMA).status_code == 200
        yield server


def ask(
    server: RunningServer, *modules: object, name: str = "trips", headers: dict[str, str] | None = None, **body: object
) -> httpx.Response:
    chosen = {"name": name, "modules": list(modules)}
    body = {"model": MODEL, "prompt": "why?", "max_tokens": 4, "prompt_schema": chosen, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)


def plan(days: str) -> dict[str, object]:
    return {"name": "plan", "arguments": {"days": days}}


def test_a_schema_says_where_its_modules_stand(server: RunningServer) -> None:
    reply = httpx.post(server.url + PATH, json=SCHEMA).json()
    assert [(each["name"], each["start"], each["end"]) for each in reply["modules"]] == [
        ("plan", 8, 30), ("rome", 30, 54), ("oslo", 30, 54), ("end", 54, 62),
    ]  # fmt: skip
    assert reply["modules"][0]["parameters"] == [{"name": "days", "start": 13, "max_tokens": 6}]


def test_chosen_modules_keep_their_positions_and_arguments_stand_in_their_places(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    assert ask(server, "oslo", plan("two")).status_code == 200, "the order of the schema counts"
    request = engine.taken[-1]
    assert bytes(request.token_ids) == b"be brief" + b"stay  days\n\n\n\n\n\n" + b"oslo\n\n\n\n" + b"two" + b"why?"
    documents = request.documents
    assert documents is not None
    assert (documents.starts, documents.end) == ((8, 24), 32)
    turns = documents.turns(0, len(request.token_ids))
    assert turns[:8] == list(range(8))
    assert turns[8:24] == [*range(8, 13), *range(19, 30)], "six positions are free for the days"
    assert turns[24:32] == list(range(30, 38)), "where all modules of the union begin"
    assert turns[32:35] == [13, 14, 15], "in the place of the parameter"
    assert turns[35:] == list(range(54, 58)), "behind the union's longest module"


def test_link_tokens_stand_behind_the_modules_and_have_the_positions_behind_the_last(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.adapters.loaded["linked"] = AdapterInfo(name="linked", digest="digest", path="", rank=0, num_links=3)
    assert ask(server, "oslo", plan("two")).status_code == 200
    plain = engine.taken[-1]
    assert ask(server, "oslo", plan("two"), model="linked").status_code == 200
    request = engine.taken[-1]
    assert plain.documents is not None
    assert request.documents is not None
    end, asked = plain.documents.end, len(b"why?")
    assert (request.documents.starts, request.documents.end, request.documents.num_links) == (plain.documents.starts, end, 3)
    assert request.token_ids == [*plain.token_ids[:end], *[ord("\n")] * 6, *plain.token_ids[end:]]
    before, turns = plain.documents.turns(0, len(plain.token_ids)), request.documents.turns(0, len(request.token_ids))
    assert turns == [*before[:end], *range(54, 60), *before[end:-asked], *range(60, 64)]
    del engine.adapters.loaded["linked"]


def test_a_module_has_the_same_positions_whatever_is_chosen_beside_it(server: RunningServer, engine: ScriptedEngine) -> None:
    for modules in (("end",), ("rome", "end"), (plan("three"), "oslo", "end")):
        assert ask(server, *modules, documents_scale=0.9).status_code == 200
        request = engine.taken[-1]
        assert request.documents is not None
        assert request.documents.scale == 0.9
        assert request.documents.turns(request.documents.starts[-1], request.documents.end) == list(range(54, 62))


@pytest.mark.parametrize(
    ("modules", "body", "param"),
    [
        (["rome", "oslo"], {}, "prompt_schema.modules"),
        (["end", "end"], {}, "prompt_schema.modules"),
        ([SECRET], {}, "prompt_schema.modules"),
        (["plan"], {}, "prompt_schema.modules[0].arguments"),
        ([plan(SECRET)], {}, "prompt_schema.modules[0].arguments"),
        (["rome", {"name": "end", "arguments": {"days": SECRET}}], {}, "prompt_schema.modules[1].arguments"),
        ([plan(3)], {}, "prompt_schema.modules[0].arguments"),
        ([{"name": "plan", "arguments": {SECRET + "!": "x"}}], {}, "prompt_schema.modules[0].arguments"),
        ([], {}, "prompt_schema.modules"),
        (["end"], {"prompt": ["one", "two"]}, "prompt"),
        (["end"], {"prompt": ""}, "prompt"),
        (["end"], {"echo": True}, "echo"),
        (["end"], {"documents": [{"text": SECRET}]}, "prompt_schema"),
        (["end"], {"documents_prefix": SECRET}, "documents_prefix"),
    ],
)
def test_bad_choices_are_refused_with_a_reason(
    server: RunningServer, modules: list[object], body: dict[str, object], param: str
) -> None:
    assert check_error(ask(server, *modules, **body), 400)["param"] == param


PAIR = [{"name": "a", "text": "x"}, {"name": "b", "text": "y"}]
DAYS = [{"name": "days", "max_tokens": 6}]


@pytest.mark.parametrize(
    ("modules", "body", "said"),
    [
        (["plan"], {}, "needs an argument for each parameter of its module, which has 1"),
        ([{"name": "end", "arguments": {"days": "x"}}], {}, "for a parameter that its module does not have; it has 0"),
        ([plan("x" * 200)], {}, "of 200 tokens for a parameter of"),
        ([plan(3)], {}, "A value in `prompt_schema.modules[0].arguments` must be a string."),
        (["end"], {"prompt": "x" * 1000}, "the prompt has 1062 positions, with those that the schema's other modules"),
    ],
)
def test_what_is_wrong_with_a_choice_is_said(
    server: RunningServer, modules: list[object], body: dict[str, object], said: str
) -> None:
    assert said in check_error(ask(server, *modules, **body), 400)["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"modules": [{"name": "a", "text": "x"}, {"name": "a", "text": "y"}]}, "modules"),
        ({"modules": [{"name": "a", "text": SECRET, "parameters": [{"name": "days", "max_tokens": 6}]}]}, "modules[0]"),
        ({"modules": [{"name": "a", "text": "{b}{b}", "parameters": [{"name": "b", "max_tokens": 6}]}]}, "modules[0]"),
        ({"modules": [{"name": "a", "text": SECRET * 100}]}, "modules"),
        ({"modules": []}, "modules"),
        ({"modules": [{"union": []}]}, "modules[0].union"),
        ({"modules": [{"union": [{"name": f"m{i}", "text": "x"} for i in range(65)]}]}, "modules[0].union"),
        ({"modules": [{"union": [{"name": "a"}]}]}, "modules[0].union[0].text"),
        ({"modules": [{"union": [*PAIR[:1], {**PAIR[1], "parameters": DAYS}]}]}, "modules[0].union[1]"),
        ({"name": "../x"}, "name"),
    ],
)
def test_bad_schemas_are_refused_with_a_reason(server: RunningServer, changes: dict[str, object], param: str) -> None:
    assert check_error(httpx.post(server.url + PATH, json={**SCHEMA, **changes}), 400)["param"] == param


def test_a_deleted_schema_is_gone(server: RunningServer) -> None:
    assert httpx.post(server.url + PATH, json={**SCHEMA, "name": "other"}).status_code == 200
    assert ask(server, "end", name="other").status_code == 200
    assert httpx.delete(f"{server.url}{PATH}/other").json() == {"name": "other", "object": "prompt_schema", "deleted": True}
    assert check_error(ask(server, "end", name="other"), 404)["param"] == "prompt_schema.name"
    assert httpx.delete(f"{server.url}{PATH}/other").status_code == 404


def test_schemas_are_forgotten_with_the_cache_of_their_scope(server: RunningServer) -> None:
    httpx.delete(f"{server.url}/v1/cache?cache_salt=mine")  # 503, as a script has no KV to drop
    assert ask(server, "end").status_code == 200, "schemas are no part of a salted scope"
    httpx.delete(f"{server.url}/v1/cache")
    assert ask(server, "end").status_code == 404
    assert httpx.post(server.url + PATH, json=SCHEMA).status_code == 200


def test_another_tenant_finds_no_schema(model_path: Path, engine: ScriptedEngine) -> None:
    credentials, ann = Credentials.empty().add("ann")
    credentials, bob = credentials.add("bob")
    gate = Gate(Policy("team"), credentials, loopback=True)
    anns, bobs = ({"Authorization": f"Bearer {key}"} for key in (ann, bob))
    with serving_script(model_path, engine, gate=gate, responses_kept=ResponseStore()) as server:
        assert httpx.post(server.url + PATH, json=SCHEMA, headers=anns).status_code == 200
        assert ask(server, "end", headers=bobs).status_code == 404
        assert httpx.delete(f"{server.url}{PATH}/trips", headers=bobs).status_code == 404
        assert ask(server, "end", headers=anns).status_code == 200
        other = {**SCHEMA, "prefix": "bob says"}
        assert httpx.post(server.url + PATH, json=other, headers=bobs).status_code == 200
        assert ask(server, "end", headers=anns).status_code == 200
        assert bytes(engine.taken[-1].token_ids).startswith(b"be brief")


def test_a_module_that_is_not_there_is_refused_before_the_others_are_tokenized(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx.post(server.url + PATH, json=SCHEMA)
    monkeypatch.setattr("cloister.server.prompt_schemas.Layout", None)
    assert check_error(ask(server, SECRET), 400)["param"] == "prompt_schema.modules"


def test_models_and_servers_that_cannot_keep_or_place_modules_say_so(model_path: Path) -> None:
    info = msgspec.structs.replace(INFO, document_block_size=SIZE, places_documents=False)
    with serving_script(model_path, ScriptedEngine(says("yes"), model=info), responses_kept=ResponseStore()) as server:
        assert check_error(httpx.post(server.url + PATH, json=SCHEMA), 400)["param"] == "prompt_schema"
    with serving_script(model_path, ScriptedEngine(says("yes"), model=info)) as server:
        assert httpx.post(server.url + PATH, json=SCHEMA).status_code == 404
        assert ask(server, "end").status_code == 404
