"""Our HTTP server under streaming requests, all at once, from a client that does as little as it can."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.peers.engines import Launch, cloister_settings
from benchmarks.peers.work import MIN_MEASURED_S, NUM_NEW, Figure, Tokens
from tests.serving import ServeProcess

_START_TIMEOUT_S: Final = 300.0
_ANSWER_TIMEOUT_S: Final = 600.0
_HOST: Final = "127.0.0.1"


class HttpServer:
    """`cloister serve` on a free port, with the settings that the engine has without it."""

    def __init__(self, launch: Launch, tokens: Tokens) -> None:
        self._tokens = tokens
        self._port = _free_port()
        flags = flags_of({**cloister_settings(launch), "host": _HOST, "port": self._port})
        self._process = ServeProcess(*flags, timeout_s=_START_TIMEOUT_S)
        with urllib.request.urlopen(f"{self._process.url}/v1/models", timeout=5) as reply:
            self._model = str(json.load(reply)["data"][0]["id"])
        self.notes: dict[str, Any] = {}

    def warm_up(self) -> None:
        asyncio.run(self._send([self._tokens.draw(64)], 4))
        asyncio.run(self._send([self._tokens.draw(520)], 2))

    def measure(self, figure: Figure, num_samples: int) -> list[float]:
        """New tokens per second, from the first request sent to the last byte read."""
        samples: list[float] = []
        begin_s = time.perf_counter()
        while len(samples) < num_samples or time.perf_counter() - begin_s < MIN_MEASURED_S:
            prompts = self._tokens.draw_mixed(figure.size)
            start_s = time.perf_counter()
            num_chunks = asyncio.run(self._send(prompts, NUM_NEW))
            samples.append(figure.size * NUM_NEW / (time.perf_counter() - start_s))
            self.notes["chunks per request"] = round(num_chunks / figure.size, 1)
        return samples

    def close(self) -> None:
        self._process.stop()

    async def _send(self, prompts: Sequence[Sequence[int]], num_new: int) -> int:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return sum(await asyncio.gather(*(self._complete(prompt, num_new) for prompt in prompts)))

    async def _complete(self, prompt: Sequence[int], num_new: int) -> int:
        """Returns the number of events of one streamed answer.

        Raises:
            RuntimeError: the answer is not of `num_new` tokens.
        """
        reader, writer = await asyncio.open_connection(_HOST, self._port)
        writer.write(self._request(prompt, num_new))
        received = bytearray()
        while piece := await reader.read(1 << 16):
            received += piece
        writer.close()
        await writer.wait_closed()
        counted = re.search(rb'"completion_tokens":\s*(\d+)', received)
        if counted is None or int(counted[1]) != num_new:
            raise RuntimeError(f"the server did not answer with {num_new} tokens: {bytes(received[:300])!r}")
        return received.count(b"data: ")

    def _request(self, prompt: Sequence[int], num_new: int) -> bytes:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as the command line takes them."""
    flags: list[str] = []
    for name, value in settings.items():
        kebab = name.replace("_", "-")
        flags += [f"--{kebab}" if value else f"--no-{kebab}"] if isinstance(value, bool) else [f"--{kebab}", str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        return int(listener.getsockname()[1])
