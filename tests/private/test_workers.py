"""A sealed node of real processes: who asks is answered by a worker that ends, and the front says when it can answer nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cloister.client.residue_audit.node import SealedNode
from cloister.private.nodes import KEYS_PATH
from cloister.private.problems import PROBLEM_MEDIA_TYPE
from cloister.trust.residue.processes import ProcessTree
from cloister.trust.sealing import (
    CHUNKED,
    HttpRequest,
    RequestHead,
    choose_configuration,
    encode_request,
    parse_keys,
    seal_chunked_request,
)
from cloister.trust.tokens.redeem import BUDGET_FIELD, with_budget

BODY = {"prompt": "Once", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Node(SealedNode):
    @property
    def address(self) -> str:
        return self._program.address

    @property
    def process(self) -> subprocess.Popen[str]:
        return self._program.process

    def pids(self, role: str) -> list[int]:
        family = ProcessTree(self.roots)
        return [process.pid for process in family.alive() if self.role(process) == role and process.parent]

    def ask(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        async def run() -> httpx.Response:
            async with self.client() as client:
                return await client.post(path, json=body)

        return asyncio.run(run())


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    running = Node("open")
    yield running
    running.stop()


def test_a_request_is_answered(node: Node) -> None:
    reply = node.ask(BODY)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 6


def test_errors_of_the_server_come_back_sealed(node: Node) -> None:
    assert node.ask({**BODY, "model": "another"}).status_code == 404
    assert node.ask(BODY, "/metrics").status_code == 404


def test_nothing_is_answered_in_the_clear(node: Node) -> None:
    assert httpx.post(f"{node.address}/v1/completions", json=BODY).status_code == 404
    assert httpx.post(f"{node.address}/ohttp", json=BODY).status_code == 415


@pytest.mark.parametrize(("told", "status"), [("512", 200), ("1", 409), (None, 409)])
def test_a_worker_refuses_in_the_clear_what_was_sealed_with_another_budget(node: Node, told: str | None, status: int) -> None:
    keys = parse_keys(httpx.get(f"{node.address}{KEYS_PATH}", timeout=300).content)
    fields = ((b"content-type", b"application/json"),)
    request = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/completions", fields), json.dumps(BODY).encode())
    sealed, _ = seal_chunked_request(choose_configuration(keys), encode_request(with_budget(request, 512)))
    headers = {"content-type": CHUNKED.request_type, **({BUDGET_FIELD: told} if told else {})}
    reply = httpx.post(f"{node.address}/ohttp", content=sealed, headers=headers, timeout=300)
    assert reply.status_code == status
    assert reply.headers["content-type"] == (CHUNKED.response_type if status == 200 else PROBLEM_MEDIA_TYPE)


def test_slow_bodies_hold_no_worker(node: Node) -> None:
    address = httpx.URL(node.address)
    head = f"POST /ohttp HTTP/1.1\r\nhost: node\r\ncontent-type: {CHUNKED.request_type}\r\ncontent-length: 9999\r\n\r\nx"
    with contextlib.ExitStack() as stack:
        for _ in range(256):  # more than there may be workers
            slow = stack.enter_context(socket.create_connection((address.host, address.port or 80), timeout=300))
            slow.sendall(head.encode())
        time.sleep(0.2)
        assert node.ask(BODY).status_code == 200


def test_a_stream_that_is_left_ends_its_worker(node: Node) -> None:
    before = set(node.pids("worker"))  # of the test before, which may end just now

    async def run() -> list[int]:
        body = {**BODY, "max_tokens": 7000, "stream": True}
        async with node.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_bytes():
                return [pid for pid in node.pids("worker") if pid not in before]
        return []

    workers = asyncio.run(run())
    assert len(workers) == 1
    give_up_s = time.monotonic() + 300
    while os.path.exists(f"/proc/{workers[0]}") and _state(workers[0]) != "Z":
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def test_two_readings_of_its_metrics_show_nothing_of_the_request_between_them(node: Node) -> None:
    before = httpx.get(f"{node.address}/metrics")
    node.ask(BODY)
    assert httpx.get(f"{node.address}/metrics").content == before.content
    assert before.headers["content-type"].startswith("text/plain")
    assert "cloister_engine_healthy 1" in before.text.splitlines()
    assert "cloister_minute_requests" not in before.text  # a handful of requests is never shown


def test_a_node_without_its_key_service_ends_and_says_so_by_its_status(node: Node) -> None:
    assert httpx.get(f"{node.address}/health").status_code == 200
    os.kill(node.pids("sealer")[0], signal.SIGKILL)
    assert node.process.wait(300) == 1


def _state(pid: int) -> str:
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout[:1]
