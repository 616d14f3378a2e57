"""What the routes of conversations have in common, whichever API they speak."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.policy import Credentials
from cloister.server import llamacpp as llamacpp
from cloister.server import messages as messages
from cloister.server.ollama import schemas as ollama
from cloister.server.responses import schemas as responses
from tests.server.running_server import INFO, MODEL, ScriptedEngine, make_gate, says, serving_script
from tests.thinning import examples

DOCS = Path(__file__).parents[2] / "docs"
ROOMY = msgspec.structs.replace(INFO, max_model_len=4096)
HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hello", "stream": False, "options": {"num_predict": 2}},
    "/completion": {"prompt": "hello", "n_predict": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_without_a_model_gets_the_one_that_is_served(client, path):
    reply = client.post(path, json=BODIES[path])
    assert reply.status_code == 200, reply.text
    assert reply.json().get("model", MODEL) == MODEL
    assert client.post(path, json={**BODIES[path], "model": "other"}).status_code == 404


def test_models_have_the_fields_that_clients_look_for(client):
    (model,) = client.get("/v1/models").json()["data"]
    lengths = {"max_model_len", "default_max_tokens"}
    assert {"id", "object", "created", "owned_by", "root", "parent", "permission"} | lengths <= set(model)
    assert (model["parent"], model["permission"]) == (None, None)


def test_nulls_stand_where_clients_look_for_them(client):
    reply = client.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"]).json()
    assert reply["choices"][0]["message"]["refusal"] is None
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


ODD = 'a "quote" and \\ \n\r\t 日本 🙂 %s {0} <tool_call data: [DONE]'
TOOL = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": TOOL}]}),
        ("/v1/responses", {}),
        ("/v1/messages", {}),
    ],
)
def test_a_stream_has_every_letter_of_the_text(model_path, path, fields):
    with serving_script(model_path, ScriptedEngine(says(ODD), model=ROOMY)) as server:
        lines = httpx.post(server.url + path, json={**BODIES[path], **fields, "stream": True}).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def text_of(event):
        if "choices" in event:
            return event["choices"][0]["delta"].get("content", "")
        delta = event.get("delta", "")
        return delta.get("text", "") if isinstance(delta, dict) else delta

    assert "".join(map(text_of, events)) == ODD


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        ("/v1/chat/completions", {"tools": [{"type": "custom"}]}, "tools[0].type"),
        ("/v1/chat/completions", {"tools": [], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "1"}]}, "input[0]"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_a_kind_that_is_known_and_not_taken_is_named(client, path, fields, param):
    error = client.post(path, json={**BODIES[path], **fields}).json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert "`type`" in error["message"] or ".type`" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_counts_so_far_come_with_every_chunk_if_asked_for(client, path, fields):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**BODIES[path], **fields, "max_tokens": 5, "stream": True, "stream_options": options}
    lines = client.post(path, json=body).text.split("\n\n")[:-2]
    counts = [json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"] for line in lines]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 5 * fields.get("n", 1)


PAGES = {
    "responses.md": {*responses.ResponsesBody.model_fields, *responses.REFUSED},
    "messages.md": {*messages.MessagesBody.model_fields, *messages.REFUSED},
}


@pytest.mark.parametrize(("page", "name"), [(page, name) for page in PAGES for name in sorted(PAGES[page])])
def test_every_field_is_on_its_page(page, name):
    assert f"`{name}`" in (DOCS / page).read_text(encoding="utf-8")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role", "name"]), inner),
    max_leaves=6,
)
KINDS = [
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "text",
    "tool_use",
    "tool_result",
    "thinking",
    "function",
]
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional=dict.fromkeys(
        ("role", "content", "name", "input", "call_id", "output", "text", "thinking", "summary", "id"), VALUES
    ),
)
FIELDS = {
    "/v1/responses": sorted(responses.ResponsesBody.model_fields),
    "/v1/messages": sorted(messages.MessagesBody.model_fields),
    "/api/chat": sorted(ollama.OllamaChatBody.model_fields),
    "/completion": sorted(llamacpp.LlamaCompletionBody.model_fields),
}


@pytest.mark.parametrize("path", FIELDS)
@settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_whatever_is_sent_gets_an_answer_or_a_400(client, path, data):
    fields = data.draw(
        st.dictionaries(st.sampled_from(FIELDS[path]), VALUES | st.lists(BLOCK, min_size=1, max_size=3), max_size=3)
    )
    reply = client.post(path, content=json.dumps({**BODIES[path], **fields}), headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 404), reply.text


def test_a_key_is_taken_from_either_header(model_path):
    keys, key = Credentials.empty().add("alice")
    gate = make_gate("team", keys)
    with serving_script(model_path, ScriptedEngine(says("ok")), gate=gate) as server:

        def status(**headers):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return httpx.post(f"{server.url}/v1/messages", json=BODIES["/v1/messages"], headers=named).status_code

        assert status(x_api_key=key) == 200
        assert status(authorization=f"Bearer {key}") == 200
        assert status(authorization="Bearer wrong", x_api_key=key) == 401
        assert status(x_api_key="wrong") == 401
        refused = httpx.post(f"{server.url}/v1/messages", json=BODIES["/v1/messages"])
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
