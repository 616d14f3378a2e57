"""What a real server flushes while it answers, and when: the input of every shape."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from benchmarks.harness import make_progress
from benchmarks.traffic.prompts import Prompt
from cloister.engine import EngineClient, ProcessTransport
from cloister.launch import ENGINE_ENTRY, resolve_settings
from cloister.policy import Gate
from cloister.server.app import create_app
from cloister.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer as the server gave it.

    Attributes:
        flushes: (seconds since the request, sizes of the events in it), the first with the head's size as its first event.
    """

    label: int
    group: str
    flushes: list[tuple[float, list[int]]]


async def open_app(
    num_threads: int | None, model: str, profile: str = "open", quant: str = "none", **drafting: object
) -> tuple[ASGIApp, EngineClient]:
    """Starts a server without a socket: an engine process, and the application in front of it, as in a sealed node.

    Args:
        drafting: settings of drafters; without, nothing drafts.
    """
    flags = {"model": model, "num_threads": num_threads, "quant": quant, "kv_memory_mb": 512, "profile": profile}
    settings = resolve_settings({**flags, "sealed": True, "speculate": "none", **drafting})
    gate = Gate(settings.policy, None, loopback=True, sealed=True)
    engine = EngineClient(ProcessTransport(ENGINE_ENTRY), settings.engine.config)
    await engine.start()
    path = Path(engine.model.path)
    app = create_app(engine, Tokenizer(path), ChatTemplate.load(path), gate, settings.server.config)
    return app, engine


def make_body(prompt: Prompt, max_tokens: int) -> bytes:
    """Returns the request of one prompt: a stream at the usual temperature, with a seed of its own."""
    wish = {"prompt": prompt.text, "max_tokens": max_tokens, "temperature": 0.7, "stream": True}
    return json.dumps(wish).encode()


async def call(app: ASGIApp, body: bytes, send: Callable[[Message], Awaitable[None]]) -> None:
    """Sends one request into the application, as a server would."""
    waits = asyncio.Event()

    async def receive() -> Message:
        if waits.is_set():
            await asyncio.sleep(3600)
        waits.set()
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)


async def record(app: ASGIApp, prompts: Sequence[Prompt], lengths: Sequence[int], num_at_once: int) -> list[Recording]:
    """Answers every prompt, `num_at_once` at a time, and notes what was flushed when."""
    recordings: list[Recording | None] = [None] * len(prompts)
    places = asyncio.Semaphore(num_at_once)
    with make_progress() as progress:
        task = progress.add_task("record", total=len(prompts))

        async def one(number: int) -> None:
            async with places:
                recordings[number] = await _record_one(app, prompts[number], lengths[number])
            progress.advance(task)

        await asyncio.gather(*(one(number) for number in range(len(prompts))))
    return [recording for recording in recordings if recording is not None]


async def _record_one(app: ASGIApp, prompt: Prompt, max_tokens: int) -> Recording:
    began_s = time.monotonic()
    flushes: list[tuple[float, list[int]]] = []
    head: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] != 200:
                raise SystemExit(f"the server answered {message['status']}; the figures would mean nothing")
            head.append(sum(len(name) + len(value) + 4 for name, value in message["headers"]) + 8)
        elif body := message.get("body", b""):
            events = [len(event) + 2 for event in body.split(b"\n\n") if event]
            flushes.append((time.monotonic() - began_s, [*head, *events]))
            head.clear()

    await call(app, make_body(prompt, max_tokens), send)
    return Recording(prompt.label, prompt.group, flushes)


def write(path: Path, recordings: Sequence[Recording]) -> None:
    """Keeps recordings: sizes and times, nothing that was said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(recording)) + "\n" for recording in recordings), encoding="utf-8")


def read(path: Path) -> list[Recording]:
    """Returns what was kept."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Recording(row["label"], row["group"], [(t, sizes) for t, sizes in row["flushes"]]) for row in rows]
