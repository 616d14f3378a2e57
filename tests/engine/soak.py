"""Many clients at once, some of whom leave early, and an engine that is killed in the middle: is everybody accounted for?

By hand: `python -m tests.engine.soak --clients 2000 --kills 2`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.engine import EngineClient, ProcessTransport
from cloister.types.errors import EngineError
from cloister.types.events import Arrived, Ended, Event, Stepped
from cloister.types.request import FinishReason, Request, SequenceOutput
from tests.engine.replica import make_config, make_request

WAIT_S = 300.0


@dataclass
class Soak:
    """What became of everybody.

    Attributes:
        requests: every one that was sent; a client whose request failed sends a new one.
        ends: by request id, the finish reasons that its client saw; None for a client that left.
        events: everything that a listener was told.
    """

    requests: list[Request]
    ends: dict[str, list[FinishReason] | None] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def reasons(self) -> Counter[FinishReason]:
        return Counter(reason for end in self.ends.values() if end for reason in end)

    @property
    def last_step(self) -> Stepped | None:
        return next((event for event in reversed(self.events) if isinstance(event, Stepped)), None)

    @property
    def is_empty(self) -> bool:
        """Whether no request, and nothing of one, was there after the last step."""
        last = self.last_step
        return last is not None and last.num_running == last.num_waiting == last.num_used_blocks == 0

    def check(self) -> None:
        """Raises AssertionError unless each client that stayed got each of its ends once, and so did the listener."""
        ended: dict[str, list[Ended]] = {request.request_id: [] for request in self.requests}
        for event in self.events:
            if isinstance(event, Ended):
                ended[event.request_id].append(event)
        arrived = Counter(event.request_id for event in self.events if isinstance(event, Arrived))
        for request in self.requests:
            end = self.ends[request.request_id]
            mine = ended[request.request_id]
            assert end is None or len(end) == request.sampling.n, "a client waits for an end, or got one twice"
            assert sorted(e.index for e in mine) == list(range(request.sampling.n)), "an end is missing, or came twice"
            assert [e.last for e in mine].count(True) == 1
            assert arrived[request.request_id] == 1
        assert self.is_empty, f"something is left behind: {self.last_step}"


async def soak(engine: EngineClient, *, num_clients: int, num_kills: int, seed: int) -> Soak:
    """Sends `num_clients` requests at once and kills the engine `num_kills` times while they are served."""
    draw = random.Random(seed)
    run = Soak([_draw_request(draw) for _ in range(num_clients)])
    engine.subscribe(run.events.append)
    patience = [draw.randrange(1, 10) if draw.random() < 0.33 else None for _ in run.requests]
    started_s = time.monotonic()
    killing = asyncio.create_task(_kill(engine, run, num_kills, num_clients))
    await asyncio.gather(*(_be_client(engine, run, *pair) for pair in zip(list(run.requests), patience, strict=True)))
    await killing
    run.elapsed_s = time.monotonic() - started_s
    await _settle(engine, run)
    return run


def _draw_request(draw: random.Random) -> Request:
    prompt = [draw.randrange(200) for _ in range(draw.randrange(1, 60))]
    return make_request(prompt, max_tokens=draw.randrange(1, 40), n=draw.choice([1] * 8 + [2, 3]))


async def _be_client(engine: EngineClient, run: Soak, request: Request, patience: int | None) -> None:
    """Waits for the answer, or leaves after `patience` outputs; sends the request again when the engine died of it."""
    while True:
        outputs: list[SequenceOutput] = []
        try:
            async with contextlib.aclosing(engine.generate(request)) as stream:
                async for output in stream:
                    outputs.append(output)
                    if patience is not None and len(outputs) >= patience:
                        run.ends[request.request_id] = None
                        return
        except EngineError:
            assert not outputs, "an error in the middle of an answer"
            await asyncio.sleep(0.05)
            continue
        reasons = [output.finish_reason for output in outputs if output.finish_reason is not None]
        run.ends[request.request_id] = reasons
        if FinishReason.ERROR not in reasons:
            return
        request = msgspec.structs.replace(request, request_id=request.request_id + "again")
        run.requests.append(request)


async def _kill(engine: EngineClient, run: Soak, num_kills: int, num_clients: int) -> None:
    for kill in range(num_kills):
        num_answers = (kill + 1) * num_clients // (3 * num_kills)
        while engine.pid is None or run.reasons[FinishReason.LENGTH] < num_answers:
            await asyncio.sleep(0.005)
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.sleep(0.05)


async def _settle(engine: EngineClient, run: Soak) -> None:
    """Waits until the engine serves again and has ended what clients left behind, and a step has wiped it."""
    give_up_s = time.monotonic() + WAIT_S
    while not (engine.health().good and engine.health().detail.startswith("0 ") and run.is_empty):
        assert time.monotonic() < give_up_s, f"something is left behind: {engine.health().detail}; {run.last_step}"
        await asyncio.sleep(0.01)


async def _main(num_clients: int, num_kills: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        config = make_config(write_byte_tokenizer(Path(path)), max_waiting=num_clients, max_num_seqs=64)
        engine = EngineClient(ProcessTransport("tests.engine.replica:build"), config)
        await engine.start()
        run = await soak(engine, num_clients=num_clients, num_kills=num_kills, seed=seed)
        run.check()
        await engine.drain(1.0)
    left = sum(end is None for end in run.ends.values())
    counts = ", ".join(f"{count} {reason}" for reason, count in run.reasons.items())
    print(f"{num_clients} clients, {left} left early, {len(run.requests)} requests in {run.elapsed_s:.1f} s, all accounted for")
    print(f"ends of sequences: {counts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.clients, arguments.kills, arguments.seed))
