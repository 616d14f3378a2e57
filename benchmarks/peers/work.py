"""The work that every engine does, and how it is timed. Standard library only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

NUM_NEW: Final = 128
SHORT, LONG, WARM_UP = 128, 512, 520
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


@runtime_checkable
class Streaming(Protocol):
    """An engine that shows its first token when it is there."""

    def time_decode(self, prompt: Sequence[int], num_new: int) -> float:
        """Returns the seconds from the first token after a prompt to the last of `num_new` more.

        Raises:
            RuntimeError: the answer has another length.
        """


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
        positions: of the longest sequence, prompt and answer.
    """

    name: str
    kind: str
    size: int
    title: str
    unit: str = "tok/s"
    more_is_better: bool = True

    @property
    def positions(self) -> int:
        return {"prefill": self.size + 1, "decode": self.size + 1 + NUM_NEW}.get(self.kind, LONG + NUM_NEW)


FIGURES: Final = {
    figure.name: figure
    for figure in (
        Figure("prefill512", "prefill", 512, "prefill 512"),
        Figure("prefill2048", "prefill", 2048, "prefill 2048"),
        Figure("prefill8192", "prefill", 8192, "prefill 8192"),
        Figure("decode", "decode", 512, "decode after 512"),
        Figure("decode4096", "decode", 4096, "decode after 4k"),
        Figure("decode16384", "decode", 16384, "decode after 16k"),
        Figure("together8", "together", 8, "8 at once"),
        Figure("together16", "together", 16, "16 at once"),
        Figure("http16", "http", 16, "16 over HTTP"),
        Figure("memory", "memory", 0, "peak memory", "GiB", False),
        Figure("first_token", "first_token", 16, "start to first token", "s", False),
    )
}

BASE: Final = ("prefill512", "prefill2048", "decode", "together8", "together16")
"""The work over which peak memory is taken."""
LONG_CONTEXT: Final = ("decode4096", "prefill8192", "decode16384")

LIMITS: Final = {
    figure.name: figure
    for figure in (
        Figure("read", "read", 0, "memory read", "GB/s"),
        Figure("gemm_bf16", "gemm", 0, "matrix product, bf16", "GFLOP/s"),
        Figure("gemm_int8", "gemm", 0, "matrix product, int8", "GFLOP/s"),
    )
}


def warm_up(engine: Engine, tokens: Tokens) -> None:
    """Lets an engine allocate and compile what it does lazily."""
    engine.generate([tokens.draw(64)], 4)
    engine.generate([tokens.draw(WARM_UP)], 2)


def measure(figure: Figure, engine: Engine, tokens: Tokens, num_samples: int) -> list[float]:
    """Returns samples of one figure, `num_samples` or as many as fill two seconds, in tokens per second."""
    samples: list[float] = []
    start_s = time.perf_counter()
    while len(samples) < num_samples or time.perf_counter() - start_s < MIN_MEASURED_S:
        samples.append(take_sample(figure, engine, tokens))
    return samples


def take_sample(figure: Figure, engine: Engine, tokens: Tokens) -> float:
    """Returns one sample of a figure, in tokens per second."""
    take: dict[str, Callable[[Engine, Tokens, int], float]] = {"prefill": _prefill, "decode": _decode, "together": _together}
    return take[figure.kind](engine, tokens, figure.size)


def _prefill(engine: Engine, tokens: Tokens, length: int) -> float:
    """Prompt tokens per second of a call that makes one token."""
    return length / _time(engine, [tokens.draw(length)], 1)


def _decode(engine: Engine, tokens: Tokens, length: int) -> float:
    """Tokens per second after a prompt.

    The time of a call that makes one token is taken off that of another; after a long prompt that difference would be small
    beside both, and who can shows when the first token came.
    """
    if length > LONG and isinstance(engine, Streaming):
        return NUM_NEW / engine.time_decode(tokens.draw(length), NUM_NEW)
    first_s = _time(engine, [tokens.draw(length)], 1)
    return NUM_NEW / (_time(engine, [tokens.draw(length)], NUM_NEW + 1) - first_s)


def _together(engine: Engine, tokens: Tokens, num_prompts: int) -> float:
    """New tokens per second of requests that arrive together, their prefill included."""
    return num_prompts * NUM_NEW / _time(engine, tokens.draw_mixed(num_prompts), NUM_NEW)


def _time(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int) -> float:
    start_s = time.perf_counter()
    engine.generate(prompts, num_new)
    return time.perf_counter() - start_s
