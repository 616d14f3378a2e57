"""The work that every engine does, and how it is timed. Standard library only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

NUM_NEW: Final = 128
SHORT, LONG, WARM_UP = 128, 512, 520
DECODE_PROMPT: Final = 512
MIN_MEASURED_S: Final = 2.0
"""Less than this and the kernel's clock ticks (10 ms) would hide who else was running."""


class Engine(Protocol):
    """An engine with its model loaded."""

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        """Continues each prompt greedily by exactly `num_new` tokens, all at once, with no prefix reused.

        Raises:
            RuntimeError: an answer has another length.
        """

    def close(self) -> None:
        """Ends it."""


class Tokens:
    """Prompts of random tokens; no two share a prefix."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._high = min(vocab_size, 16000) - 1

    def draw(self, length: int) -> list[int]:
        return [self._random.randint(1, self._high) for _ in range(length)]

    def draw_mixed(self, num_prompts: int) -> list[list[int]]:
        """Returns prompts whose lengths are spread evenly over 128 to 512 tokens, 320 on average."""
        return [self.draw(length) for length in spread_lengths(num_prompts)]


def spread_lengths(num_prompts: int) -> list[int]:
    """Prompt lengths of `num_prompts` requests that arrive together."""
    if num_prompts == 1:
        return [(SHORT + LONG) // 2]
    return [SHORT + (LONG - SHORT) * i // (num_prompts - 1) for i in range(num_prompts)]


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured of an engine.

    Attributes:
        kind: "prefill", "decode", "together", "http", "first_token", "memory"; of the machine "read" and "gemm".
        size: tokens of the prompt, or requests at once.
        unit: of a sample.
        more_is_better: which way is good.
    """

    name: str
    kind: str
    size: int
    title: str
    unit: str = "tok/s"
    more_is_better: bool = True


FIGURES: Final = {
    figure.name: figure
    for figure in (
        Figure("prefill512", "prefill", 512, "prefill 512"),
        Figure("prefill2048", "prefill", 2048, "prefill 2048"),
        Figure("decode", "decode", 1, "decode after 512"),
        Figure("together8", "together", 8, "8 at once"),
        Figure("together16", "together", 16, "16 at once"),
        Figure("http16", "http", 16, "16 over HTTP"),
        Figure("memory", "memory", 0, "peak memory", "GiB", False),
        Figure("first_token", "first_token", 16, "start to first token", "s", False),
    )
}

LIMITS: Final = {
    figure.name: figure
    for figure in (
        Figure("read", "read", 0, "memory read", "GB/s"),
        Figure("gemm_bf16", "gemm", 0, "torch GEMM, bf16", "GFLOP/s"),
        Figure("gemm_int8", "gemm", 0, "torch GEMM, int8", "GFLOP/s"),
    )
}


def warm_up(engine: Engine, tokens: Tokens) -> None:
    """Lets an engine allocate and compile what it does lazily."""
    engine.generate([tokens.draw(64)], 4)
    engine.generate([tokens.draw(WARM_UP)], 2)


def measure(figure: Figure, engine: Engine, tokens: Tokens, num_samples: int) -> list[float]:
    """Returns samples of one figure, `num_samples` or as many as fill two seconds, in tokens per second."""
    take: dict[str, Callable[[], float]] = {
        "prefill": lambda: _prefill(engine, tokens, figure.size),
        "decode": lambda: _decode(engine, tokens),
        "together": lambda: _together(engine, tokens, figure.size),
    }
    samples: list[float] = []
    start_s = time.perf_counter()
    while len(samples) < num_samples or time.perf_counter() - start_s < MIN_MEASURED_S:
        samples.append(take[figure.kind]())
    return samples


def _prefill(engine: Engine, tokens: Tokens, length: int) -> float:
    """Prompt tokens per second of a call that makes one token."""
    return length / _time(engine, [tokens.draw(length)], 1)


def _decode(engine: Engine, tokens: Tokens) -> float:
    """Tokens per second after a prompt, whose own time is taken off."""
    first_s = _time(engine, [tokens.draw(DECODE_PROMPT)], 1)
    return NUM_NEW / (_time(engine, [tokens.draw(DECODE_PROMPT)], NUM_NEW + 1) - first_s)


def _together(engine: Engine, tokens: Tokens, num_prompts: int) -> float:
    """New tokens per second of requests that arrive together, their prefill included."""
    return num_prompts * NUM_NEW / _time(engine, tokens.draw_mixed(num_prompts), NUM_NEW)


def _time(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int) -> float:
    start_s = time.perf_counter()
    engine.generate(prompts, num_new)
    return time.perf_counter() - start_s
