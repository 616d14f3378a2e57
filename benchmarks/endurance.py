"""Endurance: 2,000 concurrent HTTP requests with random disconnects; the engine process is killed by -9 in the middle.

Every request must end with an answer or an error of its own, no KV block may stay in use, and the server must serve on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.progress import TaskID

from benchmarks.harness import MODEL, Bench, console, make_parser, make_progress
from cloister.bench.plots import BLUE, GREEN, ORANGE, RED, draw
from tests.serving import ServeProcess, descendants

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 400.0
RECOVER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
DISCONNECTING = 0.3
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
KILL_AFTER = 0.3
"""Part of the requests that has ended when the engine is killed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended: `finished`, `left` (we hung up), `refused` or `failed` with a reply, or `lost` without one."""

    kind: str
    end_s: float


class Wave:
    """Many requests at once.

    Attributes:
        outcomes: of the requests that ended, in that order.
    """

    def __init__(self, url: str, num_requests: int, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._num_requests = num_requests
        self._start_s = time.monotonic()
        self.outcomes: list[Outcome] = []

    async def send(self, kill: int | None = None) -> None:
        """Sends every request; with `kill`, sends -9 to that process once `KILL_AFTER` of them ended."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        with make_progress() as progress:
            task = progress.add_task("requests", total=self._num_requests)
            async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=REQUEST_TIMEOUT_S) as client:
                requests = [self._send_one(client, progress.advance, task) for _ in range(self._num_requests)]
                await asyncio.gather(*requests, *([self._kill(kill)] if kill is not None else []))

    async def _kill(self, pid: int) -> None:
        while len(self.outcomes) < KILL_AFTER * self._num_requests:
            await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        console.print(f"killed the engine after {len(self.outcomes)} requests", style="yellow")

    async def _send_one(self, client: httpx.AsyncClient, advance: Callable[[TaskID], None], task: TaskID) -> None:
        body = {
            "model": MODEL,
            "prompt": [self._random.randrange(40, 2000) for _ in range(self._random.randrange(8, 200))],
            "max_tokens": self._random.randrange(4, 64),
            "ignore_eos": True,
            "stream": True,
        }
        leaves_after = self._random.randrange(0, 20) if self._random.random() < DISCONNECTING else None
        try:
            kind = await asyncio.wait_for(converse(client, body, leaves_after), REQUEST_TIMEOUT_S)
        except (httpx.HTTPError, TimeoutError):
            kind = "lost"
        self.outcomes.append(Outcome(kind, time.monotonic() - self._start_s))
        advance(task)


async def converse(client: httpx.AsyncClient, body: dict[str, object], leaves_after: int | None) -> str:
    """Sends one streaming request, reads to its end or hangs up after so many pieces; returns how it ended."""
    if leaves_after == 0:
        return await hang_up_early(client, body)
    num_pieces = 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
            said_why = bool(reply.json()["error"]["message"])
            return "lost" if not said_why else "refused" if reply.status_code == 429 else "failed"
        async for line in reply.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return "finished"
            if "error" in json.loads(data):
                return "failed"
            num_pieces += 1
            if num_pieces == leaves_after:
                return "left"
    return "lost"


async def hang_up_early(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    """Hangs up before anything came back."""
    try:
        await asyncio.wait_for(client.post("/v1/completions", json=body), 0.2)
    except (TimeoutError, httpx.HTTPError):
        return "left"
    return "finished"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=2000, help="concurrent requests of the first wave")
    parser.add_argument("--num-after", type=int, default=500, help="of the second wave, with no kill")
    options = parser.parse_args()
    bench = Bench(
        "endurance",
        "Endurance: disconnects, and the engine killed by -9",
        "every request ends with an answer, an error that says so, or our own hanging up; none is lost; after the restart the "
        "server serves on and no KV block stays in use",
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    with serve() as running:
        url, process = running.url, running.process
        wait_for_health(url, START_TIMEOUT_S)
        first = Wave(url, options.num_requests, options.seed)
        asyncio.run(first.send(kill=find_engine(process.pid)))
        recovered_s = wait_for_health(url, RECOVER_TIMEOUT_S)
        second = Wave(url, options.num_after, options.seed + 1)
        asyncio.run(second.send())
        gauges = wait_for_rest(url)
        process.send_signal(signal.SIGTERM)
        status = process.wait(STOP_TIMEOUT_S)
    report(bench, first.outcomes, second.outcomes, recovered_s, gauges)
    bench.check_true("SIGTERM ends the server with status 0", status == 0)
    plot(bench, options, first.outcomes)
    return bench.finish(options)


def serve(*settings: str) -> ServeProcess:
    """Starts `cloister serve` with a log that stays; further flags are `settings`."""
    log = Path(tempfile.mkstemp(".log", "cloister-endurance-")[1])
    console.print(f"the server's log: {log}", style="dim", highlight=False)
    return ServeProcess("--max-waiting", "4000", "--max-model-len", "1024", *settings, log=log, timeout_s=START_TIMEOUT_S)


def wait_for_health(url: str, timeout_s: float) -> float:
    """Returns how long it took until a request was answered, in seconds."""
    start_s = time.monotonic()
    body = {"model": MODEL, "prompt": [50, 51, 52], "max_tokens": 2}
    while time.monotonic() - start_s < timeout_s:
        try:
            if httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200:
                return time.monotonic() - start_s
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server gave no answer within {timeout_s:g} s")


def wait_for_rest(url: str) -> dict[str, float]:
    """Returns the gauges of `/metrics` once nothing runs, or after a while whatever they say."""
    deadline_s = time.monotonic() + 30
    while True:
        gauges = read_gauges(httpx.get(f"{url}/metrics", timeout=10).text)
        if not any(gauges.values()) or time.monotonic() > deadline_s:
            return gauges
        time.sleep(0.2)


def read_gauges(text: str) -> dict[str, float]:
    """Returns what runs, what waits and what part of the KV blocks is used."""
    found = {}
    for line in text.splitlines():
        sample, _, value = line.rpartition(" ")
        name = next((gauge for gauge in GAUGES if sample.split("{")[0].endswith(gauge)), None)
        if name is not None and not line.startswith("#"):
            found[name] = float(value)
    if len(found) != len(GAUGES):
        raise SystemExit(f"/metrics lacks {', '.join(set(GAUGES) - found.keys())}")
    return found


def find_engine(pid: int) -> int:
    """Returns the process under `pid` that holds the most memory: the one with the model."""
    children = descendants(pid)
    if not children:
        raise SystemExit("the server has no engine process")
    return max(children, key=lambda child: int(Path(f"/proc/{child}/statm").read_text().split()[1]))


def report(
    bench: Bench, first: Sequence[Outcome], second: Sequence[Outcome], recovered_s: float, gauges: dict[str, float]
) -> None:
    kinds = ("finished", "left", "refused", "failed", "lost")
    counts = [Counter(outcome.kind for outcome in wave) for wave in (first, second)]
    names = ("with kill -9", "after it")
    rows = [(name, sum(c.values()), *(c[kind] for kind in kinds)) for name, c in zip(names, counts, strict=True)]
    bench.print_rows("Requests", ("wave", "all", *kinds), rows)
    bench.print_rows("At rest", ("gauge", "value"), list(gauges.items()))
    bench.figures["seconds until the next answer after the last request of the first wave"] = recovered_s
    bench.check("requests lost without a reply", sum(c["lost"] for c in counts), high=0)
    bench.check("requests that failed by the kill (it did hit some)", counts[0]["failed"], low=1)
    bench.check("requests that failed or were refused after the restart", counts[1]["failed"] + counts[1]["refused"], high=0)
    bench.check("KV blocks in use at rest, as a share", gauges["kv_cache_usage_perc"], high=0)
    bench.check("requests running or waiting at rest", gauges["num_requests_running"] + gauges["num_requests_waiting"], high=0)


def plot(bench: Bench, options: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    colours = {"finished": GREEN, "left": BLUE, "failed": ORANGE, "refused": RED, "lost": RED}
    with draw(bench.picture(options), bench.title, size=(7.2, 4.2)) as (axes,):
        for kind, colour in colours.items():
            times = sorted(outcome.end_s for outcome in outcomes if outcome.kind == kind)
            if times:
                label = f"{kind}: {len(times)}"
                axes.step([0, *times], range(len(times) + 1), where="post", color=colour, label=label)
        axes.set_xlabel("time, s")
        axes.set_ylabel("requests ended so far")
        axes.legend(loc="upper left")


if __name__ == "__main__":
    sys.exit(main())
