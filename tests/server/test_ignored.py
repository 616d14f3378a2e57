"""Fields that nothing here knows: ignored and named in a header, or refused by name with `--strict-fields`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cloister.server.parse import IGNORED_HEADER, MANY_FIELDS, MAX_NAMED, UNPRINTABLE
from cloister.types.config import ServerConfig
from tests.server.running_server import MODEL, serving, start_speaking
from tests.server.test_bad_input import CHAT, HELLO, SECRET, TEXT, check_error

BODY = {"model": MODEL, "messages": HELLO, "max_tokens": 3}


@pytest.fixture(scope="module")
def strict(model_path: Path) -> Iterator[httpx.Client]:
    config = ServerConfig(port=0, drain_timeout_s=1.0, strict_fields=True)
    with (
        serving(model_path, lambda: start_speaking(model_path), config=config) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        yield client


def ignored(reply: httpx.Response) -> str | None:
    assert reply.status_code == 200, reply.text
    return reply.headers.get(IGNORED_HEADER)


def test_a_request_of_a_generic_client_is_answered_and_told_what_had_no_effect(client):
    fields = {"typical_p": 0.9, "mirostat": 2, "enable_thinking": False, "reasoning_effort": "high"}
    plain, generic = client.post(CHAT, json=BODY), client.post(CHAT, json={**BODY, **fields})
    assert ignored(plain) is None
    assert set(ignored(generic).split(", ")) == set(fields)
    assert generic.json()["choices"] == plain.json()["choices"]


def test_a_stream_tells_it_before_its_first_event(client):
    with client.stream("POST", CHAT, json={**BODY, "stream": True, "stream_options": {"shape": 1}}) as reply:
        assert reply.headers[IGNORED_HEADER] == "stream_options.shape"
        assert list(reply.iter_lines())[-2] == "data: [DONE]"


def test_fields_of_many_messages_are_named_once(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "mood": 1}] * 3
    named = ignored(client.post(CHAT, json={**BODY, "messages": messages}))
    assert set(named.split(", ")) == {"messages[].mood", "messages[].content[].cache_control"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (TEXT, {"prompt": "x", "max_tokens": 1, "mirostat": 1}, "mirostat"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "reasoning": {"effort": "high"}}, "reasoning.effort"),
        (
            "/v1/messages",
            {"messages": HELLO, "max_tokens": 1, "thinking": {"type": "enabled"}, "output_config": {"task_budget": 1}},
            "output_config.task_budget, thinking",
        ),
        ("/v1/messages/count_tokens", {"messages": HELLO, "max_tokens": 1}, "max_tokens"),
        ("/tokenize", {"prompt": "x", "spaces": True}, "spaces"),
    ],
)
def test_every_route_names_them_as_its_clients_know_them(client, path, body, named):
    assert ignored(client.post(path, json=body)) == named


@pytest.mark.parametrize("name", ["two words", "ü", "x" * 65, "a\r\nset-cookie: b=c", ""])
def test_what_is_no_name_is_not_repeated(client, strict, name):
    assert ignored(client.post(CHAT, json={**BODY, name: 1})) == UNPRINTABLE
    error = check_error(strict.post(CHAT, json={**BODY, name: 1}), 400)
    assert name not in error["message"] or not name


def test_more_than_can_be_named_are_ignored_too(client, strict):
    body = {"prompt": "x", **{f"field{number}": 1 for number in range(1500)}}
    assert ignored(client.post("/tokenize", json=body)) == MANY_FIELDS
    check_error(strict.post("/tokenize", json=body), 400)
    check_error(client.post("/tokenize", json={**body, "prompt": [1]}), 400)


def test_a_header_names_a_few_of_many(client):
    named = ignored(client.post(CHAT, json={**BODY, **{f"field{i}": 1 for i in range(40)}}))
    assert named.count("field") == MAX_NAMED
    assert named.endswith(f"and {40 - MAX_NAMED} more")


def test_one_request_is_not_told_of_another(client):
    assert ignored(client.post(CHAT, json={**BODY, "mirostat": 1})) == "mirostat"
    assert ignored(client.post(CHAT, json=BODY)) is None


def test_a_field_is_not_ignored_where_the_rest_is_wrong(client):
    error = check_error(client.post(CHAT, json={**BODY, "mirostat": 1, "top_p": 3}), 400)
    assert error["param"] == "top_p"


@pytest.mark.parametrize("field", ["typical_p", "mirostat", SECRET])
def test_a_strict_server_names_the_field_that_it_refuses(strict, field):
    reply = strict.post(CHAT, json={**BODY, field: "sesame"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (field, "unknown_parameter")
    assert f"`{field}` is an unknown field of the body" in error["message"]
    assert "sesame" not in reply.text


@pytest.mark.parametrize("fields", [{"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}])
def test_a_strict_server_refuses_a_wish_that_the_model_cannot_hear(strict, fields):
    assert "no switch" in check_error(strict.post(CHAT, json={**BODY, **fields}), 400)["message"]


@pytest.mark.parametrize(
    ("fields", "place", "hint"),
    [
        ({"temprature": 1}, "the body", "temperature"),
        ({"max_token": 1}, "the body", "max_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema_": {}}}}, "response_format.json_schema", "schema"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "textt": 1}]}]}, "content[0]", "text"),
        ({"content": "x"}, "the body", None),  # a field of messages
        ({"schema": {}}, "the body", None),
        ({"json": {}}, "the body", None),
        ({"tool_choice": {"type": "auto", "name": 1}}, "tool_choice", None),
    ],
)
def test_a_hint_is_a_field_of_the_same_object_and_never_what_was_sent(strict, fields, place, hint):
    message = strict.post(CHAT, json={**BODY, **fields}).json()["error"]["message"]
    assert place in message
    found = message.partition("did you mean `")[2].partition("`")[0] or None
    assert found == hint
    assert "schema_`?" not in message


def test_whole_numbers_may_have_a_point(client):
    reply = client.post(CHAT, json={**BODY, "max_tokens": 2.0, "n": 1.0, "seed": -0.0, "stop_token_ids": [5.0]})
    assert reply.json()["usage"]["completion_tokens"] == 2
    assert ignored(client.post(TEXT, json={"prompt": [104.0, 105.0], "max_tokens": 1.0})) is None
    assert client.post("/detokenize", json={"tokens": [104.0, 105]}).json()["prompt"] == "hi"
    for number in (2.5, 1e300, -1.0):
        assert check_error(client.post(CHAT, json={**BODY, "max_tokens": number}), 400)["param"] == "max_tokens"


def test_the_reference_says_whether_other_fields_may_come(client, strict):
    def takes_others(client: httpx.Client) -> bool:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        return all("additionalProperties" not in schemas[name] for name in ("ChatBody", "CompletionBody", "Message"))

    assert takes_others(client)
    assert not takes_others(strict)
