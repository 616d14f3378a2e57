"""A client that goes away frees what it held, streamed or not, at any moment."""

from __future__ import annotations

import json
import socket
import time

import pytest

from cloister.engine import EngineClient, ThreadTransport
from cloister.server.connection import Connection
from cloister.types.events import Ended, Stepped
from cloister.types.request import FinishReason
from tests.engine.replica import SteppedRunner, make_config, make_replica
from tests.server.running_server import MODEL, RunningServer, ScriptedEngine, endless, serving, serving_script


def send(server: RunningServer, path: str, **fields: object) -> socket.socket:
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_disconnect_closes_the_engines_iterator(model_path, stream, prompt):
    engine = ScriptedEngine(endless)
    with serving_script(model_path, engine) as server:
        connection = send(server, "/v1/completions", prompt=prompt, stream=stream)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        else:
            wait_for(lambda: len(engine.taken) == len(prompt))
        connection.close()
        wait_for(lambda: len(engine.left) == len(prompt))


def test_a_disconnect_before_the_first_token_closes_it_too(model_path):
    engine = ScriptedEngine(lambda _: [3600.0])
    with serving_script(model_path, engine) as server:
        connection = send(server, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=True)
        wait_for(lambda: engine.taken)
        connection.close()
        wait_for(lambda: engine.left)


def test_a_client_that_reads_nothing_does_not_hold_its_request_for_ever(model_path, monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 0.3)

    def flood(request):
        for piece in endless(request):
            yield 0.0 if isinstance(piece, float) else type(piece)(request_id=request.request_id, index=0, text="a" * 10_000)

    engine = ScriptedEngine(flood)
    with serving_script(model_path, engine) as server:
        connection = send(server, "/v1/completions", prompt="x", stream=True)
        wait_for(lambda: engine.left)
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_blocks_of_a_real_engine(model_path, stream):
    events = []

    async def start():
        replica = make_replica(model_path, wrap=lambda runner: SteppedRunner(runner, step_s=0.1))
        engine = EngineClient(ThreadTransport(replica.core), make_config(model_path))
        engine.subscribe(events.append)
        await engine.start()
        return engine

    with serving(model_path, start) as server:
        connection = send(server, "/v1/completions", prompt="once upon", stream=stream, max_tokens=240, ignore_eos=True)
        wait_for(lambda: any(isinstance(event, Stepped) for event in events))
        connection.close()
        wait_for(lambda: any(isinstance(event, Ended) for event in events))
        ended = next(event for event in events if isinstance(event, Ended))
        assert ended.reason is FinishReason.ABORT
        assert ended.num_output_tokens < 240
        again = send(server, "/v1/completions", prompt="z", max_tokens=1)
        assert b"200 OK" in again.recv(4096)
        again.close()
        last = [event for event in events if isinstance(event, Stepped)][-1]
        assert last.num_used_blocks <= 1


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
