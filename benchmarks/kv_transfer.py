"""A prompt that another engine knows: time to the first token with its KV loaded, and computed.

    python -m benchmarks.kv_transfer [--model MODEL] [--tokens N] [--where unix|tcp://127.0.0.1:0] [--repeats N]

Two engine processes of one thread. For each repeat both ways are timed in turn, with a new prompt, from `Submit` to the first
token; the load itself from the engine's own event.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

from cloister.engine.transports import ProcessTransport
from cloister.launch.processes import ENGINE_ENTRY
from cloister.types.config import EngineConfig
from cloister.types.events import Ended, Event, KVLoaded, KVSource, Outputs, Progressed, Submit
from cloister.types.request import Request, SamplingParams


class TimedEngine:
    """An engine process, and when its events came here."""

    def __init__(self) -> None:
        self.transport = ProcessTransport(ENGINE_ENTRY, kv_secret=b"b" * 32)
        self.came_s: dict[tuple[str, str], float] = {}
        self.events: list[Event] = []
        self.tokens: dict[str, list[int]] = {}

    def deliver(self, message: Outputs) -> None:
        now = time.perf_counter()
        for event in message.events:
            self.events.append(event)
            if isinstance(event, Progressed | Ended | KVLoaded):
                self.came_s.setdefault((type(event).__name__, event.request_id), now)
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    async def first_token_s(self, name: str, token_ids: list[int], source: str | None = None) -> float:
        """Returns the time to the first token of a request, which is whole then."""
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, token_ids=token_ids, sampling=sampling)
        sent_s = time.perf_counter()
        self.transport.send(Submit(request, 0, kv_source=KVSource(source) if source else None, hold_kv_s=60.0))
        while ("Ended", name) not in self.came_s:
            await asyncio.sleep(0.0005)
        return self.came_s["Progressed", name] - sent_s


async def measure(model: str, num_tokens: int, where: str, repeats: int) -> None:
    """Prints the figures."""
    engines = [TimedEngine(), TimedEngine()]
    config = EngineConfig(model=model, num_threads=1, kv_memory_mb=512.0, prefix_cache=True, kv_transfer=where)
    tasks = []
    for engine in engines:
        await engine.transport.open(config)
        tasks.append(asyncio.create_task(engine.transport.run(engine.deliver)))
    source, target = engines
    assert source.transport.ready is not None
    draw = random.Random(1)
    vocab = source.transport.ready.model.vocab_size
    computed, loaded = [], []
    for number in range(repeats + 1):
        prompt = [draw.randrange(10, vocab) for _ in range(num_tokens)]
        computed.append(await source.first_token_s(f"r{number}", prompt))
        loaded.append(await target.first_token_s(f"r{number}", prompt, source.transport.ready.kv_endpoint))
        assert source.tokens[f"r{number}"] == target.tokens[f"r{number}"], "another answer"
    loads = [event for event in target.events if isinstance(event, KVLoaded)][1:]  # the first one warms up
    assert all(load.complete for load in loads)
    load_s = statistics.median(load.elapsed_s for load in loads)
    print(f"{model}, {num_tokens} tokens, {where}, median of {repeats}")
    print(f"  first token, computed   {1e3 * statistics.median(computed[1:]):8.1f} ms")
    print(f"  first token, loaded     {1e3 * statistics.median(loaded[1:]):8.1f} ms")
    print(f"  load alone              {1e3 * load_s:8.1f} ms for {loads[0].num_bytes / 2**20:.1f} MiB"
          f" = {loads[0].num_bytes / load_s / 1e9:.2f} GB/s")  # fmt: skip
    for task, engine in zip(tasks, engines, strict=True):
        task.cancel()
        await engine.transport.close()


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--where", default="unix")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.model, options.tokens, options.where, options.repeats))


if __name__ == "__main__":
    main()
