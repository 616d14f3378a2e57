"""Grammars whose masks take long, on a clock that nothing else moves."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any

from cloister.executor import Grammars
from cloister.executor.grammar import MaskArray, make_thread
from cloister.types.request import Grammar, GrammarKind, SamplingParams

MASK_S = 0.02
SLOW = Grammar(GrammarKind.REGEX, "slow")


class Watch:
    """A clock that stands still, but for the masks of grammars that take long."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


class HurriedWatch(Watch):
    """A clock by which every wait takes too long."""

    def now(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Idle(Executor):
    """A helper that never has its turn."""

    def submit(self, work: Any, *args: Any) -> Future[Any]:  # type: ignore[override]
        return Future()


def idle_helper(name: str) -> Executor:
    """Returns a thread that compiles, or one that computes no mask."""
    return Idle() if name == "cloister-grammar" else make_thread(name)


class EverySecond:
    """An answer of tokens each of which is odd if the one before was even. A mask takes `MASK_S`."""

    is_complete = False

    def __init__(self, watch: Watch, num_words: int, last: int = 0) -> None:
        self._watch, self._num_words, self._last = watch, num_words, last

    def accept(self, token_ids: list[int]) -> bool:
        assert all((one + other) % 2 for one, other in zip([self._last, *token_ids], token_ids, strict=False))
        self._last = token_ids[-1]
        return True

    def fill(self, mask: MaskArray) -> bool:
        self._watch.now_s += MASK_S
        mask[:] = 0x55555555 if self._last % 2 else 0xAAAAAAAA
        return True

    def copy(self) -> EverySecond:
        return EverySecond(self._watch, self._num_words, self._last)


class SlowCompiler:
    """Compiles every grammar to the same, at once."""

    eos_token_ids = ()
    is_ready = True

    def __init__(self, watch: Watch, vocab_size: int) -> None:
        self._watch, self.num_words = watch, -(-vocab_size // 32)

    def compile(self, grammar: Grammar) -> EverySecond:
        return EverySecond(self._watch, self.num_words)


def make_slow(watch: Watch, vocab_size: int) -> Grammars:
    """Returns grammars whose masks nobody computes but the engine's thread; `SLOW` is compiled."""
    grammars = Grammars(SlowCompiler(watch, vocab_size), idle_helper)
    grammars.open(SLOW, SamplingParams(), [])
    return grammars
