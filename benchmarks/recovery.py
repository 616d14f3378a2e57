"""Recovery: an engine that is stopped or killed, seen from outside, and a server that ends so that a supervisor starts another.

A server is started as a supervisor would start it. Its engine process gets SIGSTOP, then five times SIGKILL, then a sixth time.
Last, a server with `--files` answers a batch while the whole of it gets SIGKILL again and again, at moments that are drawn, and
is started on the same directory each time: each line of the input has one answer in the end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.endurance import find_engine
from benchmarks.harness import MODEL, Bench, make_parser
from tests.serving import descendants

NUM_KILLS = 5
NUM_LINES, NUM_BATCH_KILLS = 400, 6
TIMEOUT_S = 120.0
POLL_S = 0.02
BODY = {"prompt": [50, 51, 52], "max_tokens": 2}


class Supervised:
    """`cloister serve`, started again whenever it ends by itself, as systemd's `Restart=on-failure` would."""

    def __init__(self, *settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.statuses: list[int] = []
        self._command = [sys.executable, "-m", "cloister.cli", "serve", "--model", MODEL, "--port", str(port), *settings]
        self._log = (Path(tempfile.gettempdir()) / f"cloister-recovery-{port}.log").open("ab")
        self._is_over = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> int:
        return find_engine(self._process.pid)

    def kill(self) -> None:
        """Kills front and engine at once; they are started again."""
        for pid in (*descendants(self._process.pid), self._process.pid):
            os.kill(pid, signal.SIGKILL)

    def ask(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        """Returns the reply of a route, once there is a server."""
        seconds_until(lambda: self.health() == 200)
        reply = httpx.request(method, f"{self.url}{path}", timeout=TIMEOUT_S, **fields)
        reply.raise_for_status()
        answer: dict[str, Any] = reply.json()
        return answer

    def close(self) -> None:
        self._is_over = True
        for pid in (*descendants(self._process.pid), self._process.pid) if self._process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        self._thread.join(10)
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT)

    def _supervise(self) -> None:
        while True:
            status = self._process.wait()
            if self._is_over:
                return
            self.statuses.append(status)
            self._process = self._start()

    def health(self) -> int:
        """Returns the status of `/health`; 0 where nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def answers(self) -> bool:
        """Whether a request is answered."""
        try:
            return httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=TIMEOUT_S).status_code == 200
        except httpx.HTTPError:
            return False


def seconds_until(condition: Callable[[], bool]) -> float:
    """Returns how long it takes until a condition holds, in seconds."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > TIMEOUT_S:
            raise SystemExit(f"it did not come to pass within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - start_s


def main() -> int:
    options = make_parser(__doc__).parse_args()
    bench = Bench(
        "recovery",
        "Recovery: an engine that is stopped, and one that is killed six times",
        "a stopped engine turns /health bad after 5 s with a request waiting, and is replaced after 10 s; a killed one answers"
        " again within 1 s; the sixth death ends the server with status 1, and a supervisor's new one answers after a start",
    )
    server = Supervised()
    try:
        start_s = seconds_until(server.answers)
        stop(bench, server)
    finally:
        server.close()
    server = Supervised()
    try:
        seconds_until(server.answers)
        kill(bench, server)
    finally:
        server.close()
    with tempfile.TemporaryDirectory() as folder:
        server = Supervised("--files", folder)
        try:
            kill_under_batch(bench, server, random.Random(options.seed))
        finally:
            server.close()
    bench.figures["start to first answer, s"] = start_s
    return bench.finish(options)


def stop(bench: Bench, server: Supervised) -> None:
    """Stops the engine, first idle and then with a request that waits."""
    engine = server.engine
    os.kill(engine, signal.SIGSTOP)
    time.sleep(1.0)
    bench.check("/health of a stopped engine that nobody waits for", server.health(), low=200, high=200)
    waiting: list[bool] = []
    asking = threading.Thread(target=lambda: waiting.append(server.answers()))
    asking.start()
    bad_s = seconds_until(lambda: server.health() == 503)
    replaced_s = bad_s + seconds_until(lambda: server.health() == 200)
    asking.join(TIMEOUT_S)
    bench.print_rows("SIGSTOP", ("what", "s"), [("until /health is bad", bad_s), ("until a new engine is there", replaced_s)])
    bench.check("s until /health says that the engine is stalled", bad_s, high=7.0)
    bench.check("s until it is replaced", replaced_s, high=15.0)
    bench.check_true("the request that waited was answered by the next engine", waiting == [True])
    bench.check_true("the next request is answered", server.answers())


def kill(bench: Bench, server: Supervised) -> None:
    """Kills the engine as often as it is started again, and once more."""
    rows = []
    for number in range(1, NUM_KILLS + 1):
        os.kill(server.engine, signal.SIGKILL)
        rows.append((f"kill {number}", seconds_until(server.answers)))
    bench.check("times the server itself ended meanwhile", len(server.statuses), high=0)
    os.kill(server.engine, signal.SIGKILL)
    ended_s = seconds_until(lambda: bool(server.statuses))
    rows += [("kill 6: until the server ends", ended_s), ("and answers again", ended_s + seconds_until(server.answers))]
    bench.print_rows("SIGKILL", ("what", "s until a request is answered"), rows)
    bench.check("s until a killed engine is replaced, first kill", rows[0][1], high=1.0)
    bench.check("status with which the server ended", server.statuses[0], low=1, high=1)


def kill_under_batch(bench: Bench, server: Supervised, draws: random.Random) -> None:
    """Begins a batch, kills the server under it, and counts what the last one hands out."""
    content = b"".join(make_line(number) for number in range(NUM_LINES))
    stored = server.ask("POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    wanted = {"input_file_id": stored["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    path = f"/v1/batches/{server.ask('POST', '/v1/batches', json=wanted)['id']}"
    rows = []
    for number in range(NUM_BATCH_KILLS):
        seconds_until(lambda: server.health() == 200)
        time.sleep(draws.uniform(0.3, 1.2))
        rows.append((f"kill {number + 1}", server.ask("GET", path)["request_counts"]["completed"]))
        server.kill()
    seconds_until(lambda: server.ask("GET", path)["status"] != "in_progress")
    batch = server.ask("GET", path)
    bench.print_rows("A batch", ("what", "lines answered before"), rows)
    answers = httpx.get(f"{server.url}/v1/files/{batch['output_file_id']}/content", timeout=TIMEOUT_S).text.splitlines()
    counts = Counter(json.loads(answer)["custom_id"] for answer in answers)
    bench.check_true("the batch is completed", batch["status"] == "completed")
    bench.check("lines with an answer", len(counts), low=NUM_LINES, high=NUM_LINES)
    bench.check("most answers of one line", max(counts.values()), low=1, high=1)


def make_line(number: int) -> bytes:
    """Returns one line of a batch's input."""
    body = {"messages": [{"role": "user", "content": f"What does VACUUM do? {number}"}], "max_tokens": 24}
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
