"""Which files of ours one streamed chat request passes, once the server is warm: in the front and in the engine process.

    python -m benchmarks.request_path          # a table by package
    python -m benchmarks.request_path --files  # and every file

A file counts if a function of it ran between the request's head and the last byte of its reply, on any thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

import httpx

import cloister
from cloister.engine import EngineClient, EngineCore, ProcessTransport
from cloister.policy import Gate, Policy
from cloister.server.app import create_app
from cloister.server.serve import Server, ServerApp, address_of, bind
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.events import Ended, Outputs

ENTRY: Final = "benchmarks.request_path:build_traced_engine"
RESULT_FILE: Final = "CLOISTER_REQUEST_PATH"
"""Environment variable with the file that the engine process writes its part to."""
NUM_WARM: Final = 2
ROOT: Final = str(Path(cloister.__file__).parent) + os.sep


class FileTrace:
    """The files under the package in which a function is entered, on threads that begin after `start` and on this one."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def start(self) -> None:
        """Traces from now on."""
        threading.settrace(self._note)
        sys.settrace(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT):
            self.files.add(name.removeprefix(ROOT))


def build_traced_engine(config: EngineConfig) -> EngineCore:
    """The engine of `cloister serve`, which writes down the files that the request after the warm ones passed."""
    from cloister.launch import build_engine

    core = build_engine(config)
    trace, num_ended, run = FileTrace(), 0, core.run

    def run_traced(emit: Any) -> None:
        def watch(message: Outputs) -> None:
            nonlocal num_ended
            emit(message)
            num_ended += sum(isinstance(event, Ended) and event.last for event in message.events)
            if num_ended == NUM_WARM:
                trace.files.clear()
            elif num_ended > NUM_WARM:
                Path(os.environ[RESULT_FILE]).write_text(json.dumps(sorted(trace.files)))

        trace.start()
        run(watch)

    core.run = run_traced  # type: ignore[method-assign]
    return core


async def trace_request(model: str) -> dict[str, list[str]]:
    """Returns the files of one streamed chat request, by process."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "engine.json"
        os.environ[RESULT_FILE] = str(result)
        trace = FileTrace()
        trace.start()
        engine = EngineClient(ProcessTransport(ENTRY), EngineConfig(model=model, kv_memory_mb=64, num_threads=1))
        await engine.start()
        path, config = Path(engine.model.path), ServerConfig(port=0)
        tokenizer = Tokenizer(path)
        gate = Gate(Policy("open"), None, loopback=True)
        app = create_app(engine, tokenizer, ChatTemplate.load(path, tokenizer.special), gate, config)
        with bind(config.host, 0) as listener:
            server = Server(ServerApp(app, engine), config)
            serving = asyncio.create_task(server.serve([listener]))
            url = address_of(listener)
            for _ in range(NUM_WARM):
                await _ask(url)
            trace.files.clear()
            await _ask(url)
            front = sorted(trace.files)
            sys.settrace(None)
            threading.settrace(None)
            while not result.exists():
                await asyncio.sleep(0.05)
            server.should_exit = True
            await serving
        return {"front": front, "engine": json.loads(result.read_text())}


async def _ask(url: str) -> None:
    fields = {"messages": [{"role": "user", "content": "What is VACUUM for?"}], "max_tokens": 8, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=30.0) as client,
        client.stream("POST", "/v1/chat/completions", json=fields) as reply,
    ):
        body = b"".join([part async for part in reply.aiter_bytes()])
    assert b"[DONE]" in body


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--files", action="store_true", help="print every file")
    options = parser.parse_args()
    found = asyncio.run(trace_request(options.model))
    both = set(found["front"]) | set(found["engine"])
    packages = {side: Counter(name.split(os.sep)[0] for name in names) for side, names in found.items()}
    print("| package | front | engine |\n|---|---|---|")
    for package in sorted({name.split(os.sep)[0] for name in both}):
        print(f"| {package} | {packages['front'][package] or ''} | {packages['engine'][package] or ''} |")
    print(f"| in all {len(both)} | {len(found['front'])} | {len(found['engine'])} |")
    if options.files:
        for side, names in found.items():
            print(f"\n{side}:", *names, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
