"""The openai package through `SealedTransport`, at real sockets, with the embedded model behind the nodes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cloister.client import (
    AsyncSealedTransport,
    EvidenceRefusedError,
    RelayUnreachableError,
    RepeatedRequestError,
    SealedTransport,
)
from cloister.trust.attestation import AttestationPolicy
from cloister.trust.receipts import Receipt
from tests.private.real_server import RealServer
from tests.sealed_cloud import LoopbackCloud

MODEL = "cloister-5m"
ASK: Any = [{"role": "user", "content": "What is a list in Python?"}]
LONG: Any = [{"role": "user", "content": "Describe the built-in function sum."}]


def connect(cloud: LoopbackCloud, **changes: object) -> openai.OpenAI:
    transport = SealedTransport(cloud.session(**changes))
    return openai.OpenAI(base_url="https://cloister/v1", api_key="none", http_client=httpx.Client(transport=transport))


@pytest.fixture(scope="module")
def client(cloud: LoopbackCloud) -> Iterator[openai.OpenAI]:
    with connect(cloud) as client:
        yield client


def test_a_chat_is_answered_as_by_the_server_itself(client: openai.OpenAI, cloud: LoopbackCloud) -> None:
    before = cloud.num_asked
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16
    assert cloud.num_asked == before + 1


def test_tokens_arrive_while_the_answer_is_being_written(client: openai.OpenAI, server: RealServer) -> None:
    with server.standing_still(after_steps=20):
        stream = client.chat.completions.create(
            model=MODEL, messages=LONG, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        texts = (chunk.choices[0].delta.content for chunk in stream if chunk.choices)
        assert next(text for text in texts if text)
    assert sum(map(bool, texts)) > 1, "of 200 tokens; those that were not read in time come as one piece"


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"word": {"enum": ["list", "dict"]}}, "required": ["word"]},
        },
    }
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[tool], tool_choice="required", max_tokens=60)
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert json.loads(calls[0].function.arguments)["word"] in ("list", "dict")  # type: ignore[union-attr]


def test_errors_of_the_node_come_through_and_are_not_repeated(client: openai.OpenAI, cloud: LoopbackCloud) -> None:
    before = cloud.num_asked
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.chat.completions.create(model="no-such-model", messages=ASK)
    assert cloud.num_asked == before + 1


def test_who_hangs_up_ends_the_answer_at_the_node(client: openai.OpenAI, cloud: LoopbackCloud) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=LONG, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    give_up_at = time.monotonic() + 300
    while cloud.num_open and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert cloud.num_open == 0


def test_many_at_once_from_several_threads(client: openai.OpenAI) -> None:
    answers: list[str | None] = []

    def ask() -> None:
        answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=8)
        answers.append(answer.choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(answers) == 6
    assert len(set(answers)) == 1


def test_the_asynchronous_client_streams_too(cloud: LoopbackCloud) -> None:
    async def run() -> str:
        async with httpx.AsyncClient(transport=AsyncSealedTransport(cloud.session())) as sealed:
            client = openai.AsyncOpenAI(base_url="https://cloister/v1", api_key="none", http_client=sealed)
            stream = await client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    assert asyncio.run(run())


def test_a_refusal_reaches_the_program_in_words(cloud: LoopbackCloud) -> None:
    with (
        connect(cloud, policy=AttestationPolicy()) as client,
        pytest.raises(EvidenceRefusedError, match="no hardware vouches"),
    ):
        client.models.list()


def test_a_relay_that_is_not_there_reaches_the_program_in_words(cloud: LoopbackCloud) -> None:
    session = cloud.session()
    session.relay = "http://127.0.0.1:9/"
    sealed = httpx.Client(transport=SealedTransport(session))
    with (
        openai.OpenAI(base_url="https://cloister/v1", api_key="none", http_client=sealed) as client,
        pytest.raises(RelayUnreachableError, match="check its address"),
    ):
        client.models.list()


CUT_AFTER_BYTES = 2500


class BrokenOff(httpx.BaseTransport):
    """A network that breaks off in the middle of an answer."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport()
        self.sent = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self.inner.handle_request(request)
        if request.method != "POST" or request.url.path != "/":
            return response
        self.sent += 1
        response.stream = _Cut(response.stream)
        return response

    def close(self) -> None:
        self.inner.close()


class _Cut(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream | httpx.AsyncByteStream) -> None:
        assert isinstance(stream, httpx.SyncByteStream)
        self.stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left = CUT_AFTER_BYTES
        for data in self.stream:
            yield data[:left]
            left -= len(data)
            if left <= 0:
                return

    def close(self) -> None:
        self.stream.close()


def test_an_answer_that_breaks_off_is_an_error_and_is_not_sent_again(cloud: LoopbackCloud) -> None:
    wire = BrokenOff()
    body = {"model": MODEL, "messages": LONG, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.Client(transport=SealedTransport(cloud.session(), wire), base_url="https://cloister/v1", timeout=300) as client:
        received = b""

        def read() -> None:
            nonlocal received
            with client.stream("POST", "/chat/completions", json=body) as response:
                for data in response.iter_bytes():
                    received += data

        with pytest.raises(httpx.RemoteProtocolError, match="not whole"):
            read()
    assert received.startswith(b"data: ")
    assert wire.sent == 1


def test_an_sdk_that_repeats_what_took_too_long_is_stopped(cloud: LoopbackCloud, server: RealServer) -> None:
    before = cloud.num_asked
    sealed = httpx.Client(transport=SealedTransport(cloud.session()), timeout=httpx.Timeout(300, read=2.0))
    with (
        server.standing_still(after_steps=0),
        openai.OpenAI(base_url="https://cloister/v1", api_key="none", http_client=sealed) as client,
        pytest.raises(RepeatedRequestError, match="max_retries=0"),
    ):
        client.chat.completions.create(model=MODEL, messages=LONG, max_tokens=900, extra_body={"ignore_eos": True})
    assert cloud.num_asked <= before + 1, "the node may not have come to it in so short a time"


def test_an_sdk_that_hangs_up_after_the_last_event_has_its_receipt(cloud: LoopbackCloud) -> None:
    kept: list[Receipt] = []
    with connect(cloud, receipts=kept.append) as client:
        for number in range(2):
            stream = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert len(kept) == number + 1
