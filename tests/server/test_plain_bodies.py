"""Short bodies of text are read on the event loop, one in each turn; all others in threads."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from cloister.server.plain_bodies import MAX_BYTES, is_plain
from cloister.server.reading_queue import ReadingQueue, ReadingThreads

TALK = {"messages": [{"role": "user", "content": "Grüße \\ud83d\\ude00"}], "max_tokens": 8, "stream": True, "temperature": 0}


@pytest.mark.parametrize("body", [TALK, TALK | {"model": "m", "stop": ["a", "b"], "seed": 1}, {"prompt": "x", "n": 2}])
def test_a_short_body_of_text_is_plain(body: dict[str, object]) -> None:
    assert is_plain(json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [
        TALK | {"response_format": {"type": "json_object"}},
        TALK | {"tools": []},
        TALK | {"logit_bias": {"1": 2}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
        {"prompt": ["a", "b"]},
        {"messages": [{"role": "user", "content": "x" * MAX_BYTES}]},
    ],
)
def test_what_may_take_longer_than_its_length_tells_is_not(body: dict[str, object]) -> None:
    assert not is_plain(json.dumps(body).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"messages": [], "too\\u006cs": []}', b"[" * 2000])
def test_a_body_that_cannot_be_read_is_not_plain(raw: bytes) -> None:
    assert not is_plain(raw)


def test_one_quick_reading_in_a_turn_is_done_on_the_loop_and_the_others_in_threads() -> None:
    own = threading.get_ident()

    async def main() -> tuple[list[bool], list[bool]]:
        threads = ReadingThreads(ReadingQueue(4))
        on_loop = await asyncio.gather(*(threads.run("t", 10, threading.get_ident, is_quick=True) for _ in range(4)))
        later = [await threads.run("t", 10, threading.get_ident, is_quick=quick) for quick in (True, True, False)]
        return [each == own for each in on_loop], [each == own for each in later]

    at_once, later = asyncio.run(asyncio.wait_for(main(), 300))
    assert at_once == [True, False, False, False]
    assert later == [True, False, False], "the second one has come in the same turn"


def test_a_quick_reading_that_fails_gives_its_slot_back() -> None:
    def fail() -> None:
        raise ValueError("x")

    async def main() -> str:
        threads = ReadingThreads(ReadingQueue(1))
        with pytest.raises(ValueError, match="x"):
            await threads.run("t", 10, fail, is_quick=True)
        return await threads.run("t", 10, lambda: "read")

    assert asyncio.run(asyncio.wait_for(main(), 60)) == "read"


def test_quick_readings_wait_for_their_turn_as_all_others_do() -> None:
    async def main() -> bool:
        threads, go_on = ReadingThreads(ReadingQueue(1)), threading.Event()
        held = asyncio.create_task(threads.run("a", 10, lambda: go_on.wait(300)))
        await asyncio.sleep(0)
        quick = asyncio.create_task(threads.run("b", 10, lambda: None, is_quick=True))
        for _ in range(5):
            await asyncio.sleep(0)
        waited = not quick.done()
        go_on.set()
        await asyncio.gather(held, quick)
        return waited

    assert asyncio.run(asyncio.wait_for(main(), 300))
