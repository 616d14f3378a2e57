"""A prompt that another engine knows: time to the first token with its KV loaded, and computed.

    python -m benchmarks.kv_transfer [--model MODEL] [--tokens N] [--where PLACES] [--repeats N]
    python -m benchmarks.kv_transfer --handover [--chunk N]

Two engine processes of one thread, which listen in all places of `--where`, such as "shm,unix,tls://127.0.0.1:0". For each
repeat a prompt is computed and loaded, from each place in turn and with a new prompt each time: the time from `Submit` to the
first token, that of the load from the engine's own event, and the processor time of both engines from the request for KV to
the end of the answer of 8 tokens, in ticks of 10 ms: a mean.

With `--handover` one engine computes the prompt and another one goes on behind the first token, as with `serve --prefill 1
--decode 1`. For one engine, for KV that is pulled behind the first token, and for KV that is pulled while the prompt is
computed (decisions/0037): the time to the first token, that from it to the second one, how long the request waited for its KV
at the second engine, and the processor time of both engines together from the request to the second token. The last one, in
ticks of the kernel, says less about other programs on the machine than the others do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cloister.engine.transports import ProcessTransport
from cloister.launch.processes import ENGINE_ENTRY
from cloister.types.config import EngineConfig
from cloister.types.events import (
    Ended,
    Event,
    KVLoaded,
    KVSource,
    Outputs,
    PrefetchKV,
    PrefillDone,
    Progressed,
    Resumption,
    Scheduled,
    Submit,
)
from cloister.types.request import Request, SamplingParams


class TimedEngine:
    """An engine process, and when its events came here."""

    def __init__(self) -> None:
        self.transport = ProcessTransport(ENGINE_ENTRY, kv_secret=b"b" * 32)
        self.came_s: dict[tuple[str, str], float] = {}
        self.events: list[Event] = []
        self.tokens: dict[str, list[int]] = {}
        self.times_s: dict[str, list[float]] = {}

    def deliver(self, message: Outputs) -> None:
        now = time.perf_counter()
        for event in message.events:
            self.events.append(event)
            if isinstance(event, Progressed | Ended | KVLoaded):
                self.came_s.setdefault((type(event).__name__, event.request_id), now)
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.times_s.setdefault(output.request_id, []).extend([now] * len(output.token_ids))

    async def first_token_s(self, name: str, token_ids: list[int], source: str | None = None) -> float:
        """Returns the time to the first token of a request, which is whole then."""
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, token_ids=token_ids, sampling=sampling)
        sent_s = time.perf_counter()
        self.transport.send(Submit(request, 0, kv_source=KVSource(source) if source else None, hold_kv_s=60.0))
        while ("Ended", name) not in self.came_s:
            await asyncio.sleep(0.0005)
        return self.came_s["Progressed", name] - sent_s


@asynccontextmanager
async def two_engines(model: str, where: str, chunk: int | None) -> AsyncIterator[tuple[TimedEngine, TimedEngine, str, int]]:
    """Starts two engines; yields them, the endpoint of the first one's KV, and the size of the vocabulary."""
    engines = TimedEngine(), TimedEngine()
    config = EngineConfig(
        model=model, num_threads=1, kv_memory_mb=512.0, prefix_cache=True, kv_transfer=where, max_batched_tokens=chunk
    )
    tasks = []
    for engine in engines:
        await engine.transport.open(config)
        tasks.append(asyncio.create_task(engine.transport.run(engine.deliver)))
    ready = engines[0].transport.ready
    assert ready is not None
    assert ready.kv_endpoint is not None
    yield *engines, ready.kv_endpoint, ready.model.vocab_size
    for task, engine in zip(tasks, engines, strict=True):
        task.cancel()
        await engine.transport.close()


@dataclass(frozen=True, slots=True)
class HandoverTimes:
    """Seconds of one request: see above."""

    first_s: float
    gap_s: float
    waited_s: float
    processor_s: float


def processor_s(*engines: TimedEngine) -> float:
    """Returns the processor time of engines so far, all threads."""
    ticks = 0
    for engine in engines:
        fields = Path(f"/proc/{engine.transport.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Handover:
    """A request whose prompt one engine computes, and which another one goes on with.

    Args:
        follows: the target pulls KV while the prompt is computed; else behind the first token.
    """

    def __init__(self, source: TimedEngine, target: TimedEngine, endpoint: str, *, follows: bool) -> None:
        self._source, self._target, self._endpoint, self._follows = source, target, endpoint, follows

    async def run(self, name: str, token_ids: list[int]) -> HandoverTimes:
        """Answers a request."""
        before_s = processor_s(self._source, self._target)
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, token_ids=token_ids, sampling=sampling)
        where, sent_s = KVSource(self._endpoint), time.perf_counter()
        self._source.transport.send(Submit(request, 0, hold_kv_s=60.0, prefill_only=True))
        if self._follows:
            while not any(isinstance(event, Scheduled) and event.request_id == name for event in self._source.events):
                await asyncio.sleep(0.0002)
            self._target.transport.send(PrefetchKV(request, token_ids, where, follows=True))
        while not any(isinstance(event, PrefillDone) and event.request_id == name for event in self._source.events):
            await asyncio.sleep(0.0002)
        (first_s,), given = self._source.times_s[name], list(self._source.tokens[name])
        self._target.tokens[name] = list(given)
        self._target.transport.send(Submit(request, 0, resumption=Resumption([given]), kv_source=where))
        while name not in self._target.times_s:
            await asyncio.sleep(0.0002)
        used_s = processor_s(self._source, self._target) - before_s
        while ("Ended", name) not in self._target.came_s:
            await asyncio.sleep(0.0002)
        loads = [event for event in self._target.events if isinstance(event, KVLoaded) and event.request_id == name]
        waited_s = sum(load.elapsed_s for load in loads)
        return HandoverTimes(first_s - sent_s, self._target.times_s[name][0] - first_s, waited_s, used_s)


async def answer_in_one(engine: TimedEngine, name: str, token_ids: list[int]) -> HandoverTimes:
    """Answers a request in one engine."""
    before_s = processor_s(engine)
    first_s = await engine.first_token_s(name, token_ids)
    times_s = engine.times_s[name]
    return HandoverTimes(first_s, times_s[1] - times_s[0], 0.0, processor_s(engine) - before_s)


async def measure_handover(model: str, num_tokens: int, where: str, repeats: int, chunk: int | None) -> None:
    """Prints the gap behind the first token."""
    async with two_engines(model, where, chunk) as (source, target, endpoint, vocab):
        draw = random.Random(1)
        found: dict[str, list[HandoverTimes]] = {"one engine": [], "pulled behind it": [], "pulled meanwhile": []}
        for number in range(repeats + 1):
            for way, taken in found.items():
                name = f"{way} {number}"
                prompt = [draw.randrange(10, vocab) for _ in range(num_tokens)]
                if way == "one engine":
                    taken.append(await answer_in_one(source, name, prompt))
                else:
                    taken.append(await Handover(source, target, endpoint, follows=way == "pulled meanwhile").run(name, prompt))
    print(f"{model}, {num_tokens} tokens, {where}, steps of {chunk or 'any'} tokens, median of {repeats}")
    for way, taken in found.items():
        first, gap, waited, used = (
            1e3 * statistics.median(getattr(times, name) for times in taken[1:])
            for name in ("first_s", "gap_s", "waited_s", "processor_s")
        )
        print(f"  {way:16} first token {first:8.1f} ms, then the second {gap:7.1f} ms, of which for KV {waited:7.1f} ms;"
              f" processor {used:7.0f} ms")  # fmt: skip


async def measure(model: str, num_tokens: int, where: str, repeats: int, chunk: int | None) -> None:
    """Prints the figures."""
    async with two_engines(model, where, chunk) as (source, target, endpoint, vocab):
        await measure_loads(model, num_tokens, repeats, source, target, endpoint, vocab)


async def measure_loads(
    model: str,
    num_tokens: int,
    repeats: int,
    source: TimedEngine,
    target: TimedEngine,
    endpoint: str,
    vocab: int,
) -> None:
    """Prints the time to the first token, computed and loaded."""
    draw = random.Random(1)
    places = endpoint.split(",")
    computed: list[float] = []
    loaded: dict[str, list[float]] = {place: [] for place in places}
    used: dict[str, list[float]] = {place: [] for place in places}
    for number in range(repeats + 1):
        for place in places:
            name = f"{place} {number}"
            prompt = [draw.randrange(10, vocab) for _ in range(num_tokens)]
            computed.append(await source.first_token_s(name, prompt))
            before_s = processor_s(source, target)
            loaded[place].append(await target.first_token_s(name, prompt, place))
            used[place].append(processor_s(source, target) - before_s)
            assert source.tokens[name] == target.tokens[name], "another answer"
    print(f"{model}, {num_tokens} tokens, median of {repeats}")
    print(f"  first token, computed {1e3 * statistics.median(computed[len(places) :]):8.1f} ms")
    for place in places:
        loads = [event for event in target.events if isinstance(event, KVLoaded) and event.request_id.startswith(place)][1:]
        assert all(load.complete for load in loads)
        load_s, num_bytes = statistics.median(load.elapsed_s for load in loads), loads[0].num_bytes
        print(f"  {place.partition(':')[0]:10} first token {1e3 * statistics.median(loaded[place][1:]):7.1f} ms, the load alone"
              f" {1e3 * load_s:7.1f} ms for {num_bytes / 2**20:.1f} MiB = {num_bytes / load_s / 1e9:.2f} GB/s; processor"
              f" {1e3 * statistics.mean(used[place][1:]):6.1f} ms")  # fmt: skip


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--where", default="shm,unix,tls://127.0.0.1:0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--handover", action="store_true")
    parser.add_argument("--chunk", type=int)
    options = parser.parse_args()
    run = measure_handover if options.handover else measure
    asyncio.run(run(options.model, options.tokens, options.where, options.repeats, options.chunk))


if __name__ == "__main__":
    main()
