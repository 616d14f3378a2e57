"""What a decode step costs besides its arithmetic: CPU time of plan, runner, output and commit, of `LLM`, and of the server.

The model computes nothing (`benchmarks.idle`), so that everything measured is our own cost. CPU time, not time on the
clock: other programs of the machine then disturb little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, make_parser
from benchmarks.idle import IdleDeviceProgram, IdleDrawingProgram, IdleEngine, IdleGreedyProgram, IdleProgram, make_idle_engine
from cloister.engine import EngineClient, EngineCore, ProcessTransport, ThreadTransport
from cloister.policy import Gate, Policy
from cloister.server.app import create_app
from cloister.server.serve import Server, ServerApp, address_of, bind
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.events import Stepped, Submit
from cloister.types.request import Request, SamplingParams, SequenceOutput

VOCAB_SIZE = 151_936
NUM_SEQUENCES = (1, 16, 64)
PROMPT_TOKENS = 128
NUM_WARM_STEPS = 10
FIRST_KIND = "program finds tokens"
PARTS = ("plan", "run", "check", "commit", "collect")
STEP_MS = 10.0
"""A step of the engine behind the server: about a decode step of a 0.5B model on two cores."""
DEVICE_MS = 1.0
"""A step of a device, about a decode step of a small model on a data-centre GPU."""
NUM_STREAMS = 16
NUM_CORES = 2
ENTRY = "benchmarks.step_overhead:build_idle"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="decode steps to time")
    parser.add_argument("--streams-from", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.streams_from:
        asyncio.run(read_streams(options.streams_from, options.steps))
        return 0
    bench = Bench(
        "step_overhead",
        "Our own cost of a decode step",
        "0.05 ms for one sequence and 0.13 ms for 16 where the program finds the tokens; with logits of 152k tokens read in "
        "numpy 40 us a row more; the front below 4% of two cores at 16 streams of 10 ms steps",
    )
    totals: dict[str, dict[float, float]] = {}
    for kind, program, temperature in (
        (FIRST_KIND, IdleGreedyProgram, 0.0),
        ("program draws tokens", IdleDrawingProgram, 1.0),
        ("greedy from logits", IdleProgram, 0.0),
        ("drawn from logits", IdleProgram, 1.0),
    ):
        rows = [measure_step(program, num, temperature, options.steps) for num in NUM_SEQUENCES]
        bench.print_rows(f"CPU time of a step, us: {kind}", ("sequences", *PARTS, "rest", "whole step"), rows)
        totals[kind] = {row[0]: row[-1] for row in rows}
    bench.print_rows("CPU time of a step, us: through a thread and its event loop", ("sequences", "whole step"), [
        (num, asyncio.run(measure_thread(num, options.steps))) for num in NUM_SEQUENCES
    ])  # fmt: skip
    rows = [(num, *(measure_device(num, options.steps, overlaps=each) for each in (False, True))) for num in NUM_SEQUENCES]
    title = f"Time on the clock of a step that takes another device {DEVICE_MS:g} ms, ms"
    bench.print_rows(title, ("sequences", "steps in turn", "steps overlap"), rows)
    front_us, engine_us, step_us = asyncio.run(measure_server(options.steps))
    share = front_us / (NUM_CORES * step_us)
    headers = (
        "streams",
        "front, us a token",
        "front, us a step",
        "engine, us a step",
        "step, us",
        "front's share of two cores",
    )
    row = (NUM_STREAMS, front_us / NUM_STREAMS, front_us, engine_us, step_us, share)
    bench.print_rows("CPU time behind HTTP, streaming", headers, [row])
    bench.check("us a step, 1 sequence", totals[FIRST_KIND][1], high=150)
    bench.check("us a step, 16 sequences", totals[FIRST_KIND][16], high=400)
    bench.check("us a step, 64 sequences", totals[FIRST_KIND][64], high=1600)
    bench.check("front's share of two cores", share, high=0.04)
    return bench.finish(options)


def measure_step(make: type[IdleProgram], num_seqs: int, temperature: float, num_steps: int) -> tuple[float, ...]:
    """Returns (sequences, medians of the parts, of the rest, of the whole step), CPU time in microseconds."""
    engine = make_idle_engine(make(VOCAB_SIZE, num_seqs), vocab_size=VOCAB_SIZE, num_seqs=num_seqs)
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, "step")}
    for part, names in (
        (engine.scheduler, ("plan", "commit")),
        (engine.runner, ("run",)),
        (engine.output, ("check", "collect")),
    ):
        for name in names:
            setattr(part, name, partial(_timed, getattr(part, name), times[name]))
    _fill(engine, num_seqs, temperature, num_steps)
    for _ in range(num_steps):
        _timed(engine.core.step, times["step"])
    medians = {name: float(np.median(values[-num_steps:])) for name, values in times.items()}
    parts = [medians[name] for name in PARTS]
    return num_seqs, *parts, medians["step"] - sum(parts), medians["step"]


def measure_device(num_seqs: int, num_steps: int, *, overlaps: bool) -> float:
    """Returns the median milliseconds from one step's outputs to the next one's."""
    program = IdleDeviceProgram(VOCAB_SIZE, num_seqs, DEVICE_MS / 1e3)
    engine = make_idle_engine(program, vocab_size=VOCAB_SIZE, num_seqs=num_seqs, overlaps=overlaps)
    _fill(engine, num_seqs, 0.0, num_steps)
    times_s = [time.perf_counter()]
    for _ in range(num_steps):
        engine.core.step()
        times_s.append(time.perf_counter())
    return float(np.median(np.diff(times_s))) * 1e3


def _fill(engine: IdleEngine, num_seqs: int, temperature: float, num_steps: int) -> None:
    """Submits sequences and steps until they all decode."""
    for number in range(num_seqs):
        engine.core.input_queue.put(Submit(_request(number, num_steps + 2 * NUM_WARM_STEPS, temperature)))
    for _ in range(NUM_WARM_STEPS):
        engine.core.step()


def _request(number: int, num_tokens: int, temperature: float = 0.0) -> Request:
    sampling = SamplingParams(temperature=temperature, seed=number, max_tokens=num_tokens, ignore_eos=True)
    return Request(request_id=f"r{number}", token_ids=_prompt(number), sampling=sampling)


def _prompt(number: int) -> list[int]:
    return list(range(10 + number, 10 + number + PROMPT_TOKENS))


def _timed(call: Callable[..., Any], times_us: list[float], *args: Any) -> Any:
    start_ns = time.thread_time_ns()
    value = call(*args)
    times_us.append((time.thread_time_ns() - start_ns) / 1e3)
    return value


async def measure_thread(num_seqs: int, num_steps: int) -> float:
    """Returns the CPU time of a step, in microseconds: an engine in a thread whose outputs an event loop takes, as in `LLM`."""
    core = make_idle_engine(IdleGreedyProgram(VOCAB_SIZE, num_seqs), vocab_size=VOCAB_SIZE, num_seqs=num_seqs).core
    engine = EngineClient(ThreadTransport(core), EngineConfig(max_num_seqs=num_seqs))
    await engine.start()
    outputs: list[SequenceOutput] = []
    start_s = time.process_time()
    await asyncio.gather(*(engine.follow(_request(number, num_steps), outputs.append) for number in range(num_seqs)))
    spent_s = time.process_time() - start_s
    await engine.drain(5.0)
    return spent_s / num_steps * 1e6


def build_idle(config: EngineConfig) -> EngineCore:
    """The engine behind the server: its program sleeps `target_step_ms` each step."""
    program = IdleGreedyProgram(VOCAB_SIZE, config.max_num_seqs, (config.target_step_ms or 0.0) / 1e3)
    return make_idle_engine(program, vocab_size=VOCAB_SIZE, num_seqs=config.max_num_seqs).core


async def measure_server(num_steps: int) -> tuple[float, float, float]:
    """Returns microseconds a step, in which every stream gets a token: CPU time of front and of engine, time on the clock."""
    engine = EngineClient(ProcessTransport(ENTRY), EngineConfig(max_num_seqs=NUM_STREAMS, target_step_ms=STEP_MS))
    await engine.start()
    path, config = Path(engine.model.path), ServerConfig(port=0)
    gate = Gate(Policy("open"), None, loopback=True)
    site = ServerApp(create_app(engine, Tokenizer(path), ChatTemplate.load(path), gate, config), engine)
    with bind(config.host, 0) as listener:
        server = Server(site, config)
        serving = asyncio.create_task(server.serve([listener]))
        await _run_client(address_of(listener), NUM_WARM_STEPS)
        assert engine.pid is not None
        steps_s: list[float] = []
        engine.subscribe(lambda event: steps_s.append(event.now_s) if isinstance(event, Stepped) else None)
        front_s, engine_s = time.thread_time(), _cpu_s(engine.pid)
        await _run_client(address_of(listener), num_steps)
        spent_s = time.thread_time() - front_s, _cpu_s(engine.pid) - engine_s
        server.should_exit = True
        await serving
    front_us, engine_us = (spent / num_steps * 1e6 for spent in spent_s)
    return front_us, engine_us, float(np.median(np.diff(steps_s))) * 1e6


async def _run_client(url: str, num_tokens: int) -> None:
    arguments = ("-m", "benchmarks.step_overhead", "--streams-from", url, "--steps", str(num_tokens))
    client = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    if await client.wait():
        raise RuntimeError("the client failed")


async def read_streams(url: str, num_tokens: int) -> None:
    """Reads 16 streams to their end: the client, in a process of its own."""
    found = re.fullmatch(r"http://(.+):(\d+)", url)
    assert found is not None
    async with asyncio.timeout(120.0):
        await asyncio.gather(*(_read_stream(found[1], int(found[2]), number, num_tokens) for number in range(NUM_STREAMS)))


async def _read_stream(host: str, port: int, number: int, num_tokens: int) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    fields = {"model": "idle", "prompt": _prompt(number), "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body = json.dumps(fields | {"ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    tail = b""
    while b"[DONE]" not in tail:
        read = await reader.read(65536)
        if not read:
            raise RuntimeError("the stream broke off")
        tail = tail[-16:] + read
    writer.close()


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far; Linux's clock of another process (clock_getcpuclockid)."""
    return time.clock_gettime(~pid << 3 | 2)


if __name__ == "__main__":
    sys.exit(main())
