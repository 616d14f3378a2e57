"""What a front adds to the engines behind it: to the time to the first token, by parts; and how two replicas add up.

    python -m benchmarks.cluster_overhead            # a minute; --part latency, --part throughput: half of it each

`cloister serve` runs as it is, with stamps of the one monotonic clock of the machine in the client, the front and the engines.
Added is what the client saw of the time to the first token, less the time from the engine's receipt of the request to its first
token. Engines that compute nothing (a step sleeps, as if another device computed it) leave the two cores to front and client;
with those of the embedded model everything shares them.

For the throughput of two one-thread replicas against twice that of one, every replica has the same number of requests at once,
and nothing is streamed. A front and a client that run on the cores of two engines take time from them: so there is a second
ratio, of the tokens of a second of the engines' processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, make_parser
from benchmarks.idle import IdleDrawingProgram, make_idle_engine
from benchmarks.peers.meter import NO_SESSION, Usage
from cloister.engine import EngineCore
from cloister.engine.machine import cpu_seconds
from cloister.types.config import EngineConfig
from cloister.types.events import Arrived, Ended, Outputs, Progressed, Submit
from tests.serving import ServeProcess, find_processes

MODULE: Final = "benchmarks.cluster_overhead"
STAMPS: Final = "CLOISTER_STAMPS"
"""Environment variable with the folder of stamps: a file of JSON lines from each process."""
STEP_MS: Final = "CLOISTER_IDLE_STEP_MS"
"""How long a step of an engine that computes nothing sleeps; unset, engines compute the model."""
KEY_HEADER: Final = b"x-benchmark-key"
VOCAB_SIZE: Final = 4096
WORDS: Final = (
    "index",
    "table",
    "page",
    "row",
    "lock",
    "log",
    "join",
    "key",
    "plan",
    "cache",
    "column",
    "view",
    "query",
    "disk",
)
PARTS: Final = {
    "HTTP to the front": ("asked", "accepted"),
    "parse, template, tokens": ("accepted", "read"),
    "router": ("read", "sent"),
    "message to the engine": ("sent", "received"),
    "message back": ("first", "delivered"),
    "event written": ("delivered", "written"),
    "HTTP to the client": ("written", "seen"),
}
"""From one stamp to another; between `received` and `first` the engine has it."""
P50_MS, P99_MS, RATIO = 3.0, 10.0, 0.95
WARM_S: Final = 1.0


# In the engines


def build_stamped(config: EngineConfig) -> EngineCore:
    """The engine of `cloister serve`, or one that computes nothing, which stamps receipts and first tokens."""
    from cloister.engine.channel import InputQueue
    from cloister.launch import build_engine

    step_ms = os.environ.get(STEP_MS)
    if step_ms is None:
        core = build_engine(config)
    else:
        program = IdleDrawingProgram(VOCAB_SIZE, config.max_num_seqs, float(step_ms) / 1e3)
        core = make_idle_engine(program, vocab_size=VOCAB_SIZE, num_seqs=config.max_num_seqs).core
    stamps: dict[str, dict[str, Any]] = {}
    put, run = InputQueue.put, core.run

    def put_stamped(queue: InputQueue, message: Any) -> None:
        if isinstance(message, Submit):
            request_id = message.request.request_id
            stamps[request_id] = {"request_id": request_id, "received": time.monotonic()}
        put(queue, message)

    def run_stamped(emit: Callable[[Outputs], None]) -> None:
        with (Path(os.environ[STAMPS]) / f"{os.getpid()}.jsonl").open("w", buffering=1) as file:

            def emit_stamped(message: Outputs) -> None:
                emit(message)
                for event in message.events:
                    if isinstance(event, Arrived | Progressed | Ended) and event.request_id in stamps:
                        stamp = stamps[event.request_id]
                        if isinstance(event, Arrived):
                            stamp["arrived"] = event.now_s
                        elif isinstance(event, Progressed) and event.first:
                            stamp["first"] = event.now_s
                        elif isinstance(event, Ended):
                            file.write(json.dumps(stamps.pop(event.request_id)) + "\n")

            run(emit_stamped)

    InputQueue.put = put_stamped  # type: ignore[method-assign, assignment]
    core.run = run_stamped  # type: ignore[method-assign]
    return core


# In the front


_stamp: ContextVar[dict[str, Any] | None] = ContextVar("stamps of this request", default=None)


def serve_stamped(flags: Sequence[str]) -> int:
    """`cloister serve`, which stamps requests that have a key."""
    from cloister.cli import main as run_cli
    from cloister.cluster import ReplicaSet
    from cloister.engine import EngineClient
    from cloister.engine.channel import MessageStream
    from cloister.launch import processes
    from cloister.server import serve as serving

    processes.ENGINE_ENTRY = f"{MODULE}:build_stamped"  # type: ignore[misc]
    file = (Path(os.environ[STAMPS]) / f"{os.getpid()}.jsonl").open("w", buffering=1)
    server, send_message = serving.Server, MessageStream.send

    class StampedServer(server):  # type: ignore[misc, valid-type]
        def __init__(self, server_app: serving.ServerApp, *others: Any) -> None:
            app = server_app.app

            async def stamped(scope: Any, receive: Any, send: Any) -> None:
                key = dict(scope["headers"]).get(KEY_HEADER) if scope["type"] == "http" else None
                if key is None:
                    await app(scope, receive, send)
                    return
                stamp: dict[str, Any] = {"key": key.decode(), "accepted": time.monotonic()}
                _stamp.set(stamp)

                async def send_stamped(message: Any) -> None:
                    await send(message)
                    if message.get("body"):
                        stamp.setdefault("written", time.monotonic())

                await app(scope, receive, send_stamped)
                file.write(json.dumps(stamp) + "\n")

            super().__init__(replace(server_app, app=stamped), *others)

    def submit_stamped(submit: Callable[..., None]) -> Callable[..., None]:
        def submit_with_stamp(client: Any, request: Any, sink: Any, *others: Any, **named: Any) -> None:
            stamp = _stamp.get()
            if stamp is None or "read" in stamp:  # within a submit of the replica set
                return submit(client, request, sink, *others, **named)
            stamp |= {"read": time.monotonic(), "request_id": request.request_id}

            def take(output: Any) -> None:
                stamp.setdefault("delivered", time.monotonic())
                sink(output)

            return submit(client, request, take, *others, **named)

        return submit_with_stamp

    def send_stamped(stream: MessageStream, message: Any) -> None:
        if isinstance(message, Submit) and (stamp := _stamp.get()) is not None:
            stamp["sent"] = time.monotonic()
        send_message(stream, message)

    serving.Server = StampedServer  # type: ignore[misc, assignment]
    MessageStream.send = send_stamped  # type: ignore[method-assign, assignment]
    for client in (EngineClient, ReplicaSet):
        client.submit = submit_stamped(client.submit)  # type: ignore[method-assign]
    run_cli(["serve", *flags])
    return 0


# The client


@dataclass(frozen=True, slots=True)
class Load:
    """What a client does: each of `streams` connections asks again as soon as it has its answer, for `seconds`.

    Attributes:
        prefix: of the keys of its requests.
        num_tokens: smallest and largest length of an answer.
    """

    url: str
    prefix: str
    streams: int
    seconds: float
    num_tokens: tuple[int, int]
    is_streamed: bool = True


class _Connection(asyncio.Protocol):
    """A connection that asks again and again. Cheaper than a reader and a writer."""

    def __init__(self, load: Load, number: int, end_s: float, stamps: list[dict[str, Any]]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load, self._number, self._end_s, self._stamps = load, number, end_s, stamps
        self._draw = random.Random(f"{load.prefix} {number}")
        self._num_asked = 0
        self._stamp: dict[str, Any] = {}
        self._tail = b""
        self._num_missing: int | None = None  # bytes of a reply that says how long it is

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        load, draw = self._load, self._draw
        if time.monotonic() >= self._end_s:
            self.done.set_result(None)
            self._transport.close()
            return
        num_tokens = draw.randint(*load.num_tokens)
        if not self._num_asked:  # the first answers end at different times, and all later ones
            num_tokens = max(1, round(num_tokens * (self._number + 1) / load.streams))
        self._num_asked += 1
        text = " ".join(draw.choices(WORDS, k=60))
        fields = {"messages": [{"role": "user", "content": text}], "max_tokens": num_tokens, "stream": load.is_streamed}
        body = json.dumps(fields | {"temperature": 0, "ignore_eos": True}).encode()
        key = f"{load.prefix}-{self._number}-{self._num_asked}"
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {load.url.removeprefix('http://')}\r\nX-Benchmark-Key: {key}\r\n"
        self._tail, self._num_missing = b"", None
        self._stamp = {"key": key, "num_tokens": num_tokens, "asked": time.monotonic()}
        self._transport.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        self._tail += data
        if "seen" not in self._stamp:
            head, _, body = self._tail.partition(b"\r\n\r\n")
            if not body:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"the server replied {self._tail[:1000].decode()}")
            self._stamp["seen"] = time.monotonic()
            length = re.search(rb"content-length: (\d+)", head)
            self._num_missing = int(length[1]) if length else None
            data = body
        if self._num_missing is not None:
            self._num_missing -= len(data)
        self._tail = self._tail[-8:]
        if not self._num_missing and (self._num_missing == 0 or self._tail.endswith(b"0\r\n\r\n")):
            self._stamp["ended"] = time.monotonic()
            self._stamps.append(self._stamp)
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(SystemExit("the connection broke off"))


async def run_load(load: Load) -> list[dict[str, Any]]:
    """Returns the stamps of a load's answers."""
    host, port = load.url.removeprefix("http://").split(":")
    stamps: list[dict[str, Any]] = []
    end_s, loop = time.monotonic() + load.seconds, asyncio.get_running_loop()
    connections = [_Connection(load, number, end_s, stamps) for number in range(load.streams)]
    async with asyncio.timeout(load.seconds + 60.0):
        for connection in connections:  # not all at once: that would measure a queue of 64 in front of everything
            await asyncio.sleep(WARM_S / load.streams)
            await loop.create_connection(lambda own=connection: own, host, int(port))  # type: ignore[misc]
        await asyncio.gather(*(connection.done for connection in connections))
    return stamps


def run_client(load: Load) -> dict[str, Any]:
    """Runs a load in a process of its own; returns its stamps and processor time."""
    words = json.dumps([getattr(load, name) for name in Load.__slots__])
    done = subprocess.run([sys.executable, "-m", MODULE, "client", words], stdout=subprocess.PIPE, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# Runs


@dataclass(frozen=True, slots=True)
class Run:
    """A load on a server.

    Attributes:
        stamps: of each request, from all processes.
        num_tokens: of answers, and the seconds in which they came.
        engines_s, front_s, client_s, others_s: processor time of all engines, of front and client, and of other programs.
    """

    stamps: list[dict[str, Any]]
    num_tokens: int
    elapsed_s: float
    engines_s: float
    front_s: float
    client_s: float
    others_s: float

    @property
    def added_ms(self) -> list[float]:
        """For each request."""
        return [1e3 * (s["seen"] - s["asked"] - (s["first"] - s["received"])) for s in self.stamps]

    def part_ms(self, ends: tuple[str, str]) -> list[float]:
        """Time from one stamp to another."""
        return [1e3 * (stamp[ends[1]] - stamp[ends[0]]) for stamp in self.stamps]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.elapsed_s


def measure(model: str, num_replicas: int, step_ms: float | None, load: Load) -> Run:
    """Runs a load on a server of its own, after a second of the same."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STAMPS] = folder
        os.environ.pop(STEP_MS, None)
        if step_ms is not None:
            os.environ[STEP_MS] = str(step_ms)
        flags = ["--model", model, "--replicas", str(num_replicas), "--num-threads", "1", "--no-log-requests"]
        with ServeProcess(*flags, "--max-num-seqs", str(load.streams), module=(MODULE, "serve")) as server:
            engines = find_processes(server.process.pid, "engine")
            assert len(engines) == num_replicas
            run_client(replace(load, url=server.url, prefix="warm", seconds=WARM_S))

            def read_s() -> tuple[float, float]:
                return sum(cpu_seconds(pid) or 0.0 for pid in engines), cpu_seconds(server.process.pid) or 0.0

            before, used = read_s(), Usage.read(NO_SESSION)
            found = run_client(replace(load, url=server.url))
            after, used_after = read_s(), Usage.read(NO_SESSION)
            server.stop()
        lines = [json.loads(line) for path in Path(folder).glob("*.jsonl") for line in path.read_text().splitlines()]
    by_key = {stamp["key"]: stamp for stamp in found["stamps"]}
    by_request: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line.get("key") in by_key:
            by_request[line["request_id"]] = by_key[line["key"]] | line
    for line in lines:
        if "key" not in line and line["request_id"] in by_request:
            by_request[line["request_id"]] |= line
    stamps = list(by_request.values())
    assert len(stamps) == len(by_key)
    elapsed_s = max(stamp["ended"] for stamp in stamps) - min(stamp["asked"] for stamp in stamps)
    engines_s, front_s = (late - early for early, late in zip(before, after, strict=True))
    whole_s = used_after.machine_s - used.machine_s
    others_s = max(0.0, whole_s - engines_s - front_s - found["process_s"])
    num_tokens = sum(stamp["num_tokens"] for stamp in stamps)
    return Run(stamps, num_tokens, elapsed_s, engines_s, front_s, found["cpu_s"], others_s)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_latency(bench: Bench, options: argparse.Namespace, what: str, step_ms: float | None) -> None:
    """Measures the added time to the first token with one engine and with two replicas."""
    columns: dict[str, Run] = {}
    for num_replicas in (1, 2):
        load = Load("", "run", options.streams, options.seconds, (32, 96))
        columns[f"{num_replicas}"] = measure(options.model, num_replicas, step_ms, load)
    rows: list[tuple[object, ...]] = []
    for name, ends in PARTS.items():
        spread = (f(run.part_ms(ends)) for run in columns.values() for f in (statistics.median, lambda v: percentile(v, 0.99)))
        rows.append((name, *spread))
    added = [(statistics.median(run.added_ms), percentile(run.added_ms, 0.99)) for run in columns.values()]
    rows.append(("added in all", *(value for pair in added for value in pair)))
    title = f"{what}: {options.streams} streams, ms"
    bench.print_rows(title, ("", "1 engine P50", "P99", "2 replicas P50", "P99"), rows)
    show_use(bench, what, columns)
    bench.check(f"{what}: added by the front of two replicas, P50 in ms", added[1][0], high=P50_MS)
    bench.check(f"{what}: added by the front of two replicas, P99 in ms", added[1][1], high=P99_MS)


def show_use(bench: Bench, what: str, columns: dict[str, Run]) -> None:
    """Prints rates, and who used the cores."""
    bench.print_rows(
        f"{what}: requests, tokens, and cores in use",
        ("engines", "requests/s", "tokens/s", "engines' cores", "front's", "client's", "others'", "front, µs a token"),
        [
            (
                name, len(run.stamps) / run.elapsed_s, run.rate, run.engines_s / run.elapsed_s, run.front_s / run.elapsed_s,
                run.client_s / run.elapsed_s, run.others_s / run.elapsed_s, 1e6 * run.front_s / run.num_tokens,
            )
            for name, run in columns.items()
        ],
    )  # fmt: skip


def measure_throughput(bench: Bench, options: argparse.Namespace, model: str) -> None:
    """Compares two replicas with twice one, in turns, each with the same requests at once for a replica."""
    ratios, own_ratios = [], []
    columns: dict[str, Run] = {}
    for _ in range(options.rounds):
        runs = [
            measure(model, num, None, Load("", "run", num * options.streams // 2, options.seconds, (64, 64), is_streamed=False))
            for num in (1, 2)
        ]
        columns |= {"1": runs[0], "2": runs[1]}
        ratios.append(runs[1].rate / (2 * runs[0].rate))
        own_ratios.append(runs[1].num_tokens / runs[1].engines_s / (runs[0].num_tokens / runs[0].engines_s))
    show_use(bench, f"{model}, not streamed", columns)
    bench.figures[f"{model}: ratios by the clock, by processor time"] = [ratios, own_ratios]
    bench.check(f"{model}: two replicas over twice one, by the clock", statistics.median(ratios), low=RATIO)
    own = statistics.median(own_ratios)
    bench.check(f"{model}: two replicas over twice one, by the engines' processor time", own, low=RATIO)


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return serve_stamped(sys.argv[2:])
    if sys.argv[1:2] == ["client"]:
        begun_s = time.process_time()
        stamps = asyncio.run(run_load(Load(*json.loads(sys.argv[2]))))
        spent_s = time.process_time()
        print(json.dumps({"stamps": stamps, "cpu_s": spent_s - begun_s, "process_s": spent_s}))
        return 0
    parser = make_parser(__doc__)
    parser.add_argument("--part", choices=("latency", "throughput", "all"), default="all", help="what is measured")
    parser.add_argument("--model", default="cloister-5m", help="of the latencies")
    parser.add_argument("--models", default="cloister-5m,smollm2-135m", help="of the throughput, with commas")
    parser.add_argument("--streams", type=int, default=64, help="requests at once, of two replicas")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--step-ms", type=float, default=10.0, help="a step of an engine that computes nothing")
    parser.add_argument("--rounds", type=int, default=1, help="of the throughput; their median is judged")
    parser.add_argument("--skip-busy", action="store_true", help="no latencies with engines that compute")
    options = parser.parse_args()
    bench = Bench(
        "cluster_overhead",
        "What a front adds, and how two replicas add up",
        "with the cores free 2 ms are added to the time to the first token, most of it parsing and turns of the event loop; "
        "with engines that compute on the cores of front and client the P99 is missed; two replicas lose no processor time",
    )
    if options.part != "throughput":
        measure_latency(bench, options, f"steps of {options.step_ms:g} ms on another device", options.step_ms)
        if not options.skip_busy:
            measure_latency(bench, options, options.model, None)
    if options.part != "latency":
        for model in options.models.split(","):
            measure_throughput(bench, options, model)
    bench.figures["load average"] = os.getloadavg()[0]
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
