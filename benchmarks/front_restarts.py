"""The front of two replicas ends while they answer, and a supervisor starts another: `python -m benchmarks.front_restarts`.

A supervisor as small as it can be runs the server: it starts `cloister serve` again when it has ended. 16 clients stream 200
answers, greedy and seeded, with grammars and an adapter. Once a fifth of them have come, the front gets SIGKILL, or SIGTERM
with a drain deadline that is shorter than the answers. A client whose stream ends without a finish reason, or that finds
nobody or is refused, asks again a tenth of a second later. Prints how each stream that was open ended, when the last process
below the first front was gone, when the next one served, and what came of all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.table import Table

from benchmarks.cluster_demo import TIMEOUT_S, Answer, ask, ask_all, serving
from benchmarks.cluster_faults import KV, LAYOUTS, make_bodies
from benchmarks.harness import console
from cloister.models import locate
from tests.adapter_factory import write_adapter
from tests.serving import ServeProcess, descendants

PAUSE_S: Final = 0.1
"""Between an answer that did not end and the next try of its client."""
SIGNALS: Final = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
DRAIN_S: Final = 0.1
END_S: Final = 60.0
NO_END: Final = "no end"


class Supervisor:
    """Runs a server on one port, and starts another when it has ended."""

    def __init__(self, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._flags = (*flags, "--port", port)
        self.server = ServeProcess(*self._flags)

    async def run(self) -> None:
        """Starts one server after the other."""
        while True:
            await asyncio.to_thread(self.server.process.wait)
            self.server = await asyncio.to_thread(ServeProcess, *self._flags)


@dataclass
class Restart:
    """What was seen of one signal.

    Attributes:
        ends: how the streams ended that were open when the signal came, but those with a finish reason: error -> how many.
        num_open: streams that were open.
        last_end_s: when the last of them had ended, after the signal.
        gone_s: when the last process of the first server was gone; None: not in time.
        serves_s: when the next server answered that it is well.
        num_asked: requests sent, those that were sent again included.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    last_end_s: float = 0.0
    gone_s: float | None = None
    serves_s: float | None = None
    num_asked: int = 0
    num_answered: int = 0
    num_identical: int = 0


@dataclass
class Load:
    """Clients of a server that may restart.

    Attributes:
        streaming: answers that have begun and not ended.
    """

    url: str
    bodies: list[dict[str, Any]]
    restart: Restart
    answers: dict[int, Answer] = field(default_factory=dict)
    struck_s: float | None = None
    struck: set[int] = field(default_factory=set)
    streaming: set[int] = field(default_factory=set)

    async def run(self, num_at_once: int) -> None:
        """Asks until every request has an answer that ended by itself."""
        numbers = iter(range(len(self.bodies)))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:

            async def work() -> None:
                for number in numbers:
                    while number not in self.answers:
                        await self._try(client, number)

            await asyncio.gather(*(work() for _ in range(num_at_once)))

    async def _try(self, client: httpx.AsyncClient, number: int) -> None:
        self.restart.num_asked += 1
        self.streaming.add(number)
        answer = await ask(client, self.url, self.bodies[number])
        self.streaming.discard(number)
        is_whole = answer.error is None and answer.finish_reason is not None
        if number in self.struck and self.struck_s is not None:
            self.struck.discard(number)
            self.restart.ends["answered" if is_whole else answer.error or NO_END] += 1
            self.restart.last_end_s = time.monotonic() - self.struck_s
        if is_whole:
            self.answers[number] = answer
        else:
            await asyncio.sleep(PAUSE_S)

    def strike(self, supervisor: Supervisor, number: signal.Signals) -> list[int]:
        """Sends a signal to the front; returns the processes below it."""
        below = descendants(supervisor.server.process.pid)
        self.struck, self.struck_s = set(self.streaming), time.monotonic()
        self.restart.num_open = len(self.struck)
        os.kill(supervisor.server.process.pid, number)
        return below


async def strike(
    flags: tuple[str, ...], number: signal.Signals, bodies: list[dict[str, Any]], expected: list[Answer | None], streams: int
) -> Restart:
    """Runs one signal."""
    supervisor = await asyncio.to_thread(Supervisor, *flags)
    first = supervisor.server
    restart = Restart()
    load = Load(first.url, bodies, restart)
    supervising = asyncio.create_task(supervisor.run())
    try:
        loading = asyncio.create_task(load.run(streams))
        while len(load.answers) < len(bodies) // 5:
            await asyncio.sleep(0.02)
        below = load.strike(supervisor, number)
        await _watch(restart, load, below, supervisor, first)
        await loading
    finally:
        supervising.cancel()
        await asyncio.to_thread(supervisor.server.stop)
    restart.num_answered = len(load.answers)
    restart.num_identical = sum(
        (load.answers[n].text, load.answers[n].finish_reason) == (e.text, e.finish_reason)
        for n, e in enumerate(expected)
        if e is not None
    )
    return restart


async def _watch(restart: Restart, load: Load, below: list[int], supervisor: Supervisor, first: ServeProcess) -> None:
    """Waits until the first server's processes are gone, and another one serves."""
    assert load.struck_s is not None
    while time.monotonic() - load.struck_s < END_S and (restart.gone_s is None or restart.serves_s is None):
        now_s = time.monotonic() - load.struck_s
        if restart.gone_s is None and not any(Path(f"/proc/{pid}").exists() for pid in below):
            restart.gone_s = now_s
        if restart.serves_s is None and supervisor.server is not first and await asyncio.to_thread(supervisor.server.is_well):
            restart.serves_s = time.monotonic() - load.struck_s
        await asyncio.sleep(0.02)


async def run(given: argparse.Namespace) -> bool:
    """Runs every signal on every layout; returns whether all was well."""
    table = Table("layout", "signal", "open streams", "ended", "last end, s", "processes gone, s", "serves again, s", "asked",
                  "answered", "identical")  # fmt: skip
    is_well = True
    with tempfile.TemporaryDirectory() as folder:
        adapter = write_adapter(Path(folder) / "ann", locate(given.model), size=0.05)
        flags = ("--model", given.model, "--num-threads", "1", "--kv-memory-mb", "64", "--lora", f"ann={adapter}",
                 "--drain-timeout-s", str(DRAIN_S))  # fmt: skip
        bodies = make_bodies(given.requests, given.max_tokens, given.model)
        expected: list[Answer | None] = [None] * len(bodies)
        async with serving(*flags) as (alone, _):
            await ask_all(alone.url, bodies, given.streams, expected)
        for layout in given.layouts:
            layout_flags = [KV["local"] if flag == "KV" else flag for flag in LAYOUTS[layout]]
            for name in given.signals:
                number = SIGNALS[name]
                seen = await strike((*flags, *layout_flags), number, bodies, expected, given.streams)
                console.print(f"{layout}; {name}: {seen}")
                ends = "; ".join(f"{count} {end}" for end, count in seen.ends.most_common())
                times = [f"{s:.2f}" if s is not None else "not in time" for s in (seen.last_end_s, seen.gone_s, seen.serves_s)]
                counts = (seen.num_asked, seen.num_answered, seen.num_identical)
                table.add_row(layout, name, str(seen.num_open), ends, *times, *map(str, counts))
                is_well &= seen.num_identical == given.requests and seen.gone_s is not None and NO_END not in seen.ends
    console.print(table)
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), metavar="LAYOUT", default=["2 mixed"])
    parser.add_argument("--signals", nargs="*", choices=list(SIGNALS), metavar="SIGNAL", default=list(SIGNALS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=400)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends, too
    return 0 if asyncio.run(run(given)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
