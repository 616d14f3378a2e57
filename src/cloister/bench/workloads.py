"""Workloads from traces: requests with prompts, output lengths and arrival times. Seeded, so they are reproducible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from cloister.bench.settings import ArrivalsConfig, WorkloadConfig
from cloister.bench.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRow, read_trace
from cloister.types.errors import ConfigError

Arrivals = Literal["recorded", "poisson", "burst"]

FIRST_TOKEN_ID = 32
"""Random prompts use ids from here on: a tokenizer's special tokens often come first."""

DEFAULT_VOCAB_SIZE = 2048
"""Default upper bound of ids in random prompts: every supported model has as many."""


PREFIX_PART = 16
"""Granularity in tokens at which prompts are compared for shared prefixes."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to send.

    Attributes:
        arrival_s: seconds from the start of the run.
        prompt: token ids, or text where the trace has it.
        num_input_tokens: 0 for text.
    """

    arrival_s: float
    prompt: list[int] | str
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Items in order of arrival, with their origin.

    Attributes:
        num_skipped: rows left out because prompt and answer are longer than the context window.
    """

    name: str
    items: tuple[WorkItem, ...]
    num_skipped: int = 0

    def count_repeated(self) -> float:
        """Returns the share of prompt tokens, 0 to 1, that an initially empty prefix cache would find.

        For text it is the share of characters, as if each were a token.
        """
        seen: set[int] = set()
        num_repeated = num_all = 0
        for item in self.items:
            known, key = True, 0
            num_all += len(item.prompt)
            for start in range(0, len(item.prompt), PREFIX_PART):
                part = item.prompt[start : start + PREFIX_PART]
                key = hash((key, part if isinstance(part, str) else tuple(part)))
                known = known and key in seen
                num_repeated += len(part) if known else 0
                seen.add(key)
        return num_repeated / max(1, num_all)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to convert a trace to a workload.

    Attributes:
        arrivals: as recorded, a Poisson process of `rate`, or all at once.
        rate: requests per second; recorded times are stretched or squeezed to it.
        scale: factor on every length; a length is at least 1.
        max_model_len: requests longer than this (after scaling) are left out and counted.
    """

    arrivals: Arrivals = "recorded"
    rate: float | None = None
    num_requests: int | None = None
    scale: Fraction = Fraction(1)
    max_model_len: int | None = None
    vocab_size: int = DEFAULT_VOCAB_SIZE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arrivals == "poisson" and self.rate is None:
            raise ConfigError("Poisson arrivals need a rate; give --rate in requests per second", param="rate")
        if self.arrivals == "burst" and self.rate is not None:
            raise ConfigError("a burst has no rate; leave --rate out or choose --arrivals poisson", param="rate")
        if self.rate is not None and self.rate <= 0:
            raise ConfigError("the rate must be above 0 requests per second", param="rate")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError("the number of requests must be at least 1", param="num_requests")
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ConfigError(f"the vocabulary must have more than {FIRST_TOKEN_ID} ids", param="vocab_size")


def load_workload(
    work: WorkloadConfig, arrivals: ArrivalsConfig, *, max_model_len: int | None = None, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> Workload:
    """Reads the trace that the settings name, or generates requests of one length, and builds the workload.

    Raises:
        ConfigError: the settings or the trace cannot be used.
    """
    if work.trace is None:
        rows = (TraceRow(None, work.input_tokens, work.output_tokens),) * work.num_requests
        trace = Trace(f"{work.input_tokens}+{work.output_tokens}", rows)
    else:
        trace = read_trace(Path(work.trace).expanduser())
    recipe = Recipe(
        arrivals=cast(Arrivals, arrivals.arrivals) or _choose_arrivals(trace, arrivals.rate),
        rate=arrivals.rate,
        num_requests=work.num_requests,
        scale=parse_scale(work.scale_lengths),
        max_model_len=min((n for n in (work.max_request_tokens, max_model_len) if n is not None), default=None),
        vocab_size=min(vocab_size, DEFAULT_VOCAB_SIZE),
        seed=work.seed,
    )
    return build_workload(trace, recipe)


def parse_scale(text: str) -> Fraction:
    """Reads a factor such as `1/16` or `0.5`.

    Raises:
        ConfigError: it is not a number, or not above 0.
    """
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if scale <= 0:
        raise ConfigError("the length scale must be a number or fraction above 0, such as 1/16", param="scale_lengths")
    return scale


def build_workload(trace: Trace, recipe: Recipe) -> Workload:
    """Converts a trace to a workload.

    Raises:
        ConfigError: recorded arrivals are requested from a trace without, or no request fits.
    """
    fitting = [row for row in trace.rows if _fits(row, recipe)]
    rows = fitting[: recipe.num_requests]
    if not rows:
        raise ConfigError(
            f"no request of {trace.name} fits into {recipe.max_model_len} tokens; shorten them with --scale-lengths"
        )
    times = make_arrivals(trace, rows, recipe)
    pairs = enumerate(zip(rows, times, strict=True))
    items = tuple(_make_item(number, row, time_s, recipe) for number, (row, time_s) in pairs)
    return Workload(trace.name, items, num_skipped=len(trace.rows) - len(fitting))


def _choose_arrivals(trace: Trace, rate: float | None) -> Arrivals:
    if trace.has_arrivals:
        return "recorded"
    return "burst" if rate is None else "poisson"


def make_arrivals(trace: Trace, rows: Sequence[TraceRow], recipe: Recipe) -> list[float]:
    """Returns arrival times of `rows` in seconds from the first one, never decreasing."""
    if recipe.arrivals == "burst":
        return [0.0] * len(rows)
    if recipe.arrivals == "poisson":
        assert recipe.rate is not None
        gaps = np.random.default_rng([recipe.seed, 1]).exponential(1 / recipe.rate, len(rows))
        return [float(t) for t in np.cumsum(gaps) - gaps[0]]
    times = [row.arrival_s for row in rows if row.arrival_s is not None]
    if len(times) < len(rows):
        raise ConfigError(f"{trace.name} has no arrival times; choose --arrivals poisson --rate R or --arrivals burst")
    return _stretch([time_s - times[0] for time_s in times], recipe.rate)


def make_tokens(key: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Returns `num_tokens` random token ids; the same for the same `key`."""
    ids: npt.NDArray[np.int64] = np.random.default_rng(list(key)).integers(FIRST_TOKEN_ID, vocab_size, num_tokens)
    return [int(i) for i in ids]


def make_shared_prompt(hash_ids: Sequence[int], num_tokens: int, recipe: Recipe) -> list[int]:
    """Returns a prompt whose blocks correspond to `hash_ids`: equal leading ids give equal leading tokens."""
    block_tokens = max(1, scale_length(MOONCAKE_BLOCK_TOKENS, recipe.scale))
    blocks = (make_tokens((recipe.seed, 2, block), block_tokens, recipe.vocab_size) for block in hash_ids)
    return [token for block in blocks for token in block][:num_tokens]


def scale_length(num_tokens: int, scale: Fraction) -> int:
    """Returns a length times the scale, rounded up, at least 1."""
    return max(1, math.ceil(num_tokens * scale))


def iter_lengths(rows: Sequence[TraceRow], scale: Fraction) -> Iterator[tuple[int, int]]:
    """Yields (input, output) lengths after scaling."""
    return ((scale_length(r.num_input_tokens, scale), scale_length(r.num_output_tokens, scale)) for r in rows)


def _fits(row: TraceRow, recipe: Recipe) -> bool:
    if recipe.max_model_len is None:
        return True
    (lengths,) = iter_lengths([row], recipe.scale)
    return sum(lengths) <= recipe.max_model_len


def _stretch(times: list[float], rate: float | None) -> list[float]:
    if rate is None or times[-1] <= 0:
        return times
    factor = (len(times) - 1) / rate / times[-1]
    return [time_s * factor for time_s in times]


def _make_item(number: int, row: TraceRow, arrival_s: float, recipe: Recipe) -> WorkItem:
    num_output = scale_length(row.num_output_tokens, recipe.scale)
    if row.prompt is not None:
        return WorkItem(arrival_s, row.prompt, 0, num_output)
    num_input = scale_length(row.num_input_tokens, recipe.scale)
    if row.hash_ids:
        prompt = make_shared_prompt(row.hash_ids, num_input, recipe)
    else:
        prompt = make_tokens((recipe.seed, 4, number), num_input, recipe.vocab_size)
    return WorkItem(arrival_s, prompt, len(prompt), num_output)
