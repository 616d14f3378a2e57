"""Who reads next: the backlog of one tenant delays another one by the reading that goes on at most."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister.policy import Credentials
from cloister.server.reading_queue import LONG_BYTES, ReadingQueue, ReadingThreads
from cloister.text import Tokenizer
from cloister.types.errors import QueueFullError
from tests.server.running_server import INFO, MODEL, ScriptedEngine, make_gate, says, serving_script
from tests.server.test_bad_input import check_error

DEADLINE_S = 300.0


class Readers:
    """Readings of a queue, on a clock that stands still until `read` ends one.

    Attributes:
        begun: names of readings in the order in which they began.
    """

    def __init__(self, num_slots: int = 1, **options: Any) -> None:
        self.now_s = 0.0
        self.queue = ReadingQueue(num_slots, long_bytes=10, clock=lambda: self.now_s, **options)
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, Any] = {}

    async def send(self, name: str, tenant: str, num_bytes: int = 1) -> None:
        async def wait() -> None:
            self._turns[name] = await self.queue.enter(tenant, num_bytes)
            self.begun.append(name)

        self.tasks[name] = asyncio.ensure_future(wait())
        await settle()

    async def end(self, name: str, takes_s: float = 1.0) -> None:
        self.now_s += takes_s
        self._turns.pop(name).end()
        await settle()

    async def end_all(self, takes_s: float = 1.0) -> list[str]:
        """Ends what reads, one after the other, until nothing is left, and returns the order in which all began."""
        while self._turns:
            await self.end(next(iter(self._turns)), takes_s)
        return self.begun


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(main())


def test_a_prompt_of_another_tenant_goes_before_a_backlog():
    async def test() -> None:
        readers = Readers()
        for number in range(5):
            await readers.send(f"flood {number}", "flood")
        await readers.send("honest", "honest")
        assert (await readers.end_all())[:2] == ["flood 0", "honest"]

    run(test)


def test_a_short_reading_never_waits_for_long_ones():
    async def test() -> None:
        readers = Readers(num_slots=2)
        for tenant in ("flood", "second flood"):
            for number in range(3):
                await readers.send(f"{tenant} {number}", tenant, num_bytes=1000)
        for number in range(3):
            await readers.send(f"short {number}", "honest")
            await readers.end(f"short {number}")
        assert readers.begun == ["flood 0", "short 0", "short 1", "short 2"]
        assert (await readers.end_all())[4:] == ["second flood 0", "second flood 1", "second flood 2", "flood 1", "flood 2"]

    run(test)


def test_a_long_reading_of_another_tenant_waits_for_one_piece_only():
    async def test() -> None:
        readers = Readers(num_slots=2)
        for number in range(5):
            await readers.send(f"flood {number}", "flood", num_bytes=1000)
        await readers.send("long", "honest", num_bytes=1000)
        assert (await readers.end_all(takes_s=5.0))[:2] == ["flood 0", "long"]

    run(test)


def test_shares_are_of_seconds_and_not_of_prompts():
    async def test() -> None:
        readers = Readers()
        for number in range(8):
            await readers.send(f"slow {number}", "slow")
            await readers.send(f"quick {number}", "quick")
        for _ in range(8):
            name = readers.begun[-1]
            await readers.end(name, 3.0 if name.startswith("slow") else 1.0)
        assert sum(name.startswith("quick") for name in readers.begun) == 6
        await readers.end_all()

    run(test)


def test_absence_earns_no_credit():
    async def test() -> None:
        readers = Readers()
        await readers.send("early", "absent")
        await readers.end("early", 0.5)
        for number in range(6):
            await readers.send(f"busy {number}", "busy")
        for number in range(3):
            await readers.end(f"busy {number}", 10.0)
        for number in range(3):
            await readers.send(f"back {number}", "absent")
        assert (await readers.end_all(10.0))[4:] == ["busy 3", "back 0", "busy 4", "back 1", "busy 5", "back 2"]

    run(test)


def test_a_reading_that_is_cancelled_while_it_waits_is_not_begun():
    async def test() -> None:
        readers = Readers()
        for name in ("first", "left", "third"):
            await readers.send(name, "one")
        readers.tasks["left"].cancel()
        assert await readers.end_all() == ["first", "third"]

    run(test)


def test_a_reading_that_is_cancelled_as_it_is_granted_frees_its_slot():
    async def test() -> None:
        readers = Readers()
        for name in ("first", "left", "third"):
            await readers.send(name, "one")
        readers._turns.pop("first").end()  # grants "left", whose task has not run yet
        readers.tasks["left"].cancel()
        await settle()
        assert readers.begun == ["first", "third"]
        for name in ("fourth", "fifth", "sixth"):
            await readers.send(name, "one")
        readers.tasks["fourth"].cancel()  # cancelled first, granted before its task runs
        readers._turns.pop("third").end()
        await settle()
        assert readers.begun == ["first", "third", "fifth"]

    run(test)


def test_a_tenant_whose_backlog_is_too_long_is_refused_and_others_are_not():
    async def test() -> None:
        readers = Readers(max_waiting=3, max_waiting_bytes=100)
        for number in range(4):
            await readers.send(f"flood {number}", "flood")
        with pytest.raises(QueueFullError, match="send it again in a moment"):
            await readers.queue.enter("flood", 1)
        await readers.send("honest", "honest", num_bytes=500)
        with pytest.raises(QueueFullError):
            await readers.queue.enter("honest", 1)
        assert await readers.end_all() == ["flood 0", "honest", "flood 1", "flood 2", "flood 3"]

    run(test)


def test_names_of_tenants_do_not_accumulate():
    async def test() -> None:
        readers = Readers()
        for number in range(50):
            await readers.send(f"{number}", f"tenant {number}")
            await readers.end(f"{number}")
        assert readers.queue._tenants == {}

    run(test)


def test_a_reading_that_nobody_waits_for_keeps_its_thread_until_it_ends():
    """Else those who leave and come back would have as many threads as they like."""

    async def test() -> None:
        threads, release, begun = ReadingThreads(ReadingQueue(1)), threading.Event(), threading.Event()

        def read() -> None:
            begun.set()
            release.wait(DEADLINE_S)

        left = asyncio.ensure_future(threads.run("one", 1, read))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        left.cancel()
        await settle()
        assert left.cancelled()
        second = asyncio.ensure_future(threads.run("one", 1, lambda: "read"))
        await settle()
        assert not second.done()
        release.set()
        assert await second == "read"

    run(test)


@contextmanager
def serving_two(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, threading.Event]]:
    """Yields the clients of two tenants, and what long texts wait for while they are tokenized."""
    release, encode = threading.Event(), Tokenizer.encode

    def wait(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        if len(text) > LONG_BYTES // 2:
            release.wait(DEADLINE_S)
            return [1] * 10_000
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", wait)
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda *_: 0)
    credentials, keys = Credentials.empty(), {}
    for name in ("flood", "honest"):
        credentials, keys[name] = credentials.add(name)
    with serving_script(model_path, ScriptedEngine(says("ok")), gate=make_gate("team", credentials)) as server:
        clients = [
            httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=DEADLINE_S)
            for key in keys.values()
        ]
        try:
            yield *clients, release
        finally:
            release.set()
            for client in clients:
                client.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
def test_a_flood_of_long_prompts_leaves_other_tenants_a_thread(model_path, monkeypatch, path, body):
    long = {"model": MODEL, "prompt": "x " * LONG_BYTES, "max_tokens": 1}
    with serving_two(model_path, monkeypatch) as (flood, honest, release), ThreadPoolExecutor(6) as pool:
        refused = [pool.submit(flood.post, "/v1/completions", json=long) for _ in range(6)]
        for _ in range(3):
            assert honest.post(path, json={"model": MODEL, **body}).status_code == 200
        assert not any(reply.done() for reply in refused)
        release.set()
        for reply in refused:
            assert check_error(reply.result(), 400)["code"] == "context_length_exceeded"


LONG_TEXT = "a long text of many words. " * 2000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG_TEXT}, "prompt"),
        ("/v1/completions", {"prompt": ["x", LONG_TEXT]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}, "messages"),
        ("/v1/responses", {"input": LONG_TEXT}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 1}, None),
        ("/v1/embeddings", {"input": ["x", LONG_TEXT]}, "input"),
        ("/v1/rerank", {"query": "x", "documents": ["x", LONG_TEXT]}, "documents"),
        ("/completion", {"prompt": [1, LONG_TEXT]}, "prompt"),
        ("/api/generate", {"prompt": LONG_TEXT, "raw": True}, None),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model_path, monkeypatch, path, body, param):
    encode = Tokenizer.encode

    def refuse(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        assert len(text) < len(LONG_TEXT), "it was tokenized"
        return encode(self, text, *args, **options)

    with serving_script(model_path, ScriptedEngine(says("ok"))) as server:
        exact = httpx.post(server.url + path, json={"model": MODEL, **body}).json()
        monkeypatch.setattr(Tokenizer, "encode", refuse)
        reply = httpx.post(server.url + path, json={"model": MODEL, **body})
    assert reply.status_code == 400
    assert f"The context window holds {INFO.max_model_len} tokens" in reply.text
    assert "at least" in reply.text
    assert exact == reply.json()
    if param is not None:
        error = check_error(reply, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
