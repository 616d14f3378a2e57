"""What do predicted lengths of answers bring to a router, and what does it cost if they are wrong?

`python -m benchmarks.length_routing latency` and `... refusals` run four replicas in virtual time (`cluster.virtual`): real
engines, schedulers, clients and routers, whose steps take 10 ms and 0.2 ms for each token. Lengths are those of a trace,
divided by 16, or drawn with a heavy tail; arrivals are a Poisson process. An engine is told when to end an answer by
`max_tokens`, which predictors do not see here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from cloister.bench.traces import read_trace
from cloister.cluster.lengths import LengthCurves, LengthPredictor
from cloister.cluster.link import LinkTimes
from cloister.cluster.replica_set import ReplicaSet
from cloister.cluster.routers import ROUTERS, RouterContext
from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.engine import make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import VirtualEventLoop, run_virtually
from cloister.cluster.virtual.network import VirtualNetwork
from cloister.cluster.virtual.replica import Host
from cloister.cluster.virtual.scenario import LengthError
from cloister.cluster.virtual.transport import LinkTransport
from cloister.cluster.virtual.wrong_lengths import WrongLengths
from cloister.engine.client import EngineClient
from cloister.engine.supervision import Supervision
from cloister.kv import PrefixKeys
from cloister.types.config import EngineConfig
from cloister.types.errors import QueueFullError
from cloister.types.request import FinishReason, ModelInfo, Request, SamplingParams, SequenceOutput

NUM_REPLICAS: Final = 4
MAX_MODEL_LEN: Final = 1024


class HiddenLimits:
    """A predictor that sees requests as if `max_tokens` did not end them."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor

    def expect(self, request: Request, num_done: int = 0) -> float:
        """As `LengthPredictor.expect`."""
        return self._predictor.expect(_hide(request), num_done)

    def quantile(self, request: Request, share: float) -> float:
        """As `LengthPredictor.quantile`."""
        return self._predictor.quantile(_hide(request), share)

    def learn(self, request: Request, num_tokens: int, *, is_whole: bool) -> None:
        """As `LengthPredictor.learn`."""
        self._predictor.learn(_hide(request), num_tokens, is_whole=True)


def _hide(request: Request) -> Request:
    return msgspec.structs.replace(request, sampling=SamplingParams())


@dataclass
class Client:
    """One request, and when what came."""

    request: Request
    at_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    is_refused: bool = False

    async def run(self, front: ReplicaSet) -> None:
        """Sends the request in time, and waits for its end."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.at_s)
        self.sent_s = loop.time()

        def take(output: SequenceOutput) -> None:
            if output.token_ids and self.first_s is None:
                self.first_s = loop.time()
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH, output.finish_reason
                self.ended_s = loop.time()

        try:
            await front.follow(self.request, take)
        except QueueFullError:
            self.is_refused = True

    @property
    def ttft_s(self) -> float:
        """Time to the first token; infinite if the request was refused."""
        return float("inf") if self.first_s is None else self.first_s - self.sent_s

    @property
    def latency_s(self) -> float:
        """Time to the last token."""
        assert self.ended_s is not None
        return self.ended_s - self.sent_s


def draw_lengths(name: str, count: int) -> list[tuple[int, int]]:
    """Returns lengths of prompts and answers: of a trace, or with a heavy tail (Pareto, exponent 1.1, from 5 to 500 tokens)."""
    draw = random.Random(1)
    if name == "pareto":
        return [(draw.choice((8, 32, 64)), min(500, int(5 * draw.paretovariate(1.1)))) for _ in range(count)]
    rows = read_trace(Path(name), count).rows
    return [(max(1, row.num_input_tokens // 64), max(1, row.num_output_tokens // 16)) for row in rows]


def make_clients(lengths: Sequence[tuple[int, int]], load: float, shape: EngineShape) -> list[Client]:
    """Returns clients that load the replicas to this share of what they can compute."""
    output_s = shape.step_s / shape.max_num_seqs + shape.token_s
    mean_s = statistics.fmean(answer * output_s + prompt * shape.token_s for prompt, answer in lengths)
    draw, now, clients = random.Random(3), 0.0, []
    for number, (prompt, answer) in enumerate(lengths):
        now += draw.expovariate(load * NUM_REPLICAS / mean_s)
        token_ids = [draw.randrange(256) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        clients.append(Client(Request(request_id=f"r{number}", token_ids=token_ids, sampling=sampling, timeout_s=1e5), now))
    return clients


def run_cluster(
    clients: Sequence[Client], router: str, shape: EngineShape, error: LengthError | None, max_ttft_s: float | None = None
) -> None:
    """Runs the requests. `error` None: the predictor knows the lengths."""

    def make_predictor(model: ModelInfo) -> LengthPredictor:
        curves = LengthCurves(model.max_model_len)
        return curves if error is None else WrongLengths(HiddenLimits(curves), error, random.Random(7))

    run_virtually(_run(clients, router, shape, make_predictor, max_ttft_s))


async def _run(
    clients: Sequence[Client],
    router: str,
    shape: EngineShape,
    make_predictor: Callable[[ModelInfo], LengthPredictor],
    max_ttft_s: float | None,
) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualEventLoop)
    draw = random.Random(5)
    network = VirtualNetwork(draw, 0.0002)
    make = partial(make_engine, shape, open_tokenizer(), loop.clock)
    hosts = [Host(i, make, network, draw, start_s=shape.start_s, times=LinkTimes()) for i in range(NUM_REPLICAS)]
    config = EngineConfig(model="history", max_waiting=shape.max_waiting, max_num_seqs=shape.max_num_seqs)
    engines = [EngineClient(LinkTransport(host, draw, Supervision(restarts=None)), config, clock=loop.clock) for host in hosts]

    front = ReplicaSet(
        engines,
        lambda model: ROUTERS.get(router)(RouterContext(PrefixKeys(model.fingerprint, shape.block_size), draw, max_ttft_s)),
        block_size=shape.block_size,
        draw=draw,
        make_predictor=make_predictor,
        clock=loop.clock,
    )
    await front.start()
    await asyncio.gather(*(client.run(front) for client in clients))
    await front.drain(1.0)


LATENCY_RUNS: Final[tuple[tuple[str, LengthError | None], ...]] = (
    ("least_load", "none"), ("least_work", "none"), ("least_work", None), ("least_work", "noise"),
    ("least_work", "either"),
)  # fmt: skip


def report_latency(lengths: Sequence[tuple[int, int]], slots: int) -> None:
    """Prints mean and P99 of the time to the last token."""
    shape = EngineShape(num_blocks=4096, max_num_seqs=slots, max_waiting=100_000, max_model_len=MAX_MODEL_LEN)
    for load in (0.7, 0.9):
        for router, error in LATENCY_RUNS:
            clients = make_clients(lengths, load, shape)
            run_cluster(clients, router, shape, error)
            times_s = sorted(client.latency_s for client in clients)
            p99_s = times_s[int(0.99 * len(times_s))]
            print(
                f"| {slots} | {load} | {router} | {error or 'exact'} | {statistics.fmean(times_s):.3f} | {p99_s:.2f} |",
                flush=True,
            )


def report_refusals(lengths: Sequence[tuple[int, int]], slots: int, max_ttft_s: float) -> None:
    """Prints how many requests had their first token in time, and how many were refused, by the router `conductor`."""
    shape = EngineShape(num_blocks=4096, max_num_seqs=slots, max_waiting=100_000, max_model_len=MAX_MODEL_LEN)
    for load in (0.9, 1.2, 1.5):
        for error in ("zero", "none", None, "noise", "hundredfold", "either"):
            clients = make_clients(lengths, load, shape)
            run_cluster(clients, "conductor", shape, error, max_ttft_s)
            in_time = statistics.fmean(client.ttft_s <= max_ttft_s for client in clients)
            refused = statistics.fmean(client.is_refused for client in clients)
            late = 1 - in_time - refused
            print(f"| {slots} | {load} | {error or 'exact'} | {in_time:.1%} | {refused:.1%} | {late:.1%} |", flush=True)


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("latency", "refusals"))
    parser.add_argument("--lengths", default="pareto", help="pareto, or the file of a trace")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-ttft-s", type=float, default=1.0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    lengths = draw_lengths(given.lengths, given.requests)
    for slots in given.slots:
        if given.what == "latency":
            report_latency(lengths, slots)
        else:
            report_refusals(lengths, slots, given.max_ttft_s)


if __name__ == "__main__":
    main()
