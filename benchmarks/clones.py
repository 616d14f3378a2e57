"""Cold starts, clones and restarts: how long they take, and what memory each engine adds.

Engines are started by the front's own code, first as programs, then as forks of a template; each answers a request, then one is
killed. Memory is what all processes of the model hold together (PSS, which counts a shared page once), before and after another
one is added, without KV: that is new for each engine, as much as its requests need. Then whole servers are started, with
nothing kept on disk, with what an earlier start left there, and after their engine became idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.harness import Bench, make_parser
from cloister.engine import EngineClient, ProcessTransport
from cloister.engine.fork_server import ForkServer
from cloister.launch import ENGINE_ENTRY, resolve_settings
from cloister.types.config import EngineConfig
from cloister.types.request import Request, SamplingParams
from tests.serving import ServeProcess, find_processes

NUM_RUNS = 5
NUM_PROMPT, NUM_OUTPUT = 16, 16
POLL_S = 0.002
TIMEOUT_S = 120.0
MIB = 2**20


@dataclass(slots=True)
class Engine:
    """One engine, and what it took.

    Attributes:
        ready_s: until it took requests.
        answered_s: until it had answered one.
        added_bytes: what it added to the memory of the model's processes, without KV.
    """

    client: EngineClient
    ready_s: float
    answered_s: float
    added_bytes: float


class Fleet:
    """Engines of one model, and their template if they have one."""

    def __init__(self, config: EngineConfig, fork_server: ForkServer | None) -> None:
        self._config = config
        self._fork_server = fork_server
        self._num_asked = 0
        self.engines: list[Engine] = []

    async def add(self) -> Engine:
        """Starts another engine and has it answer."""
        before = self.memory_bytes()
        client = EngineClient(ProcessTransport(ENGINE_ENTRY, fork_server=self._fork_server), self._config)
        asked_s = time.monotonic()
        await client.start()
        ready_s = time.monotonic() - asked_s
        await self.ask(client)
        engine = Engine(client, ready_s, time.monotonic() - asked_s, 0.0)
        self.engines.append(engine)
        engine.added_bytes = self.memory_bytes() - before - self._kv_bytes(client)
        return engine

    async def ask(self, client: EngineClient) -> None:
        """Has an engine answer a request."""
        self._num_asked += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
        request = Request(
            request_id=f"r{self._num_asked}", token_ids=list(range(NUM_PROMPT)), sampling=sampling, timeout_s=TIMEOUT_S
        )
        async for _ in client.generate(request):
            pass

    async def restart(self, engine: Engine) -> float:
        """Kills an engine; returns the seconds until its next one has answered."""
        lost = engine.client.pid
        assert lost is not None
        os.kill(lost, signal.SIGKILL)
        killed_s = time.monotonic()
        while engine.client.pid in (None, lost) or not engine.client.health().good:
            await asyncio.sleep(POLL_S)
        await self.ask(engine.client)
        return time.monotonic() - killed_s

    async def close(self) -> None:
        for engine in self.engines:
            await engine.client.drain(0.0)

    def memory_bytes(self) -> int:
        """Returns what the engines and their template hold together."""
        pids = [engine.client.pid for engine in self.engines]
        template = None if self._fork_server is None else self._fork_server.pid
        return sum(pss_bytes(pid) for pid in (template, *pids) if pid is not None)

    def _kv_bytes(self, client: EngineClient) -> float:
        """Returns the KV that an engine has touched: the blocks of one answer."""
        step = client.last_step
        assert step is not None
        num_blocks = -(-(NUM_PROMPT + NUM_OUTPUT) // self._config.block_size)
        return num_blocks * dict(client.memory)["KV cache"] / step.num_total_blocks


def pss_bytes(pid: int) -> int:
    """Returns a process's share of memory: its own pages, and of each shared page a part (proc(5), smaps_rollup)."""
    found = re.search(r"^Pss:\s*(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


async def measure_engines(config: EngineConfig, *, forks: bool) -> dict[str, float]:
    """Returns seconds and MiB of engines that are started one after the other."""
    fleet = Fleet(config, ForkServer() if forks else None)
    try:
        first = await fleet.add()
        others = [await fleet.add() for _ in range(2)]
        restarts = [await fleet.restart(others[-1]) for _ in range(2)]
    finally:
        await fleet.close()
    return {
        "first ready": first.ready_s,
        "first answered": first.answered_s,
        "next ready": min(engine.ready_s for engine in others),
        "next answered": min(engine.answered_s for engine in others),
        "restart": min(restarts),
        "first MiB": first.added_bytes / MIB,
        "next MiB": max(engine.added_bytes for engine in others) / MIB,
    }


def time_server(flags: Sequence[str]) -> float:
    """Returns the seconds from the command to the first answer."""
    begun_s = time.monotonic()
    with ServeProcess(*flags) as server:
        complete(server)
        return time.monotonic() - begun_s


def time_wake(flags: Sequence[str], keeps: str) -> float:
    """Returns the seconds of an answer for which an idle server has to start its engine."""
    with ServeProcess(*flags, "--idle-timeout-s", "0.2", "--idle-keeps", keeps) as server:
        complete(server)
        wait_until(lambda: httpx.get(f"{server.url}/health").json() == {"status": "idle"})
        wait_until(lambda: bool(find_processes(server.process.pid, "template")) is (keeps == "weights"))
        begun_s = time.monotonic()
        complete(server)
        return time.monotonic() - begun_s


def complete(server: ServeProcess) -> None:
    body = json.dumps({"prompt": list(range(NUM_PROMPT)), "max_tokens": 1})
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=TIMEOUT_S)  # at once: httpx reads certificates
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != http.HTTPStatus.OK:
            raise SystemExit(reply.read().decode())
        reply.read()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() >= give_up_s:
            raise SystemExit(f"it did not come to pass within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def measure(bench: Bench, options: argparse.Namespace, name: str) -> None:
    """Measures one model: name, or name and number format, as in smollm2-135m:int8."""
    model, _, quant = name.partition(":")
    with tempfile.TemporaryDirectory() as cache:
        settings = {"model": model, "quant": quant or "none", "weights_cache": cache, "num_threads": options.num_threads}
        config = resolve_settings(settings).engine.config
        given = [(f"--{key.replace('_', '-')}", str(value)) for key, value in settings.items() if value is not None]
        flags = [part for flag in given for part in flag]
        empty_s = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as nothing:
                empty_s.append(time_server([*flags, "--weights-cache", nothing]))
        plain = [*flags, "--no-fork-server"]
        kept_s = [time_server(flags) for _ in range(1 + options.runs)][1:]
        plain_s = [time_server(plain) for _ in range(options.runs)]
        wakes_s = {keeps: min(time_wake(flags, keeps) for _ in range(2)) for keeps in ("weights", "nothing")}
        found = {
            what: [asyncio.run(measure_engines(config, forks=forks)) for _ in range(options.runs)]
            for what, forks in (("program", False), ("fork", True))
        }
    figures = {what: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for what, runs in found.items()}
    rows = [(key, *(figures[what][key] for what in ("program", "fork"))) for key in figures["fork"]]
    bench.print_rows(f"{name}: engines, s or MiB", ("what", "as programs", "as forks"), rows)
    served = [
        ("nothing on disk", statistics.median(empty_s)),
        ("packed weights and tokenizer on disk", statistics.median(kept_s)),
        ("the same, --no-fork-server", statistics.median(plain_s)),
        ("idle engine, weights in the template", wakes_s["weights"]),
        ("idle engine, nothing in memory", wakes_s["nothing"]),
    ]
    bench.print_rows(f"{name}: servers, s until the first answer", ("from", "s"), served)
    fork = figures["fork"]
    bench.check(f"{name}: s until a clone takes requests", fork["next ready"], high=0.1)
    bench.check(f"{name}: memory of a clone over that of the first engine", fork["next MiB"] / fork["first MiB"], high=0.2)
    bench.check(f"{name}: s until a killed engine's next one has answered", fork["restart"], high=0.5)
    bench.check(f"{name}: start with nothing kept over start with what is kept", served[0][1] / served[1][1], low=1.5)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="cloister-5m,smollm2-135m:int8", help="comma-separated; NAME:QUANT")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="the median of which is reported")
    options = parser.parse_args()
    bench = Bench(
        "clones",
        "Clones: engines as forks of a template beside executed ones",
        "a clone takes requests within 50 ms and adds the pages that it writes, some MiB of interpreter, whatever the model; a"
        " killed engine's next one answers within 0.2 s, of which 0.1 s is the pause before a restart; a cold start is shorter"
        " by what need not be packed again, which is much for a model of 135M weights and nothing for one of 5M",
    )
    for name in options.models.split(","):
        measure(bench, options, name)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
