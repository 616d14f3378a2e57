"""Whatever a client sends, it gets an OpenAI-shaped error that says what to do: never a 500, never a hang."""

from __future__ import annotations

import json
import socket
import string
import time

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.server.parse import REFUSED, parse_json
from tests.server.running_server import MODEL, RunningServer
from tests.thinning import examples

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SECRET = "zanzibar"


def user(content: object, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def check_error(reply: httpx.Response, status: int | None = None) -> dict[str, object]:
    """Checks the shape of an error, and that it repeats nothing."""
    assert 400 <= reply.status_code < 500 if status is None else reply.status_code == status, (reply.status_code, reply.text)
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 20
    assert error["type"] in ("invalid_request_error", "authentication_error", "permission_error", "rate_limit_error")
    assert isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert SECRET not in reply.text
    return error


BAD_CHAT = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 10**50}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 10_000}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x", 5]}, "stop[1]"),
    ({"stop": "x" * 1025}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": {SECRET: 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias"),
    ({"logit_bias": {"1": SECRET}}, "logit_bias"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"priority": 0.5}, "priority"),
    ({"user": 7}, "user"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"model": 3}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": SECRET}, "messages"),
    ({"messages": [SECRET]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": SECRET, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (user(None), "messages[0].content"),
    (user(5), "messages[0].content"),
    (user([{"type": "image_url", "image_url": {"url": SECRET}}]), None),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    (user([SECRET]), "messages[0].content[0]"),
    (user("x", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]), None),
    (user("x", audio={"id": SECRET}), "messages[0].audio"),
    (user("x" * 300), "messages"),
]

BAD_TEXT = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": SECRET}}, "prompt"),
    ({"prompt": [1, SECRET]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1] * 256}, "prompt"),
    ({"prompt": [1] * 250, "max_tokens": 10}, "max_tokens"),
    ({"prompt": ["x"] * 257}, "prompt"),
    ({"prompt": ["x", "y"], "n": 33}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"suffix": SECRET}, "suffix"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
def test_a_bad_chat_request_is_refused(client, fields, param):
    error = check_error(client.post(CHAT, json={"model": MODEL, "messages": HELLO, **fields}), 400)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(("fields", "param"), BAD_TEXT)
def test_a_bad_completion_request_is_refused(client, fields, param):
    error = check_error(client.post(TEXT, json={"model": MODEL, "prompt": "x", **fields}), 400)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_field_without_effect_here_is_refused_unless_it_asks_for_nothing(client, name):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    error = check_error(client.post(CHAT, json={**body, name: {"type": SECRET}}), 400)
    assert error["param"] == name
    assert name in error["message"]
    assert error["code"] == "unsupported_parameter"
    for harmless in (None, *REFUSED[name].harmless):
        assert client.post(CHAT, json={**body, name: harmless}).status_code == 200


def test_a_prompt_that_is_too_long_is_told_the_figures(client):
    error = check_error(client.post(TEXT, json={"model": MODEL, "prompt": "x" * 300}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert "300" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"7",
        b'{"model": "history", "messages": }',
        b'{"model": "history", "prompt": "zanzibar',
        b'{"model": "history", "prompt": "x", "temperature": NaN}',
        b'{"model": "history", "prompt": "x", "temperature": Infinity}',
        b'{"model": "history", "prompt": "x", "temperature": 1e999}',
        b'{"model": "history", "prompt": "\\ud800"}',
        b'{"model": "history", "prompt": "\\udc00x"}',
        b'{"model": "history", "prompt": "\xff\xfe"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"model": "history", "prompt": ' + b"[" * 199 + b"]" * 199 + b"}",
        b'{"a":' * 100_000,
        b'{"model": "history", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'{"model": "history", "prompt": "x"} {}',
        '{"model": "history", "prompt": "x"}'.encode("utf-16"),
    ],
)
def test_what_is_no_sound_json_is_refused(client, raw):
    for path in (CHAT, TEXT):
        check_error(client.post(path, content=raw, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("path", "start", "mistake", "end"),
    [
        (CHAT, '{"messages": [', "1", "]}"),
        (CHAT, '{"messages": [{"role": "user", "content": [', "1", "]}]}"),
        (CHAT, '{"messages": [{"role": "user", "content": "x"}, ', '{"rolle": 1}', "]}"),
        ("/v1/responses", '{"input": [', "1", "]}"),
        ("/v1/messages/count_tokens", '{"messages": [{"role": "user", "content": [', "1", "]}]}"),
        ("/detokenize", '{"tokens": [', "-1", "]}"),
    ],
)
def test_a_million_mistakes_are_not_all_looked_at(client, path, start, mistake, end):
    raw = f"{start}{mistake}{f', {mistake}' * (1_500_000 // (len(mistake) + 1))}{end}"
    began_s = time.process_time()
    reply = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert time.process_time() - began_s < 3


def test_words_of_a_body_are_not_kept_for_the_next():
    raw = json.dumps({"messages": SECRET}).encode()
    first, second = parse_json(raw), parse_json(raw)
    assert first == second
    assert first["messages"] is not second["messages"]


def test_so_many_wrong_fields_are_refused_together(client):
    raw = json.dumps({"messages": HELLO, "stop": [{SECRET: number} for number in range(2000)]})
    check_error(client.post(CHAT, content=raw, headers={"content-type": "application/json"}), 400)
    raw = json.dumps({"messages": [{SECRET: number} for number in range(2000)]})
    error = check_error(client.post(CHAT, content=raw, headers={"content-type": "application/json"}), 400)
    assert "too many mistakes" in error["message"]


def test_a_conversation_has_a_longest_number_of_messages(client):
    error = check_error(client.post(CHAT, json={"messages": HELLO * 16_385}), 400)
    assert error["param"] == "messages"
    assert "16384" in error["message"]


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_body_that_is_not_declared_json_is_refused(client, media_type):
    headers = {} if media_type is None else {"content-type": media_type}
    reply = client.post(CHAT, content=json.dumps({"model": MODEL, "messages": HELLO}).encode(), headers=headers)
    check_error(reply, 415)


def test_a_compressed_body_is_refused(client):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check_error(client.post(CHAT, content=b"\x1f\x8b", headers=headers), 415)


def test_json_with_a_charset_is_taken(client):
    body = json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 1}).encode()
    assert client.post(CHAT, content=body, headers={"content-type": "application/json; charset=utf-8"}).status_code == 200


def test_an_unknown_model_is_named_by_what_there_is(client):
    for path, field in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
        error = check_error(client.post(path, json={"model": SECRET, **field}), 404)
        assert error["code"] == "model_not_found"
        assert MODEL in error["message"]
    check_error(client.get(f"/v1/models/{SECRET}"), 404)


@pytest.mark.parametrize("path", ["/v1", f"/v1/{SECRET}", "/redoc", "/v1/chat/completions/", "/%ff%00"])
def test_an_unknown_route_is_not_found(client, path):
    check_error(client.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", TEXT), ("DELETE", "/v1/models"), ("POST", "/health"), ("OPTIONS", CHAT)]
)
def test_a_wrong_method_is_told_the_right_one(client, method, path):
    reply = client.request(method, path, json={})
    check_error(reply, 405)
    assert reply.headers["allow"] in ("POST", "GET", "GET, HEAD", "HEAD, GET")


@pytest.mark.parametrize(
    "head",
    [
        b"zanzibar\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: zanzibar\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"z" * 200_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzanzibar\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_in_json(speaking: RunningServer, head):
    reply = exchange(speaking, head)
    assert b" 400 " in reply.split(b"\r\n")[0]
    error = json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["type"] == "invalid_request_error"
    assert b"zanzibar" not in reply


def exchange(server: RunningServer, raw: bytes) -> bytes:
    """Sends bytes and reads until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall(raw)
        connection.settimeout(10)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_the_sdk_raises_its_own_errors(speaking: RunningServer):
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as unknown:
            sdk.chat.completions.create(model="other", messages=HELLO)
        assert unknown.value.code == "model_not_found"


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "system", MODEL, -1, 2**63, 1e308, 0.5, 1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_letters, max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for fields, _ in [*BAD_CHAT, *BAD_TEXT] for name in fields} | set(REFUSED))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON_VALUES, "content": JSON_VALUES},
        optional={"name": JSON_VALUES, "tool_calls": JSON_VALUES, "tool_call_id": JSON_VALUES},
    ),
    max_size=3,
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    path=st.sampled_from([CHAT, TEXT]),
    core=st.fixed_dictionaries({}, optional={"messages": MESSAGES | JSON_VALUES, "prompt": st.text(max_size=9) | JSON_VALUES}),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=2),
)
def test_no_body_is_answered_with_a_fault_of_the_server(client, path, core, fields):
    body = json.dumps({"model": MODEL, "max_tokens": 1, **core, **fields}).encode()
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        check_error(reply)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(raw=st.binary(max_size=200), start=st.sampled_from([b"", b'{"model": "history", "prompt": ', b'{"messages": [{']))
def test_no_bytes_are_answered_with_a_fault_of_the_server(client, raw, start):
    reply = client.post(TEXT, content=start + raw, headers={"content-type": "application/json"})
    check_error(reply, 400)


def test_texts_of_more_tokens_than_a_context_window_are_not_made_in_one_go(client):
    most = 2**17
    assert client.post("/detokenize", json={"tokens": [104] * most}).json()["prompt"] == "h" * most
    error = check_error(client.post("/detokenize", json={"tokens": [104] * (most + 1)}), 400)
    assert (error["param"], error["code"]) == ("tokens", "invalid_value")
    assert f"at most {most} tokens; send parts of them" in error["message"]
