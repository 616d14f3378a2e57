"""The server itself, asked through relay, gateway and node."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cloister.trust.sealing import HttpRequest, RequestHead
from tests.private.messages import Opening, ask
from tests.private.real_server import RealServer
from tests.sealed_cloud import LoopbackCloud, open_cloud

PROMPT = "Tell me what a cloister is."


@pytest.fixture(scope="module")
def cloud() -> Iterator[LoopbackCloud]:
    server = RealServer()
    with open_cloud(server) as cloud:
        yield cloud
        server.close()


def chat(cloud: LoopbackCloud, **options: object) -> Opening:
    content = {
        "model": "cloister-5m",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 12,
        "seed": 1,
        **options,
    }
    fields = ((b"content-type", b"application/json"),)
    head = RequestHead("POST", "https", "localhost", "/v1/chat/completions", fields)
    return ask(cloud, HttpRequest(head, json.dumps(content).encode()))


def test_an_answer_of_the_model_comes_back_sealed_whole_and_as_a_stream(cloud: LoopbackCloud) -> None:
    whole = chat(cloud)
    assert whole.head is not None
    assert whole.head.status == 200, whole.content
    answer = json.loads(whole.content)["choices"][0]["message"]["content"]
    streamed = chat(cloud, stream=True)
    events = [line[6:] for line in streamed.content.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(pieces) == answer
    node = cloud.node.posts()[-1]
    assert streamed.num_flushes == len(node.pieces) - 1 > 2, "one sealed chunk for each flush of the server, and the final one"
    for seen in (cloud.relay.posts()[-1], cloud.gateway.posts()[-1], cloud.node.posts()[-1]):
        for words in (PROMPT, answer, "cloister-5m", "chat/completions"):
            assert words.encode() not in seen.everything


def test_what_the_server_refuses_is_said_to_the_client_and_to_nobody_on_the_way(cloud: LoopbackCloud) -> None:
    refused = chat(cloud, messages="this is no list")
    assert refused.head is not None
    assert refused.head.status == 400
    assert json.loads(refused.content)["error"]["param"] == "messages"
    assert {seen.posts()[-1].status for seen in (cloud.relay, cloud.gateway, cloud.node)} == {200}
