"""Conversations ten times as large as the device's KV memory: time to the first token of later turns, with a KV tier and
without; and what a tier costs where nothing is ever used again.

    python -m benchmarks.kv_tiers [--model MODEL] [--quant FORMAT] [--conversations N] [--turns N] [--tokens N]

Engine processes of one thread: without a tier, with one on disk, one in memory, both (memory for a fifth of the
conversations), and one whose device holds all of them. Each request is sent to each of them in turn, and all must give the same
tokens. The disk's file is in the page cache as far as there is memory for it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from benchmarks.models import MODELS, find_model
from cloister.engine.transports import ProcessTransport
from cloister.launch.processes import ENGINE_ENTRY
from cloister.types.config import EngineConfig
from cloister.types.events import Ended, KVLoaded, Outputs, Progressed, Scheduled, Stepped, Submit
from cloister.types.request import Request, SamplingParams

TURN_TOKENS, ANSWER_TOKENS = 60, 16
"""Tokens of each message after the first, and of each answer."""
TIMEOUT_S = 300.0


@dataclass
class TimedEngine:
    """An engine process, and what it said."""

    config: EngineConfig
    transport: ProcessTransport = field(default_factory=lambda: ProcessTransport(ENGINE_ENTRY))
    first_s: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    loads: list[KVLoaded] = field(default_factory=list)
    stored_bytes: int = 0

    def deliver(self, message: Outputs) -> None:
        now = time.perf_counter()
        for event in message.events:
            match event:
                case Progressed(request_id=name):
                    self.first_s.setdefault(name, now)
                case Scheduled(request_id=name):
                    self.cached[name] = event.num_cached_tokens
                case Ended(request_id=name):
                    self.ended.add(name)
                case KVLoaded():
                    self.loads.append(event)
                case Stepped(stored=stored):
                    self.stored_bytes += sum(tier.num_bytes for tier in stored)
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    async def answer(self, name: str, token_ids: list[int]) -> tuple[float, float]:
        """Returns (time to the first token, time to the last one)."""
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        sent_s = time.perf_counter()
        self.transport.send(Submit(Request(request_id=name, token_ids=token_ids, sampling=sampling), 0))
        while name not in self.ended:
            if time.perf_counter() - sent_s > TIMEOUT_S:
                raise TimeoutError("an engine does not answer")
            await asyncio.sleep(0.0003)
        return self.first_s[name] - sent_s, time.perf_counter() - sent_s


async def converse(
    engines: dict[str, TimedEngine], options: argparse.Namespace, vocab_size: int
) -> tuple[dict[str, list[float]], int]:
    """Returns the times to the first tokens of later turns, by engine, and the tokens of a whole conversation."""
    draw = random.Random(1)
    histories = [[draw.randrange(10, vocab_size) for _ in range(options.tokens)] for _ in range(options.conversations)]
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(options.turns):
        for number, history in enumerate(histories):
            name, shift = f"{number}.{turn}", (number + turn) % len(names)
            for kind in names[shift:] + names[:shift]:
                first_s, _ = await engines[kind].answer(name, history)
                if turn:
                    times[kind].append(first_s)
            answers = {tuple(engine.tokens[name]) for engine in engines.values()}
            assert len(answers) == 1, "a tier changed an answer"
            history += [*answers.pop(), *(draw.randrange(10, vocab_size) for _ in range(TURN_TOKENS))]
    return times, len(histories[0])


async def measure_turns(engines: dict[str, TimedEngine], options: argparse.Namespace, vocab_size: int) -> None:
    """Prints what later turns take."""
    times, num_tokens = await converse(engines, options, vocab_size)
    what = f"turns 2 to {options.turns} of {options.conversations} conversations, up to {num_tokens} tokens"
    print(f"  {what}, all the same answers")
    for kind, engine in engines.items():
        later = sorted(times[kind])
        cached = sum(num for name, num in engine.cached.items() if not name.endswith(".0"))
        p50_ms, p90_ms = 1e3 * statistics.median(later), 1e3 * later[len(later) * 9 // 10]
        print(f"  {kind:5} first token P50 {p50_ms:7.1f} ms, P90 {p90_ms:7.1f} ms; {cached} tokens cached; {describe(engine)}")


@asynccontextmanager
async def running(engines: Sequence[TimedEngine]) -> AsyncIterator[None]:
    """Starts engines, takes what they say, and ends them."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.transport.close)
            await engine.transport.open(engine.config)
        for engine in engines:
            stack.callback(asyncio.create_task(engine.transport.run(engine.deliver)).cancel)
        yield


def describe(engine: TimedEngine) -> str:
    """Returns what an engine stored and loaded."""
    text = f"{engine.stored_bytes / 2**20:.0f} MiB stored"
    if not engine.loads:
        return text
    num_bytes, load_s = sum(event.num_bytes for event in engine.loads), sum(event.elapsed_s for event in engine.loads)
    num_loads = len(engine.loads)
    return (
        f"{text}, {num_loads} loads of {num_bytes / 2**20 / num_loads:.1f} MiB and {1e3 * load_s / num_loads:.1f} ms,"
        f" {num_bytes / load_s / 1e9:.2f} GB/s"
    )


async def waste(engines: dict[str, TimedEngine], num_requests: int, num_tokens: int, vocab_size: int) -> None:
    """Measures prompts of which none comes again, while the device is full."""
    draw = random.Random(2)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(num_requests):
        prompt = [draw.randrange(10, vocab_size) for _ in range(num_tokens)]
        names = list(engines)
        for kind in names[number % len(names) :] + names[: number % len(names)]:
            _, whole_s = await engines[kind].answer(f"once {number}", prompt)
            times[kind].append(whole_s)
    print(f"  {num_requests} prompts that come once; whole request, median of the second half, and of its ratio to no tier")
    for kind in times:
        ratios = [mine / other for mine, other in zip(times[kind], times["none"], strict=True)][num_requests // 2 :]
        whole_s = statistics.median(times[kind][num_requests // 2 :])
        print(f"  {kind:5} {1e3 * whole_s:7.1f} ms, {statistics.median(ratios):.3f}; {describe(engines[kind])}")


async def measure(options: argparse.Namespace) -> None:
    """Prints the figures."""
    model = str(find_model(options.model)) if options.model in MODELS else options.model
    longest = options.tokens + options.turns * (TURN_TOKENS + ANSWER_TOKENS)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        base = EngineConfig(
            model=model,
            quant=options.quant,
            num_threads=1,
            prefix_cache=True,
            max_model_len=longest,
            max_num_seqs=2,
            weights_cache="",
        )
        probe = TimedEngine(base)
        await probe.transport.open(base)
        assert probe.transport.ready is not None
        memory, vocab_size = dict(probe.transport.ready.memory), probe.transport.ready.model.vocab_size
        await probe.transport.close()
        token_bytes = memory["KV cache"] / (2 * -(-longest // base.block_size) * base.block_size)
        needed_mb = options.conversations * longest * token_bytes / 2**20
        disk = f"disk:{directory},8G"
        settings = {"none": None, "disk": disk, "host": "host:1G", "both": f"host:{needed_mb / 5:.1f}M+{disk}"}
        engines = {}
        for kind in (*settings, "all"):
            kv_mb = needed_mb / 10 if kind != "all" else 1.2 * needed_mb
            engines[kind] = TimedEngine(replace(base, kv_memory_mb=kv_mb, kv_tier=settings.get(kind)))
        async with running([*engines.values()]):
            print(f"{options.model} {options.quant}: {token_bytes / 1024:.1f} KiB of KV a token,"
                  f" {needed_mb:.0f} MiB in all, {needed_mb / 10:.0f} MiB on the device")  # fmt: skip
            await measure_turns(engines, options, vocab_size)
            del engines["all"]
            await waste(engines, options.once, options.tokens, vocab_size)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600, help="of a conversation's first prompt")
    parser.add_argument("--once", type=int, default=400, help="prompts that come once")
    parser.add_argument("--directory", default=None)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
