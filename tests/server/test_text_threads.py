"""How many threads read prompts: as the settings say, not as the host is."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from pathlib import Path

import pytest

from cloister.server.app import create_routes, make_exposition
from cloister.server.calls import HttpCalls
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import ServerConfig
from tests.ratchets.test_front import SpokenEngine
from tests.server.running_server import make_gate

SOURCE = Path(__file__).parents[2] / "src" / "cloister"


@pytest.mark.parametrize(("num_threads", "expected"), [(1, 2), (3, 3), (64, 8)])
def test_text_work_takes_as_many_threads_as_the_settings_give(monkeypatch, model_path, num_threads, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    engine, gate, config = SpokenEngine().client, make_gate(), ServerConfig()
    exposition = make_exposition(engine, gate, [])
    routes = create_routes(
        engine, Tokenizer(model_path), ChatTemplate.load(model_path), gate, config, HttpCalls(exposition.count_reply),
        exposition, names=[], request_timeout_s=10.0, num_threads=num_threads,
    )  # fmt: skip
    barrier, sizes, lock = threading.Barrier(expected), list[int](), threading.Lock()
    running = 0

    def meet() -> None:
        try:
            barrier.wait(300)
        except threading.BrokenBarrierError:
            raise AssertionError(f"{max(sizes)} threads work at once, and not {expected}") from None

    def work() -> None:
        nonlocal running
        with lock:
            running += 1
            sizes.append(running)
        meet()
        with lock:
            running -= 1
        meet()

    async def main() -> None:
        await asyncio.gather(*(routes.state.server.off_the_loop(work) for _ in range(2 * expected)))

    asyncio.run(main())
    assert max(sizes) == expected


def test_only_one_place_asks_how_many_processors_the_host_has():
    asking = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if re.search(r"\bcpu_count\(", path.read_text("utf-8"))
    }
    assert asking == {"engine/machine.py", "cli/doctor.py"}, "limits come from the cgroup: engine.machine.read_machine"
