"""Endurance: clients of every route that come, leave and send bad input, for as long as one likes; the engine may be killed.

    python -m benchmarks.endurance --minutes 60 --clients 4 --pause-s 0.3      # memory must stay flat
    python -m benchmarks.endurance --minutes 1 --clients 2000 --kill           # the engine gets -9 in the middle

Every request must end with an answer, a refusal that says why, or our own hanging up, and after a kill with an error that says
so; no KV block may stay in use, and afterwards an idle server must take next to no processor time.
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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.harness import MODEL, Bench, console, make_parser, make_progress
from tests.serving import ServeProcess, descendants, find_processes

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
KILL_AFTER = 0.3
"""Part of the run after which the engine is killed."""
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
SAMPLE_S = 5.0
REQUEST_TIMEOUT_S = 120.0
KV_MB = 96
"""Little, so that the prefix cache is full during the warm-up and does not grow into the measurement."""
WARM_SHARE = 0.2
"""Part of the run after which memory must not grow any more."""
TOPICS = "what does the command vacuum analyze module json sqlite python index table select how do I use list files"
WORDS = tuple(TOPICS.split())
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}

Send = Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]


@dataclass(slots=True)
class Tally:
    """What a run saw.

    Attributes:
        ends: (kind of request, how it ended) -> how many.
        memory: (seconds since the start, bytes that the server's processes hold).
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)


def question(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(3, 120)))


def messages(draw: random.Random) -> list[dict[str, str]]:
    turns = [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": question(draw)} for turn in range(draw.choice((1, 1, 3)))
    ]
    return [{"role": "system", "content": "Be brief."}, *turns] if draw.random() < 0.5 else turns


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], check: Callable[[Any], bool]) -> str:
    """Sends one request; returns answered, wrong (an answer that `check` does not take), refused or failed."""
    reply = await client.post(path, json={"model": MODEL, **body})
    if reply.status_code == 200:
        return "answered" if check(reply.json()) else "wrong"
    said = json.dumps(reply.json())
    return ("refused" if reply.status_code < 500 else "failed") if "message" in said else "lost"


async def chat(client: httpx.AsyncClient, draw: random.Random) -> str:
    body = {
        "messages": messages(draw),
        "max_tokens": draw.randrange(1, 80),
        "temperature": draw.random(),
        "n": draw.choice((1, 1, 2)),
    }
    if draw.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3}
    return await post(client, "/v1/chat/completions", body, lambda reply: len(reply["choices"]) == body["n"])


async def stream(client: httpx.AsyncClient, draw: random.Random, leaves_after: int | None = None) -> str:
    body = {"model": MODEL, "messages": messages(draw), "max_tokens": 100, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
            return "lost" if "message" not in reply.text else "refused" if reply.status_code < 500 else "failed"
        num_pieces = 0
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                return "answered"
            if line.startswith('data: {"error"'):
                return "failed"
            num_pieces += line.startswith("data:")
            if num_pieces == leaves_after:
                return "left"
    return "lost"


async def leave(client: httpx.AsyncClient, draw: random.Random) -> str:
    return await stream(client, draw, leaves_after=draw.randrange(1, 30))


async def complete(client: httpx.AsyncClient, draw: random.Random) -> str:
    body = {"prompt": question(draw), "max_tokens": draw.randrange(0, 20), "echo": True, "logprobs": 2}
    return await post(client, "/v1/completions", body, lambda reply: reply["choices"][0]["logprobs"] is not None)


async def call_tool(client: httpx.AsyncClient, draw: random.Random) -> str:
    body = {"messages": messages(draw), "tools": [WEATHER], "tool_choice": "required", "max_tokens": 150}

    def holds(reply: Any) -> bool:
        choice = reply["choices"][0]
        if choice["finish_reason"] == "length":
            return True
        return set(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])) == {"city", "unit"}

    return await post(client, "/v1/chat/completions", body, holds)


async def structure(client: httpx.AsyncClient, draw: random.Random) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    body = {"messages": messages(draw), "response_format": form, "max_tokens": 150}

    def holds(reply: Any) -> bool:
        choice = reply["choices"][0]
        return choice["finish_reason"] == "length" or set(json.loads(choice["message"]["content"])) == {"name", "tags"}

    return await post(client, "/v1/chat/completions", body, holds)


async def embed(client: httpx.AsyncClient, draw: random.Random) -> str:
    texts = [question(draw) for _ in range(draw.randrange(1, 6))]
    return await post(client, "/v1/embeddings", {"input": texts}, lambda reply: len(reply["data"]) == len(texts))


async def respond(client: httpx.AsyncClient, draw: random.Random) -> str:
    return await post(
        client, "/v1/responses", {"input": question(draw), "max_output_tokens": 30}, lambda reply: bool(reply["output"])
    )


async def message(client: httpx.AsyncClient, draw: random.Random) -> str:
    body = {"messages": [{"role": "user", "content": question(draw)}], "max_tokens": 30}
    return await post(client, "/v1/messages", body, lambda reply: reply["type"] == "message")


async def misuse(client: httpx.AsyncClient, draw: random.Random) -> str:
    """Sends what must be refused with a 4xx; anything else is `wrong`."""
    path, content = draw.choice(
        (
            ("/v1/chat/completions", b"{not json"),
            ("/v1/chat/completions", b'{"messages": "hello"}'),
            ("/v1/chat/completions", b'{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}'),
            ("/v1/completions", json.dumps({"prompt": [10**9]}).encode()),
            ("/v1/completions", json.dumps({"prompt": "x " * 5000}).encode()),
            ("/v1/embeddings", b'{"input": []}'),
            ("/v1/no/such/route", b"{}"),
        )
    )
    reply = await client.post(path, content=content, headers={"content-type": "application/json"})
    if reply.status_code >= 500:
        return "failed"
    return "refused" if reply.status_code >= 400 and "message" in reply.text else "wrong"


KINDS: Mapping[str, tuple[Send, float]] = {
    "chat": (chat, 4), "stream": (stream, 4), "leave": (leave, 2), "completion": (complete, 1), "tool": (call_tool, 1),
    "structure": (structure, 1), "embedding": (embed, 2), "response": (respond, 1), "message": (message, 1),
    "misuse": (misuse, 2),
}  # fmt: skip


async def load(url: str, pid: int, options: argparse.Namespace) -> Tally:
    """Keeps `options.clients` clients busy for `options.minutes`; kills the engine on the way if that is wanted."""
    tally, start_s = Tally(), time.monotonic()
    end_s = start_s + options.minutes * 60
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        with make_progress() as progress:
            task = progress.add_task("seconds", total=round(options.minutes * 60))

            async def watch() -> None:
                while (now_s := time.monotonic()) < end_s:
                    tally.memory.append((now_s - start_s, held_bytes(pid)))
                    progress.update(task, completed=now_s - start_s)
                    await asyncio.sleep(SAMPLE_S)

            clients = [
                work(client, random.Random(options.seed * 1000 + number), end_s, options, tally)
                for number in range(options.clients)
            ]
            await asyncio.gather(watch(), *([kill_engine(pid, options)] if options.kill else []), *clients)
    return tally


async def kill_engine(pid: int, options: argparse.Namespace) -> None:
    await asyncio.sleep(KILL_AFTER * options.minutes * 60)
    os.kill(find_engine(pid), signal.SIGKILL)
    console.print("killed the engine", style="yellow")


async def work(client: httpx.AsyncClient, draw: random.Random, end_s: float, options: argparse.Namespace, tally: Tally) -> None:
    """One client: asks, thinks, asks again."""
    names, weights = list(KINDS), [weight for _, weight in KINDS.values()]
    while time.monotonic() < end_s:
        name = draw.choices(names, weights)[0]
        try:
            end = await asyncio.wait_for(KINDS[name][0](client, draw), REQUEST_TIMEOUT_S)
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
            end = "lost"
            console.print(f"{name}: {type(error).__name__}", style="red")
        tally.ends[name, end] += 1
        await asyncio.sleep(draw.expovariate(1 / options.pause_s))


def held_bytes(pid: int) -> int:
    """Memory of the server and its engine that belongs to no file: what other programs map does not move it."""
    return sum(_anonymous_bytes(process) for process in (pid, *descendants(pid)))


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_s(pid: int) -> float:
    """Processor time of the server and its engine so far."""
    ticks = 0
    for process in (pid, *descendants(pid)):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_idle(pid: int, for_s: float) -> float:
    """Share of one processor that the server takes while nobody asks anything."""
    before_s = cpu_s(pid)
    time.sleep(for_s)
    return (cpu_s(pid) - before_s) / for_s


def growth_per_hour(memory: list[tuple[float, int]]) -> float:
    """Slope of a straight line through the samples after the warm-up, in bytes per hour."""
    start_s = memory[-1][0] * WARM_SHARE
    times, sizes = zip(*[(t, size) for t, size in memory if t >= start_s], strict=True)
    return float(np.polyfit(np.array(times) / 3600, sizes, 1)[0])


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
    """Returns the engine's process under `pid`."""
    engines = find_processes(pid, "engine")
    if not engines:
        raise SystemExit("the server has no engine process")
    return engines[0]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load")
    parser.add_argument("--clients", type=int, default=8, help="at once")
    parser.add_argument("--pause-s", type=float, default=0.2, help="mean pause of a client between two requests")
    parser.add_argument("--kill", action="store_true", help="kill the engine by -9 in the middle")
    parser.add_argument("--idle-s", type=float, default=60.0, help="how long to look at the idle server")
    options = parser.parse_args()
    bench = Bench(
        "endurance_kill" if options.kill else "endurance",
        "Endurance: every route, clients that leave, bad input" + (", the engine killed by -9" if options.kill else ""),
        "no request is lost or answered wrongly, no 5xx but by a kill, memory is flat after the first fifth, an idle server "
        "takes below 1%, and no KV block stays in use",
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    with serve("--kv-memory-mb", str(KV_MB)) as running:
        url, process = running.url, running.process
        wait_for_health(url, START_TIMEOUT_S)
        tally = asyncio.run(load(url, process.pid, options))
        wait_for_health(url, START_TIMEOUT_S)
        gauges = wait_for_rest(url)
        idle = measure_idle(process.pid, options.idle_s)
        process.send_signal(signal.SIGTERM)
        status = process.wait(STOP_TIMEOUT_S)
    report(bench, tally, gauges, idle, status, was_killed=options.kill)
    return bench.finish(options)


def report(bench: Bench, tally: Tally, gauges: dict[str, float], idle: float, status: int, *, was_killed: bool) -> None:
    ways = ("answered", "left", "refused", "wrong", "failed", "lost")
    rows = [(name, *(tally.ends[name, way] for way in ways)) for name in KINDS]
    totals = Counter[str]()
    for (_, way), count in tally.ends.items():
        totals[way] += count
    bench.print_rows("Requests", ("kind", *ways), [*rows, ("all", *(totals[way] for way in ways))])
    sizes = np.array([size for _, size in tally.memory]) / 2**20
    slope = growth_per_hour(tally.memory) / 2**20
    start = float(sizes[int(len(sizes) * WARM_SHARE)])
    bench.print_rows(
        "Memory, MiB",
        ("first", "after warm-up", "last", "greatest", "growth an hour"),
        [(float(sizes[0]), start, float(sizes[-1]), float(sizes.max()), slope)],
    )
    refused = sum(count for (name, way), count in tally.ends.items() if way == "refused" and name != "misuse")
    bench.check("requests lost without a reply", totals["lost"], high=0)
    if was_killed:
        bench.check("requests that failed by the kill (it did hit some)", totals["failed"], low=1)
    else:
        bench.check("requests that failed (5xx)", totals["failed"], high=0)
        bench.check("growth of memory in an hour, as a share", slope / start, high=0.02)
    bench.check("answers that were not what was asked for", totals["wrong"], high=0)
    if not was_killed:
        bench.check("good requests that were refused", refused, high=0)
    bench.check("processor time of the idle server, as a share of one", idle, high=0.01)
    bench.check("KV blocks in use at rest, as a share", gauges["kv_cache_usage_perc"], high=0)
    bench.check_true("SIGTERM ends the server with status 0", status == 0)


if __name__ == "__main__":
    sys.exit(main())
