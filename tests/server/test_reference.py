"""/openapi.json and /docs: the reference says what the server does, and its page asks nobody else for anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import httpx
import pytest
from jsonschema import Draft202012Validator

from cloister.policy import Credentials
from cloister.server.app import _ROUTERS
from cloister.server.operations import EVENTS, OPERATIONS
from cloister.server.routes.reference import REF, describe_api
from tests.server.running_server import MODEL, make_gate, serving, start_speaking

THOUGHT = {"type": "thinking", "thinking": "hm"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def validator(document, schema):
    return Draft202012Validator({**schema, "components": document["components"]})


def operation(document, method, path):
    return document["paths"][path][method.lower()]


def test_every_route_is_in_the_reference_and_nothing_else():
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for router in _ROUTERS
        for route in router.routes
        for method in route.methods - {"HEAD"}
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes
    assert len(OPERATIONS) == len(routes)


def test_schemas_are_schemas_and_references_lead_somewhere(document):
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = {reference.removeprefix(REF) for reference in re.findall(rf'"({REF}[^"]+)"', json.dumps(document))}
    assert names == set(document["components"]["schemas"])


def test_no_two_operations_have_one_id(document):
    ids = [op["operationId"] for methods in document["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, "stop": "x"}, 200),
        ("/v1/chat/completions", {**CHAT, "stop": ["x", "y"], "seed": None}, 200),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, 200),
        ("/v1/chat/completions", {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 2}, 200),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400),
        ("/v1/chat/completions", {**CHAT, "logprobs": False, "top_logprobs": 2}, 400),
        ("/v1/chat/completions", {**CHAT, "logprobs": False, "top_logprobs": None}, 200),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400),
        ("/v1/chat/completions", {**CHAT, "stop": 1}, 400),
        ("/v1/chat/completions", {**CHAT, "temperature": 3}, 400),
        ("/v1/chat/completions", {**CHAT, "temperature": "1"}, 400),
        ("/v1/chat/completions", {**CHAT, "unheard_of": 1}, 200),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 4.0}, 200),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 256}, 400),
        ("/v1/chat/completions", {**CHAT, "n": 65}, 400),
        ("/v1/chat/completions", {**CHAT, "functions": [{}]}, 400),
        ("/v1/chat/completions", {**CHAT, "functions": [], "store": False}, 200),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {"a": 1}}, 400),
        ("/v1/chat/completions", {**CHAT, "guided_choice": []}, 400),
        ("/v1/chat/completions", {**CHAT, "guided_choice": ["a", ""]}, 400),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 400),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "text", "json_schema": None}}, 200),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400),
        ("/v1/chat/completions", {**CHAT, "tool_choice": {"type": "auto"}}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "max_tokens": 4}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}], "max_tokens": 4}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "assistant"}], "max_tokens": 4}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 4}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}], "max_tokens": 4}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": ["a", ""]}, 400),
        ("/v1/completions", {"prompt": [1.0, 2.0], "max_tokens": 2}, 200),
        ("/v1/chat/completions", {**CHAT, "messages": []}, 400),
        ("/v1/chat/completions", {**CHAT, "messages": "Hello"}, 400),
        ("/v1/chat/completions", {"max_tokens": 4}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 1}, 200),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 2}, 200),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, 200),
        ("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 2}, 200),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True}, 200),
        ("/v1/completions", {"prompt": {}}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [1, "a"]}, 400),
        ("/v1/completions", {"prompt": [1.5]}, 400),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}, 200),
        ("/v1/responses", {"input": [{"role": "user", "content": "Hello"}], "max_output_tokens": 4}, 200),
        ("/v1/responses", {"input": []}, 400),
        ("/v1/responses", {"input": [{"type": "message", "role": "user"}]}, 400),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4, "system": "s"}, 200),
        ("/v1/messages", {"messages": CHAT["messages"]}, 400),
        ("/v1/messages", {"messages": "Hello", "max_tokens": 4}, 400),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}, 200),
        ("/v1/messages/count_tokens", {"messages": []}, 400),
        ("/v1/messages", {"messages": [{"role": "user", "content": [THOUGHT]}], "max_tokens": 4}, 400),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [THOUGHT]}, *CHAT["messages"]], "max_tokens": 4}, 200),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 4, "tool_choice": {"type": "tool"}}, 400),
        ("/v1/responses", {"input": "Hello", "tool_choice": "required"}, 400),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "a"}]}, 200),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 4}}, 200),
        ("/api/chat", {"messages": "Hello"}, 400),
        ("/api/generate", {"prompt": "a", "stream": False, "format": "json5"}, 400),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False, "top_logprobs": 1}, 400),
        ("/api/generate", {"prompt": "a", "stream": False, "logprobs": False, "top_logprobs": 1}, 400),
        ("/api/generate", {"stream": False, "top_logprobs": 1}, 400),
        ("/api/chat", {"stream": False, "top_logprobs": 1}, 400),
        ("/api/generate", {"prompt": "a", "raw": True, "stream": False, "logprobs": True, "options": {"num_predict": 2}}, 200),
        ("/api/generate", {"prompt": "a", "raw": True, "stream": False, "options": {"num_predict": 4}}, 200),
        ("/api/show", {}, 200),
        ("/api/pull", {"model": MODEL, "stream": False}, 200),
        ("/completion", {"prompt": [1, 2], "n_predict": 2}, 200),
        ("/completion", {"prompt": []}, 400),
        ("/completion", {"prompt": ""}, 400),
        ("/completion", {"prompt": [""]}, 400),
        ("/completion", {"prompt": ["a", "b"]}, 400),
        ("/apply-template", {"messages": CHAT["messages"]}, 200),
        ("/apply-template", {"messages": []}, 400),
        ("/v1/embeddings", {"input": ""}, 400),
        ("/v1/embeddings", {"input": [[]]}, 400),
        ("/v1/embeddings", {"input": "a", "encoding_format": "f16"}, 400),
        ("/v1/score", {"text_1": "a"}, 400),
        ("/v1/rerank", {"query": "a", "documents": []}, 400),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, 400),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, 400),
        ("/v1/score", {"text_1": ["a", ""], "text_2": "b"}, 400),
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400),
        ("/tokenize", {"prompt": "a"}, 200),
        ("/tokenize", {"messages": CHAT["messages"], "return_token_strs": True}, 200),
        ("/tokenize", {"prompt": 1}, 400),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400),
        ("/detokenize", {"tokens": [1, 2]}, 200),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
def test_schemas_take_what_the_server_takes_and_replies_are_as_stated(client, document, path, body, status):
    stated = operation(document, "POST", path)
    asked = validator(document, stated["requestBody"]["content"]["application/json"]["schema"])
    assert asked.is_valid(body) == (status == 200)
    reply = client.post(path, json=body)
    assert reply.status_code == status, reply.text
    validator(document, stated["responses"][str(status)]["content"]["application/json"]["schema"]).validate(reply.json())


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        f"/v1/models/{MODEL}",
        "/v1/policy",
        "/version",
        "/health",
        "/tokenizer_info",
        "/api/tags",
        "/api/ps",
        "/load",
    ],
)
def test_what_is_read_is_as_stated(client, document, path):
    stated = operation(document, "GET", path.replace(MODEL, "{model_id}"))
    reply = client.get(path)
    schema = stated["responses"]["200"]["content"][reply.headers["content-type"].partition(";")[0]]["schema"]
    validator(document, schema).validate(reply.json())


def test_every_read_is_answered_with_a_status_that_is_stated(client, document):
    for path, methods in document["paths"].items():
        if "get" in methods:
            reply = client.get(re.sub(r"{\w+}", "unknown", path))
            assert str(reply.status_code) in methods["get"]["responses"], path


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        ("/v1/embeddings", {"json": {"model": "other", "input": "a"}}, 404),
        ("/tokenize", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ("/v1/completions", {"content": b"x" * (5 << 20), "headers": {"content-type": "application/json"}}, 413),
    ],
)
def test_errors_of_what_stands_before_the_routes_are_stated(client, document, path, sent, status):
    reply = client.post(path, **sent)
    assert reply.status_code == status
    stated = operation(document, "POST", path)["responses"][str(status)]
    validator(document, stated["content"]["application/json"]["schema"]).validate(reply.json())


def test_a_method_that_is_not_stated_is_not_allowed_whatever_comes_with_it(client, document):
    for path, methods in document["paths"].items():
        unknown = {"get", "post", "put", "delete", "patch"} - methods.keys()
        for method in unknown:
            reply = client.request(method.upper(), path.replace("{model_id}", MODEL).replace("{index}", "0"))
            assert reply.status_code == 405, (method, path)
            assert set(reply.headers["allow"].lower().split(", ")) - {"head"} == methods.keys(), path  # RFC 9110, 10.2.1


def test_sampling_has_the_same_bounds_in_every_dialect(document):
    schemas = document["components"]["schemas"]
    for dialect in ("LlamaCompletionBody", "LlamaInfillBody", "Options"):
        for name, schema in schemas[dialect]["properties"].items():
            if bounds := bounds_of(schemas["CompletionBody"]["properties"].get(NAMES_ELSEWHERE.get(name, name), {})):
                assert bounds_of(schema) == bounds, (dialect, name)


NAMES_ELSEWHERE = {"repeat_penalty": "repetition_penalty", "max_tokens": "-"}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def bounds_of(schema):
    """Returns the bounds of a number that may be null."""
    return [{key: kind[key] for key in BOUNDS if key in kind} for kind in schema.get("anyOf", ()) if kind.keys() & set(BOUNDS)]


def test_bounds_are_the_models_own(document):
    assert document["components"]["schemas"]["DetokenizeBody"]["properties"]["tokens"]["items"]["exclusiveMaximum"] == 257
    assert '"x-' not in json.dumps(document["components"]["schemas"])


def test_streams_are_stated_as_events(client, document):
    stated = operation(document, "POST", "/v1/chat/completions")["responses"]["200"]["content"]
    with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        assert reply.headers["content-type"].partition(";")[0] == EVENTS
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    for line in lines[:-1]:
        validator(document, stated[EVENTS]["schema"]["x-event"]).validate(json.loads(line))


def test_the_page_shows_every_operation_and_model(client, document):
    page = client.get("/docs").text
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= ids
    assert {op["operationId"] for methods in document["paths"].values() for op in methods.values()} <= ids
    assert {f"model-{name}" for name in document["components"]["schemas"]} <= ids
    assert 'events, each with <a href="#model-ChatChunk">' in page
    headings = re.findall("<h2>(.*?)</h2>", page.partition("</nav>")[0])
    assert len(headings) == len(set(headings))


def test_the_page_has_no_script_and_asks_nobody_else(client):
    reply = client.get("/docs")
    page, rules = reply.text, reply.headers["content-security-policy"]
    assert not re.search(r"<script|<img|<link|https?://|url\(|@import|\son\w+=|style=", page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")


def test_who_asks_for_keys_says_so_and_shows_the_reference_without_one(model_path):
    credentials, key = Credentials.empty().add("ann")
    gate = make_gate("team", credentials)
    with (
        serving(model_path, lambda: start_speaking(model_path), gate=gate) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        document = client.get("/openapi.json").json()
        assert client.get("/docs").status_code == 200
        for path, methods in document["paths"].items():
            for method, op in methods.items():
                reply = client.request(method.upper(), path.replace("{model_id}", MODEL).replace("{index}", "0"))
                assert (reply.status_code == 401) == ("security" in op), path
                assert ("401" in op["responses"]) == ("security" in op)
        assert client.get("/version", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_without_keys_none_is_asked_for(document):
    assert "securitySchemes" not in document["components"]
    assert "security" in json.dumps(describe_api(MODEL, asks_for_keys=True))
