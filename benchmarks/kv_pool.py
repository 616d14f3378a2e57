"""Conversations whose turns go to either of two replicas: time to the first token of later turns, with a KV tier in memory that
both share, with one of each of the same size in all, and without.

    python -m benchmarks.kv_pool [--model MODEL] [--quant FORMAT] [--conversations N] [--turns N] [--tokens N] [--memory SHARE]

Engine processes of one thread, two of each kind. Each turn goes to a replica that is drawn, the same one of each kind; kinds
take turns, and all must give the same tokens. The devices of a kind have together a tenth of the conversations' KV.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from dataclasses import replace

from benchmarks.kv_tiers import ANSWER_TOKENS, TURN_TOKENS, TimedEngine, describe, running
from benchmarks.models import MODELS, find_model
from cloister.engine.kv_pool import KVPool
from cloister.engine.transports import ProcessTransport
from cloister.launch.processes import ENGINE_ENTRY
from cloister.types.config import EngineConfig

NUM_REPLICAS = 2


class Kind:
    """Replicas with one setting of `kv_tier`, and the first tokens of later turns.

    Args:
        pool: what they share; None: nothing.
    """

    def __init__(self, config: EngineConfig, pool: KVPool | None = None) -> None:
        self.engines = [
            TimedEngine(config, ProcessTransport(ENGINE_ENTRY, kv_pool=pool, replica=index)) for index in range(NUM_REPLICAS)
        ]
        self.stayed_s: list[float] = []
        self.moved_s: list[float] = []

    def report(self, name: str) -> None:
        """Prints the times, and what was found and stored."""
        cached = sum(num for engine in self.engines for turn, num in engine.cached.items() if not turn.endswith(".0"))
        print(f"  {name:6} {cached} tokens cached in later turns")
        for what, times in (("same replica", self.stayed_s), ("other replica", self.moved_s)):
            times.sort()
            p50_ms, p90_ms = 1e3 * statistics.median(times), 1e3 * times[len(times) * 9 // 10]
            print(f"    {what:13} {len(times):3} turns, first token P50 {p50_ms:7.1f} ms, P90 {p90_ms:7.1f} ms")
        for engine in self.engines:
            print(f"    {describe(engine)}")


async def converse(kinds: dict[str, Kind], options: argparse.Namespace, vocab_size: int) -> int:
    """Has all kinds answer the same turns; returns the tokens of a whole conversation."""
    draw = random.Random(1)
    histories = [[draw.randrange(10, vocab_size) for _ in range(options.tokens)] for _ in range(options.conversations)]
    last = [0] * options.conversations
    names = list(kinds)
    for turn in range(options.turns):
        for number, history in enumerate(histories):
            replica, shift = draw.randrange(NUM_REPLICAS), (number + turn) % len(names)
            name, answers = f"{number}.{turn}", set[tuple[int, ...]]()
            for kind in (kinds[kind] for kind in names[shift:] + names[:shift]):
                first_s, _ = await kind.engines[replica].answer(name, history)
                answers.add(tuple(kind.engines[replica].tokens[name]))
                if turn:
                    (kind.stayed_s if replica == last[number] else kind.moved_s).append(first_s)
            assert len(answers) == 1, "a tier changed an answer"
            last[number] = replica
            history += [*answers.pop(), *(draw.randrange(10, vocab_size) for _ in range(TURN_TOKENS))]
    return len(histories[0])


async def measure(options: argparse.Namespace) -> None:
    """Prints the figures."""
    model = str(find_model(options.model)) if options.model in MODELS else options.model
    longest = options.tokens + options.turns * (TURN_TOKENS + ANSWER_TOKENS)
    base = EngineConfig(
        model=model,
        quant=options.quant,
        num_threads=1,
        prefix_cache=True,
        max_model_len=longest,
        max_num_seqs=1,
        weights_cache="",
    )
    probe = TimedEngine(base)
    await probe.transport.open(base)
    assert probe.transport.ready is not None
    memory, vocab_size = dict(probe.transport.ready.memory), probe.transport.ready.model.vocab_size
    await probe.transport.close()
    longest_mb = memory["KV cache"] / 2**20
    needed_mb = options.conversations * longest_mb
    device_mb = max(1.1 * longest_mb, needed_mb / 10 / NUM_REPLICAS)
    part_mb = options.memory * needed_mb / NUM_REPLICAS
    config = replace(base, kv_memory_mb=device_mb)
    pool = KVPool(int(part_mb * 2**20), NUM_REPLICAS)
    kinds = {
        "none": Kind(config),
        "host": Kind(replace(config, kv_tier=f"host:{part_mb:.2f}M")),
        "shared": Kind(replace(config, kv_tier=f"shared:{part_mb:.2f}M"), pool),
    }
    async with running([engine for kind in kinds.values() for engine in kind.engines]):
        num_tokens = await converse(kinds, options, vocab_size)
        print(
            f"{options.model} {options.quant}: turns 2 to {options.turns} of {options.conversations} conversations, up to "
            f"{num_tokens} tokens, all the same answers; {needed_mb:.0f} MiB of KV, {device_mb:.0f} MiB on each device, "
            f"tiers of {part_mb:.0f} MiB each"
        )
        for name, kind in kinds.items():
            kind.report(name)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600, help="of a conversation's first prompt")
    parser.add_argument("--memory", type=float, default=1.2, help="of the tiers together, as a part of all conversations' KV")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
