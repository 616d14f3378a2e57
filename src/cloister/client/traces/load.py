"""Sends marked requests, several at once, and collects what was answered."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from cloister.client.traces.shapes import MarkedRequest

NUM_AT_ONCE: Final = 8
_TEXT_KEYS: Final = frozenset({"content", "text", "reasoning_content"})


@dataclass(slots=True)
class LoadResult:
    """What became of the requests.

    Attributes:
        answers: (owner, text) of what the model wrote.
        by_shape: how many of each shape ended as expected.
        failures: how many of each shape did not, with the status that came.
    """

    answers: list[tuple[int, str]] = field(default_factory=list)
    by_shape: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


async def send_all(client: httpx.AsyncClient, calls: Sequence[tuple[int, MarkedRequest]]) -> LoadResult:
    """Sends every (owner, call) and waits for the last answer."""
    sent = LoadResult()
    waiting = iter(calls)

    async def work() -> None:
        for owner, call in waiting:
            try:
                await _send(client, owner, call, sent)
            except httpx.HTTPError as error:
                sent.failures[f"{call.shape}: {type(error).__name__}"] += 1

    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    return sent


async def _send(client: httpx.AsyncClient, owner: int, call: MarkedRequest, sent: LoadResult) -> None:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", call.path, content=call.body, headers=headers) as reply:
        pieces: list[bytes] = []
        async for piece in reply.aiter_bytes():
            pieces.append(piece)
            if call.cancels and len(pieces) > 1:
                break
    if (reply.status_code >= 400) != call.is_refused:
        sent.failures[f"{call.shape}: status {reply.status_code}"] += 1
        return
    sent.by_shape[call.shape] += 1
    if not call.is_refused:
        sent.answers.append((owner, "".join(_texts(b"".join(pieces)))))


def _texts(raw: bytes) -> Iterator[str]:
    """Yields what the model wrote, of a whole answer or of the events of a stream."""
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")] or [raw]
    for line in lines:
        try:
            yield from _written(json.loads(line).get("choices", []))
        except (ValueError, AttributeError):
            continue


def _written(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _written(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _TEXT_KEYS and isinstance(item, str):
                yield item
            elif key in ("message", "delta"):
                yield from _written(item)
