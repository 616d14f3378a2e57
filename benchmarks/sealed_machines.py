"""What an engine in another machine of a sealed unit costs a request, beside one in its leader's machine.

    python -m benchmarks.sealed_machines [--seconds 40] [--num-output 201]

Starts a leader and a member on this machine's loopback, each a hardened node with one engine of one thread, which verify each
other and pair; needs what the measures of a node need (docs/hardening.md). One client seals one request after the other to the
leader, whose worker draws an engine: the same prompt with an answer of 1 token, then with one of `--num-output`. Which one it
was shows in the processor time of both. Answers of 1 token give the time to the first token; those of many, less the median of
1 token in the same place, the time of each further token. Answers are whole, not streamed: frames of a stream leave on ticks of
5 ms, one a tick, in which the difference would drown. A whole answer leaves on a tick too; requests are sent at random times,
so this adds the same to both places. Everything shares this machine's cores, and the network between two machines is not in
it.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import httpx

from benchmarks.cluster_costs import read_cpu_s
from benchmarks.harness import MODEL, Bench, make_parser
from cloister.bench.report import Spread
from cloister.private.gateway import NODE_PATH
from cloister.private.nodes import KEYS_PATH
from cloister.trust.sealing import (
    WHOLE,
    HttpRequest,
    RequestHead,
    decode_response,
    encode_request,
    open_response,
    parse_keys,
    seal_request,
)
from cloister.trust.shape import Unshaper
from tests.serving import ServeProcess, find_processes

HERE: Final = "leader's machine"
ELSEWHERE: Final = "another machine"
PAIRED: Final = "member 1 of the unit has proved itself"
PAIR_TIMEOUT_S: Final = 120.0
REQUEST_TIMEOUT_S: Final = 60.0
SENTENCE: Final = "Once upon a time there was a small house beside a large river, and "
NUM_WARM_UP: Final = 8
TICK_S: Final = 0.005
"""Answers leave a node on ticks of the clock (docs/traffic.md)."""


@dataclass
class Times:
    """Seconds of requests, from sending to the whole answer, by where they were computed.

    Attributes:
        short: of answers of one token.
        long: of answers of many.
    """

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)

    def first_token(self) -> Spread:
        spread = Spread.of(self.short)
        assert spread is not None
        return spread

    def further_token(self, num_output: int) -> Spread:
        """Returns what each token after the first one takes."""
        begun_s = self.first_token().p50
        spread = Spread.of([(total_s - begun_s) / (num_output - 1) for total_s in self.long])
        assert spread is not None
        return spread


class SealedUnit:
    """A leader and a member, and one client that seals requests to the leader."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        flags = ("--sealed", "--num-threads", "1")
        with ThreadPoolExecutor(2) as pool:
            member = pool.submit(ServeProcess, *flags, "--unit-port", port)
            leader = pool.submit(ServeProcess, *flags, "--unit-members", f"127.0.0.1:{port}")
            self.nodes = [leader.result(), member.result()]
        self.nodes[0].wait_until(lambda: PAIRED in self.nodes[0].printed, PAIR_TIMEOUT_S)
        self._client = httpx.Client(base_url=self.nodes[0].url, timeout=REQUEST_TIMEOUT_S)
        self._keys = parse_keys(self._client.get(KEYS_PATH).content)
        self._engines = [find_processes(node.process.pid, "engine")[0] for node in self.nodes]

    def ask(self, prompt: str, num_output: int) -> tuple[str, float]:
        """Sends a request, once sealed; returns where it was computed, and how long its answer took."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "temperature": 0}
        head = RequestHead("POST", "https", "node", "/v1/completions", ((b"content-type", b"application/json"),))
        sealed, exchange = seal_request(self._keys[0], encode_request(HttpRequest(head, json.dumps(body).encode())))
        before_s = [read_cpu_s(pid) for pid in self._engines]
        begun_s = time.perf_counter()
        answer = self._client.post(NODE_PATH, content=sealed, headers={"content-type": WHOLE.request_type})
        took_s = time.perf_counter() - begun_s
        spent_s = [read_cpu_s(pid) - earlier_s for pid, earlier_s in zip(self._engines, before_s, strict=True)]
        opened = decode_response(Unshaper(required=True).feed(open_response(exchange, answer.content)))
        num_tokens = json.loads(opened.content)["usage"]["completion_tokens"] if opened.head.status == 200 else 0
        if num_tokens != num_output:
            raise RuntimeError(f"the node answered {opened.head.status} and {num_tokens} tokens in place of {num_output}")
        if not 2 * min(spent_s) < max(spent_s):
            raise RuntimeError(f"both engines computed ({spent_s} s): something else uses the unit")
        return (HERE, ELSEWHERE)[spent_s.index(max(spent_s))], took_s

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of requests")
    parser.add_argument("--num-output", type=int, default=201, help="tokens of every second answer")
    parser.add_argument("--num-sentences", type=int, default=10, help="of the prompt, of 23 tokens each")
    options = parser.parse_args()
    bench = Bench(
        "sealed_machines", "A sealed unit: an engine in another machine beside one in its leader's",
        "an engine elsewhere adds a fraction of a millisecond to each token, for the fronts that carry it, and little before",
    )  # fmt: skip
    draw = random.Random(options.seed)
    load = os.getloadavg()[0]
    unit = SealedUnit()
    times = {HERE: Times(), ELSEWHERE: Times()}
    try:
        for _ in range(NUM_WARM_UP):
            unit.ask(SENTENCE * options.num_sentences, options.num_output)
        until_s = time.monotonic() + options.seconds
        while time.monotonic() < until_s or not all(each.short and each.long for each in times.values()):
            prompt = f"Story {draw.randrange(10**6):06}. {SENTENCE * options.num_sentences}"
            for num_output in (1, options.num_output):
                time.sleep(draw.uniform(0.0, 2 * TICK_S))  # else the last answer's tick would decide this one's
                place, took_s = unit.ask(prompt, num_output)
                (times[place].short if num_output == 1 else times[place].long).append(took_s)
    finally:
        unit.close()
    rows: list[tuple[object, ...]] = []
    figures: list[list[float]] = []
    for place, each in times.items():
        first, further = each.first_token(), each.further_token(options.num_output)
        figures.append([each_s * 1e3 for each_s in (first.p50, first.p99, further.p50, further.p99)])
        rows.append((place, len(each.short), *figures[-1][:2], len(each.long), *figures[-1][2:]))
    added = [elsewhere - here for here, elsewhere in zip(*figures, strict=True)]
    rows.append(("added", "", *added[:2], "", *added[2:]))
    bench.print_rows(
        f"Engine in the leader's machine and in another one (load {load:.1f} before)",
        (
            "engine",
            "answers of 1 token",
            "TTFT P50, ms",
            "TTFT P99",
            f"of {options.num_output}",
            "a token P50, ms",
            "a token P99",
        ),
        rows,
    )
    bench.check("added to each token, P50, ms", added[2], high=1.0)
    bench.check("added to the first token, P50, ms", added[0], high=10.0)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
