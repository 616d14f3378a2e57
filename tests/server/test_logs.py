"""Nothing a user sent is ever logged, whatever goes wrong with it."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from dataclasses import replace

import httpx
import pytest

from cloister.types.config import ServerConfig
from cloister.types.logs import FORMATS, set_up_logging
from tests.server.running_server import (
    MODEL,
    ScriptedEngine,
    make_gate,
    says,
    serving,
    serving_script,
    start_slow,
    start_speaking,
)
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

    with serving_script(model_path, ScriptedEngine(fail)) as server:
        for stream in (False, True):
            body = {"model": MODEL, "prompt": SECRET, "stream": stream}
            reply = httpx.post(f"{server.url}/v1/completions", json=body)
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

    with serving_script(model_path, ScriptedEngine(fail)) as server:
        body = {"model": MODEL, "prompt": SECRET, "stream": True}
        reply = httpx.post(f"{server.url}/v1/completions", json=body)
    events = reply.text.strip().split("\n\n")
    assert '"type":"server_error"' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert "unexpected KeyError" in logs.text
    assert SECRET not in logs.text


def test_no_request_good_or_bad_is_logged(model_path, logs, capfd):
    with serving_script(model_path, ScriptedEngine(says("ok"))) as server, httpx.Client(base_url=server.url) as client:
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
    with serving_script(model_path, ScriptedEngine(says("ok"))) as server:
        reply = httpx.post(
            f"{server.url}/v1/completions", json={"messages": HELLO}, headers={"authorization": f"Bearer {SECRET}"}
        )
    assert SECRET not in reply.text


@pytest.fixture
def lines(monkeypatch):
    """What a server that logs JSON wrote so far, as objects."""
    stream, root, ours = io.StringIO(), logging.getLogger(), logging.getLogger("cloister")
    handlers, levels = root.handlers, (root.level, ours.level)
    set_up_logging("json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


LOGGING = ServerConfig(port=0, log_requests=True, drain_timeout_s=1.0)


def test_every_request_leaves_one_line_of_counts_and_times(model_path, lines):
    with serving(model_path, lambda: start_speaking(model_path), config=LOGGING) as server:
        reply = httpx.post(
            f"{server.url}/v1/completions", json={"model": MODEL, "prompt": ["four", "fives"], "max_tokens": 3, "n": 2}
        )
        httpx.get(f"{server.url}/v1/models")
        httpx.get(f"{server.url}/health")
        httpx.get(f"{server.url}/metrics")
        page = httpx.get(f"{server.url}/").text
        assert httpx.get(server.url + re.findall(r'/page/[^"]+[.]js', page)[0]).status_code == 200
    (line, listed, shown) = lines()
    assert line["request_id"] == reply.headers["x-request-id"]
    assert (
        line
        | {
            "level": "info",
            "message": "request",
            "method": "POST",
            "route": "/v1/completions",
            "status": 200,
            "num_prompts": 2,
            "num_prompt_tokens": 9,
            "num_output_tokens": 12,
            "finish_reasons": ["length"] * 4,
        }
        == line
    )
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["duration_s"] < 300
    assert "client" not in line
    assert (listed["route"], listed["status"]) == ("/v1/models", 200)
    assert "num_prompts" not in listed
    assert shown["route"] == "/"


def test_the_line_of_a_client_that_left_has_what_the_engine_did_for_it(model_path, lines):
    with serving(model_path, lambda: start_slow(model_path), config=LOGGING) as server:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
            stream = reply.iter_lines()
            next(stream)
        deadline = time.monotonic() + 300
        while not lines():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    (line,) = lines()
    assert line["finish_reasons"] == ["abort"]
    assert 1 <= line["num_output_tokens"] < 150


def test_the_address_of_a_client_is_logged_where_a_setting_says_so(model_path, lines):
    with serving(model_path, lambda: start_speaking(model_path), config=replace(LOGGING, log_clients=True)) as server:
        httpx.get(f"{server.url}/v1/models")
    assert lines()[0]["client"] == "127.0.0.1"


def test_a_strict_profile_logs_no_single_request(model_path, lines):
    with serving(model_path, lambda: start_speaking(model_path), gate=make_gate("private"), config=LOGGING) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200
    assert lines() == []


def test_a_marker_planted_everywhere_is_in_no_line_and_no_figure(model_path, lines, capfd):
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    marked = {"x-marker": SECRET, "user-agent": SECRET, "referer": f"http://{SECRET}/", "traceparent": SECRET}
    with (
        serving(model_path, lambda: start_speaking(model_path), config=replace(LOGGING, log_clients=True)) as server,
        httpx.Client(base_url=server.url, headers=marked) as client,
    ):
        body = {"model": MODEL, "prompt": SECRET, "max_tokens": 2, "user": SECRET, "stop": SECRET, "metadata": {SECRET: SECRET}}
        for fields in ({}, {"stream": True}, {"model": SECRET}, {SECRET: 1}, {"temperature": SECRET}):
            client.post(f"/v1/completions?{SECRET}={SECRET}", json={**body, **fields})
        client.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": SECRET}]})
        client.request(SECRET, "/v1/models")
        client.get(f"/{SECRET}")
        client.get(f"/v1/models/{SECRET}", headers={"authorization": f"Bearer {SECRET}"})
        figures = client.get("/metrics").text
    captured = capfd.readouterr()
    assert len(lines()) == 9
    for text in (json.dumps(lines()), figures, captured.out, captured.err):
        assert SECRET not in text
    assert {line["method"] for line in lines()} == {"POST", "GET", "other"}


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_words_of_other_packages_and_of_exceptions_are_not_written(log_format):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATS[log_format]())
    logger = logging.getLogger("elsewhere")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        logger.error("cannot read %s", SECRET)
        logger.error(f"cannot read {SECRET}")
        try:
            raise ValueError(SECRET)
        except ValueError:
            logger.exception("failed: %s", SECRET, extra={"prompt": SECRET})
    finally:
        logger.removeHandler(handler)
    written = stream.getvalue()
    assert SECRET not in written
    assert "cannot read …" in written
    assert "a message from test_logs.py" in written
    assert "ValueError at test_logs.py" in written


def test_a_line_of_text_has_its_fields_by_name(lines):
    record = logging.makeLogRecord({"name": "cloister.requests", "levelno": 20, "levelname": "INFO", "msg": "request"})
    record.__dict__.update(route="/v1/models", status=200, duration_s=0.0012345, finish_reasons=["stop", "length"])
    line = FORMATS["text"]().format(record)
    assert line.endswith(
        " INFO cloister.requests: request route=/v1/models status=200 duration_s=0.001234 finish_reasons=stop,length"
    )


def test_a_line_that_cannot_be_written_brings_no_text_of_an_exception_to_standard_error(capfd, monkeypatch):
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(logging, "raiseExceptions", True)
    ours = logging.getLogger("cloister")
    before, levels = list(root.handlers), (root.level, ours.level)
    set_up_logging("text", stream)
    try:
        stream.close()  # as a disk that is full
        try:
            raise ValueError(SECRET)
        except ValueError:
            logging.getLogger("cloister.server").error("a mistake of ours")
    finally:
        root.handlers[:] = before
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
    assert SECRET not in capfd.readouterr().err
