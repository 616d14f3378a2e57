"""The check of batch invariance: whatever the company, a row of logits keeps its bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np

from cloister.backends.base import FloatArray
from tests.driving import Driver

VICTIM = "victim"
MakeDriver = Callable[[int, int], Driver]  # (block_size, num_threads) -> a program that holds no sequence


def differing_arrangements(
    make: MakeDriver,
    tokens: Sequence[int],
    *,
    vocab: int,
    chunks: Sequence[int] = (1, 7, 64, 100),
    block_sizes: Sequence[int] = (1, 5, 256),
    companions: Sequence[int] = (1, 2, 9, 31, 63),
) -> list[str]:
    """Names the arrangements in which some logit of `tokens` differs from the sequence alone in one chunk.

    Arrangements of the same block size and number of threads share a program, as requests do. What is hit was computed in the
    last of `chunks`.
    """
    make = cache(make)
    reference = _alone(make(16, 1), tokens)
    found = [
        *_cut_otherwise(make, tokens, chunks[:-1], block_sizes),
        *_after_hits(make(16, 1), tokens, chunks[-1]),
        *_in_company(make, tokens, vocab, companions),
        *_behind_a_shared_prefix(make, tokens, vocab),
    ]
    return [name for name, logits in found if logits.tobytes() != reference[-len(logits) :].tobytes()]


def _alone(driver: Driver, tokens: Sequence[int], chunk: int | None = None) -> FloatArray:
    logits = driver.run(VICTIM, tokens, chunk)
    driver.free(VICTIM)
    return logits


def _cut_otherwise(
    make: MakeDriver, tokens: Sequence[int], chunks: Sequence[int], block_sizes: Sequence[int]
) -> Iterator[tuple[str, FloatArray]]:
    yield "two threads", _alone(make(16, 2), tokens)
    for size in chunks:
        yield f"chunks of {size}", _alone(make(16, 1), tokens, size)
    for size in block_sizes:
        yield f"blocks of {size}", _alone(make(size, 1), tokens, 50)


def _after_hits(driver: Driver, tokens: Sequence[int], chunk: int) -> Iterator[tuple[str, FloatArray]]:
    """A sequence in chunks, and its rest after a prefix that this one computed."""
    yield f"chunks of {chunk}", driver.run("owner", tokens, chunk)
    for cached in (1, len(tokens) // 2, len(tokens) - 1):
        driver.share("owner", f"hit {cached}", cached)
        yield f"prefix hit of {cached}", driver.run(f"hit {cached}", tokens[cached:])
        driver.forget(f"hit {cached}", "owner")
    driver.free("owner")


def _behind_a_shared_prefix(make: MakeDriver, tokens: Sequence[int], vocab: int) -> Iterator[tuple[str, FloatArray]]:
    """The last tokens beside sequences that share the first blocks and then part, one after the other, which also draft."""
    for threads in (1, 2):
        driver, end = make(16, threads), len(tokens)
        driver.run("owner", tokens, 100)
        rng = np.random.default_rng(threads)
        parts: dict[object, Sequence[int]] = {}
        for number, cached in enumerate((end - 40, end - 3, end - 20, end - 3)):
            name: object = VICTIM if number == 1 else number
            driver.share("owner", name, cached)
            parts[name] = tokens[-3:-1] if number == 1 else rng.integers(0, vocab, (1, 0, 8, 3)[number]).tolist()
        logits = [driver.step(parts)[VICTIM]]
        logits.append(driver.step({name: tokens[-1:] if name == VICTIM else [7] for name in parts})[VICTIM])
        for seq in parts:
            driver.forget(seq, "owner")
        driver.free("owner")
        yield f"a shared prefix, {threads} threads", np.concatenate(logits)


def _in_company(
    make: MakeDriver, tokens: Sequence[int], vocab: int, companions: Sequence[int]
) -> Iterator[tuple[str, FloatArray]]:
    """On one thread and on two in turns: what depends on the number of rows alone, chunks show too."""
    for count, threads in zip(companions, itertools.cycle((1, 2))):
        yield f"{count} companions, {threads} threads", _beside(make(16, threads), tokens, count, vocab)


def _beside(driver: Driver, tokens: Sequence[int], count: int, vocab: int) -> FloatArray:
    """The second half of the sequence beside others, the victim in their middle: first they prefill, then they decode."""
    rng = np.random.default_rng(count)
    others = {number: rng.integers(0, vocab, rng.integers(1, 40)).tolist() for number in range(count)}
    left, right = range(count // 2), range(count // 2, count)
    steps = [slice(0, len(tokens) // 2), slice(len(tokens) // 2, len(tokens) - 1), slice(len(tokens) - 1, None)]
    logits = []
    for step, others_take in zip(steps, (slice(None), slice(None), slice(0, 1)), strict=True):
        before, after = ({number: others[number][others_take] for number in side} for side in (left, right))
        logits.append(driver.step({**before, VICTIM: tokens[step], **after})[VICTIM])
    for seq in (*others, VICTIM):
        driver.free(seq)
    return np.concatenate(logits[1:])
