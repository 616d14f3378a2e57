"""Batches over servers that are killed: each line of the input has one answer in the end.

A server with `--files` answers a batch and gets SIGKILL again and again, at moments that are drawn; each time another one is
started on the same directory.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import Bench, make_parser
from tests.serving import ServeProcess

TIMEOUT_S = 60.0
POLL_S = 0.05


class Killed:
    """`cloister serve` on one directory, started anew after each kill."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._directory = directory
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=TIMEOUT_S)
        self._process = self._start()

    def kill(self) -> None:
        """Kills front and engine at once."""
        self._process.kill()

    def again(self) -> None:
        """Kills the server and starts another."""
        self.kill()
        self._process = self._start()

    def ask(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        """Returns the reply of a route."""
        reply = self.client.request(method, path, **fields)
        reply.raise_for_status()
        answer: dict[str, Any] = reply.json()
        return answer

    def _start(self) -> ServeProcess:
        return ServeProcess("--port", str(self._port), "--files", str(self._directory), timeout_s=TIMEOUT_S)


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--num-lines", type=int, default=400, help="of the batch")
    parser.add_argument("--num-kills", type=int, default=6, help="of the server")
    options = parser.parse_args()
    bench = Bench("batches", "Batches over servers that are killed", "each line has one answer, whenever the server dies")
    with tempfile.TemporaryDirectory() as folder:
        server = Killed(Path(folder) / "kept")
        try:
            run(bench, server, options.num_lines, options.num_kills, random.Random(options.seed))
        finally:
            server.kill()
    return bench.finish(options)


def run(bench: Bench, server: Killed, num_lines: int, num_kills: int, draws: random.Random) -> None:
    """Begins a batch, kills the server under it, and counts what the last one hands out."""
    content = b"".join(make_line(number) for number in range(num_lines))
    stored = server.ask("POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    wanted = {"input_file_id": stored["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    path = f"/v1/batches/{server.ask('POST', '/v1/batches', json=wanted)['id']}"
    rows = []
    for number in range(num_kills):
        time.sleep(draws.uniform(0.3, 1.2))
        rows.append((f"kill {number + 1}", server.ask("GET", path)["request_counts"]["completed"]))
        server.again()
    deadline = time.monotonic() + TIMEOUT_S * 2
    while (batch := server.ask("GET", path))["status"] == "in_progress" and time.monotonic() < deadline:
        time.sleep(POLL_S)
    bench.print_rows("SIGKILL", ("what", "lines answered before"), rows)
    answers = server.client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    counts = Counter(json.loads(answer)["custom_id"] for answer in answers)
    bench.check_true("the batch is completed", batch["status"] == "completed")
    bench.check("lines with an answer", len(counts), low=num_lines, high=num_lines)
    bench.check("most answers of one line", max(counts.values()), low=1, high=1)


def make_line(number: int) -> bytes:
    """Returns one line of a batch's input."""
    body = {"messages": [{"role": "user", "content": f"What does VACUUM do? {number}"}], "max_tokens": 24}
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
