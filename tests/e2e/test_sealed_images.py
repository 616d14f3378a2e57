"""Images in a sealed node as an operator starts it: decoded behind the seal, in a process that can do nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister.private.gateway import NODE_PATH
from cloister.private.nodes import KEYS_PATH
from cloister.trust.sealing import (
    WHOLE,
    HttpRequest,
    RequestHead,
    decode_response,
    encode_request,
    open_response,
    parse_keys,
    seal_request,
)
from cloister.trust.shape import SIZE_CLASSES, Unshaper
from tests.e2e.test_sealed_serve import Node
from tests.server.test_images import OTHER, PNG, asks, part
from tests.trust.hardening.launching import needs_measures
from tests.vision_factory import encode_picture, make_picture, make_vision_model

pytestmark = needs_measures

SETTINGS = ("--max-model-len", "400", "--kv-memory-mb", "8", "--weights-cache", "", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "seeing")


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def node(path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node("--sealed", "--model", str(path), "--dtype", request.param, *SETTINGS) as running:
        yield running


def ask(node: Node, *parts: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Seals a chat in the class `small`; returns status and content of the answer."""
    keys = httpx.get(node.url + KEYS_PATH, timeout=300).content
    body = {"model": "seeing", "messages": asks(*parts), "max_tokens": 8, "temperature": 0}
    head = RequestHead("POST", "https", "node", "/v1/chat/completions", ((b"content-type", b"application/json"),))
    message = encode_request(HttpRequest(head, json.dumps(body).encode())).ljust(SIZE_CLASSES["small"].request_bytes, b"\0")
    sealed, exchange = seal_request(parse_keys(keys)[0], message)
    answer = httpx.post(node.url + NODE_PATH, content=sealed, headers={"content-type": WHOLE.request_type}, timeout=300)
    assert answer.status_code == 200, answer.content
    opened = decode_response(Unshaper(required=True).feed(open_response(exchange, answer.content)))
    return opened.head.status, json.loads(opened.content)


def test_a_hardened_node_sees_and_refuses_as_a_plain_server_does(node: Node, path: Path) -> None:
    large = encode_picture(make_picture(1500, 1100, 9), "JPEG")
    with ThreadPoolExecutor(4) as pool:  # an answer of this class takes seconds, whatever it says
        *answers, refused = pool.map(lambda images: ask(node, *map(part, images)), ([PNG, OTHER], [large], [], [b"no image"]))
    assert [status for status, _ in answers] == [200] * 3, answers
    assert (refused[0], refused[1]["error"]["code"]) == (400, "invalid_image")
    assert len({content["choices"][0]["message"]["content"] for _, content in answers}) == 3
    assert not any("image" in line for line in node.lines), node.lines


def test_the_process_that_decodes_has_every_measure_one_socket_and_ends_with_its_request(node: Node) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, node, part(PNG))
        node.wait_until(lambda: node.pids_named("cl-image"))
        (pid,) = node.pids_named("cl-image")
        node.wait_until(lambda: node.status(pid, "CapEff") == {"0000000000000000"} and len(os.listdir(f"/proc/{pid}/fd")) == 1)
        assert node.status(pid, "Seccomp") == {"2"}
        assert node.status(pid, "NoNewPrivs") == {"1"}
        assert os.readlink(f"/proc/{pid}/fd/{os.listdir(f'/proc/{pid}/fd')[0]}").startswith("socket:")
        # two filters of its own besides those of every worker: it is confined further
        (worker,) = node.pids_named("cl-worker")
        most = max(map(int, node.status(worker, "Seccomp_filters")))
        node.wait_until(lambda: min(map(int, node.status(pid, "Seccomp_filters"))) > most)
        assert asking.result()[0] == 200
    node.wait_until(lambda: not node.pids_named("cl-image"))
