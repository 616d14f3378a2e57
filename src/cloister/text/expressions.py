"""What the regular expressions of a tokenizer take on texts that somebody may send to hold a server up.

The library's expressions backtrack (Oniguruma). It gives up after 10 million steps at one place of a text, a tenth of a second,
and begins anew at the next place; so an expression whose steps double with each letter of a run holds a thread for as many
tenths of a second as a text has runs, and one whose steps grow with the square of a run holds it for hours with a text of
megabytes. A call cannot be interrupted. So expressions that nobody has looked at are tried when a model is loaded.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator
from typing import Any, Final

import tokenizers
from tokenizers import Regex, pre_tokenizers

from cloister.types.errors import ModelError

SHORT_CHARS: Final = (16, 32, 64)
MOST_SHORT_S: Final = 0.005
"""Processor time of a text of `SHORT_CHARS`: more is hundreds of steps a letter, and more with each further letter."""
NUM_CHARS: Final = 500
FACTOR: Final = 8
LEAST_S: Final = 0.0002
"""Less than this is not measured well, and counts as this much."""
NUM_TRIALS: Final = 6
"""Trials of a text that takes long: a machine may be disturbed in some of them, and no tokenizer is refused for that."""
MOST_GROWTH: Final = 3 * FACTOR
"""Times the time of a text that is `FACTOR` times as long; the square would be 64."""
MOST_S: Final = 1.0
"""Processor time that one text may take where it grows as the square."""
_UNITS: Final = (" ", "\n", " \n", "a", "A", "x", "1", "'", "!", "-", "\u0301", "é", "東")
_ENDS: Final = ("b", "東!", "b\n1 .")


def bound_text(tokenizer: tokenizers.Tokenizer, known: Collection[str]) -> int | None:
    """Returns how many characters a text may have, so that it takes a second at most; None for any number.

    Args:
        known: expressions that need no trial.

    Raises:
        ModelError: an expression takes too long even on a short text.
    """
    bounds = [_bound(each) for each in dict.fromkeys(list_expressions(tokenizer)) if each not in known]
    return min((bound for bound in bounds if bound is not None), default=None)


def list_expressions(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yields the regular expressions that cut or change a text."""
    for component in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if component is not None:
            yield from _find(json.loads(component.__getstate__()))


def _find(settings: Any) -> Iterator[str]:
    if isinstance(settings, dict):
        if isinstance(expression := settings.get("Regex"), str):
            yield expression
        settings = list(settings.values())
    if isinstance(settings, list):
        for each in settings:
            yield from _find(each)


def _bound(expression: str) -> int | None:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    bounds = [_try(split, unit, end) for unit in _UNITS for end in _ENDS]
    return min((bound for bound in bounds if bound is not None), default=None)


def _try(split: pre_tokenizers.PreTokenizer, unit: str, end: str) -> int | None:
    for num_chars in SHORT_CHARS:
        if _measure(split, unit, end, num_chars, MOST_SHORT_S) > MOST_SHORT_S:
            raise _refusal()
    short_s = max(LEAST_S, _measure(split, unit, end, NUM_CHARS, LEAST_S))
    long_s = _measure(split, unit, end, NUM_CHARS * FACTOR, MOST_GROWTH * short_s)
    if math.isinf(short_s) or math.isinf(long_s):
        raise _refusal()
    return int(NUM_CHARS * FACTOR * math.sqrt(MOST_S / long_s)) if long_s > MOST_GROWTH * short_s else None


def _measure(split: pre_tokenizers.PreTokenizer, unit: str, end: str, num_chars: int, enough_s: float) -> float:
    """Returns the least processor time of several trials, infinite if the library gives up.

    Args:
        enough_s: no further trial is made when one took no longer.
    """
    text, taken_s = "a" + unit * (num_chars // len(unit)) + end, math.inf
    for _ in range(NUM_TRIALS):
        began_s = time.thread_time()
        try:
            split.pre_tokenize_str(text)
        except BaseException as error:
            if not has_given_up(error):
                raise
            return math.inf
        taken_s = min(taken_s, time.thread_time() - began_s)
        if taken_s <= enough_s:
            break
    return taken_s


def has_given_up(error: BaseException) -> bool:
    """Whether an error of the library, which is no `Exception`, says that an expression took too many steps."""
    return type(error).__name__ == "PanicException" and "retry-limit" in str(error)


def _refusal() -> ModelError:
    return ModelError(
        "an expression in this model's tokenizer.json (pre_tokenizer or normalizer) takes so many steps on some texts that one "
        "short prompt would stop the server; use another copy of the tokenizer, or write the expression without repetitions "
        "inside repetitions, such as (\\s+)+ (docs/tokenizers.md)"
    )
