"""Nothing a user sent is ever logged, whatever goes wrong with it."""

from __future__ import annotations

import logging

import httpx
import pytest

from tests.server.house import MODEL, ScriptedEngine, says, serving_script
from tests.server.test_bad_input import BAD_CHAT, BAD_TEXT, HELLO, SECRET


@pytest.fixture
def logs(caplog):
    with caplog.at_level(logging.DEBUG):
        # The test's own client logs its URLs.
        for name in ("httpx", "httpcore", "httpcore.http11", "httpcore.connection"):
            logging.getLogger(name).setLevel(logging.WARNING)
        yield caplog


def test_a_mistake_of_ours_is_a_500_and_logged_without_its_words(model_path, logs, capfd):
    def fail(request):
        raise ValueError(f"cannot do {SECRET} {bytes(request.token_ids)!r}")

    with serving_script(model_path, ScriptedEngine(fail)) as house:
        for stream in (False, True):
            body = {"model": MODEL, "prompt": SECRET, "stream": stream}
            reply = httpx.post(f"{house.url}/v1/completions", json=body)
            assert reply.status_code == 500
            assert reply.json()["error"]["type"] == "server_error"
            assert SECRET not in reply.text
    assert "unexpected ValueError at test_logs.py" in logs.text
    captured = capfd.readouterr()
    assert SECRET not in logs.text + captured.out + captured.err


def test_a_mistake_in_the_middle_of_a_stream_ends_it(model_path, logs):
    def fail(request):
        yield from says("x")(request)[:1]
        raise KeyError(SECRET)

    with serving_script(model_path, ScriptedEngine(fail)) as house:
        body = {"model": MODEL, "prompt": SECRET, "stream": True}
        reply = httpx.post(f"{house.url}/v1/completions", json=body)
    events = reply.text.strip().split("\n\n")
    assert '"type":"server_error"' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert "unexpected KeyError" in logs.text
    assert SECRET not in logs.text


def test_no_request_good_or_bad_is_logged(model_path, logs, capfd):
    with serving_script(model_path, ScriptedEngine(says("ok"))) as house, httpx.Client(base_url=house.url) as client:
        for path, core, table in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}, BAD_CHAT),
            ("/v1/completions", {"prompt": SECRET}, BAD_TEXT),
        ):
            for fields in ({}, {"stream": True}, {"user": SECRET, "stop": SECRET}, *(fields for fields, _ in table)):
                client.post(path, json={"model": MODEL, **core, **fields})
        client.post("/v1/completions", content=f'{{"prompt": "{SECRET}'.encode(), headers={"content-type": "application/json"})
        client.get(f"/{SECRET}?{SECRET}={SECRET}", headers={"authorization": f"Bearer {SECRET}", SECRET: SECRET})
    captured = capfd.readouterr()
    assert SECRET not in logs.text + captured.out + captured.err


def test_an_error_never_shows_the_key(model_path):
    with serving_script(model_path, ScriptedEngine(says("ok"))) as house:
        reply = httpx.post(
            f"{house.url}/v1/completions", json={"messages": HELLO}, headers={"authorization": f"Bearer {SECRET}"}
        )
    assert SECRET not in reply.text
