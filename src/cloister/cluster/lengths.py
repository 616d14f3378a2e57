"""Predicts the lengths of answers from request parameters, never from text. Pure: no clock, no I/O.

Lengths are learned as survival curves (Kaplan and Meier 1958): an answer that was cut off, by `max_tokens` or because its
client left, counts as censored. The prediction for an answer that already has some tokens is its mean residual life, which
grows with them if lengths have a heavy tail. (decisions/0027)
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp
from typing import Final, Protocol

from cloister.engine.replica_snapshot import LengthErrors, RequestSnapshot
from cloister.types.events import Ended
from cloister.types.request import FinishReason, Request

EDGES: Final = tuple(sorted({0, *(round(2 ** (i / 4)) for i in range(81))}))
"""Lengths at which a curve is known: four for each doubling, up to 2^20 tokens. Between them it is straight."""
NUM_BINS: Final = len(EDGES) - 1
PROMPT_SIZES: Final = tuple(sorted({round(2 ** (i / 8)) for i in range(161)}))
"""Bounds of lengths that are about the same: eight for each doubling."""
FIRST_GUESS_TOKENS: Final = 256.0
"""Mean length before the first answer; it weighs as much as one."""
FIRST_HAZARDS: Final = [1.0 - exp((low - high) / FIRST_GUESS_TOKENS) for low, high in pairwise(EDGES)]
NUM_SHARED: Final = 3.0
"""Weight of a larger group's curve in that of a smaller one, in answers."""
HALF_LIFE: Final = 2000
"""Number of answers after which an answer weighs half: workloads change."""
REFRESH_EVERY: Final = 16
"""Number of answers after which curves are recomputed; before that many, after each."""

KEEP_TOKENS: Final = 8
"""Number of tokens for which a prediction is cached: routers ask for all answers again and again."""

Group = tuple[int, ...]


class LengthPredictor(Protocol):
    """Predicts the lengths of answers. It may be wrong by any factor: its users must remain correct."""

    def expect(self, request: Request, num_done: int = 0) -> float:
        """Returns how many tokens an answer is expected to get beyond the `num_done` that it has."""
        ...

    def quantile(self, request: Request, share: float) -> float:
        """Returns the length that an answer does not exceed with this probability."""
        ...

    def learn(self, request: Request, num_tokens: int, *, is_whole: bool) -> None:
        """Takes an answer that has ended into account; `is_whole`: the model ended it."""
        ...


def groups_of(request: Request) -> tuple[Group, Group, Group]:
    """Returns the groups of requests that this one is like, each inside the one before it: all, those with a prompt of at most
    twice its length, and those with one of about its length; in both, whether it has a grammar, has stop strings, is sampled.
    Never its text, tenant, key or adapter."""
    sampling, num_tokens = request.sampling, len(request.token_ids)
    is_stopped, is_masked = bool(sampling.stop or sampling.stop_token_ids), sampling.grammar is not None
    flags = int(is_masked), int(is_stopped), int(sampling.temperature > 0.0)
    return (), (num_tokens.bit_length(), *flags), (num_tokens.bit_length(), bisect_left(PROMPT_SIZES, num_tokens), *flags)


class LengthCurves:
    """Learns survival curves of groups of requests. The curve of a group begins as that of the larger one around it.

    Args:
        max_model_len: prompt and answer together, in tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._lengths: dict[Group, _Lengths] = {}
        self._hazards: dict[Group, list[float]] = {}
        self._curves: dict[Group, _Curve] = {}
        self._num_learned = 0

    def expect(self, request: Request, num_done: int = 0) -> float:
        """As `LengthPredictor.expect`."""
        limit = self._limit(request)
        if num_done >= limit:
            return 0.0
        if _is_fixed(request):
            return float(limit - num_done)
        expected = self._curve(request).residual(num_done, limit)
        return min(float(limit - num_done), max(1.0, request.sampling.min_tokens - num_done, expected))

    def quantile(self, request: Request, share: float) -> float:
        """As `LengthPredictor.quantile`."""
        limit = self._limit(request)
        if _is_fixed(request):
            return float(limit)
        return min(float(limit), max(request.sampling.min_tokens, self._curve(request).quantile(share)))

    def learn(self, request: Request, num_tokens: int, *, is_whole: bool) -> None:
        """As `LengthPredictor.learn`."""
        if num_tokens < 1 or _is_fixed(request):
            return
        for group in groups_of(request):
            self._lengths.setdefault(group, _Lengths()).add(num_tokens, is_whole=is_whole)
        self._num_learned += 1
        if self._num_learned < REFRESH_EVERY or self._num_learned % REFRESH_EVERY == 0:
            self._hazards.clear()
            self._curves.clear()

    def _limit(self, request: Request) -> int:
        if request.pooling is not None:
            return 0
        room = max(0, self._max_model_len - len(request.token_ids))
        most = request.sampling.max_tokens
        return room if most is None else min(room, most)

    def _curve(self, request: Request) -> _Curve:
        groups = groups_of(request)
        curve = self._curves.get(groups[-1])
        if curve is None:
            hazards, weight = FIRST_HAZARDS, 1.0
            for group in groups:
                hazards = self._hazards_of(group, hazards, weight)
                weight = NUM_SHARED
            curve = self._curves[groups[-1]] = _Curve(hazards)
        return curve

    def _hazards_of(self, group: Group, around: list[float], weight: float) -> list[float]:
        if group not in self._lengths:
            return around
        if group not in self._hazards:
            self._hazards[group] = self._lengths[group].hazards(around, weight)
        return self._hazards[group]


def _is_fixed(request: Request) -> bool:
    """Whether nothing but `max_tokens` can end an answer."""
    sampling = request.sampling
    return sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids or sampling.grammar)


class _Lengths:
    """Counts of answers by length; older ones weigh less."""

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_BINS
        self._cut = [0.0] * NUM_BINS
        self._weight = 1.0

    def add(self, num_tokens: int, *, is_whole: bool) -> None:
        """Counts an answer: one that ended, or one that was cut off."""
        counts = self._ended if is_whole else self._cut
        counts[min(bisect_left(EDGES, num_tokens) - 1, NUM_BINS - 1)] += self._weight
        self._weight *= 2 ** (1 / HALF_LIFE)
        if self._weight > 1e9:  # only ratios count
            self._ended = [count / self._weight for count in self._ended]
            self._cut = [count / self._weight for count in self._cut]
            self._weight = 1.0

    def hazards(self, shared: list[float], num_shared: float) -> list[float]:
        """Returns for each bin the probability that an answer which reaches it ends in it: what was counted, and `shared` as
        `num_shared` more answers."""
        hazards, num_longer = [0.0] * NUM_BINS, 0.0
        for i in range(NUM_BINS - 1, -1, -1):
            ended = self._ended[i] / self._weight
            cut = self._cut[i] / self._weight
            num_reaching = num_longer + ended + cut / 2  # the actuarial estimate: they were there for half of the bin
            hazards[i] = (ended + num_shared * shared[i]) / (num_reaching + num_shared)
            num_longer += ended + cut
        return hazards


class _Curve:
    """Survival curve: the probability that an answer is longer than a number of tokens, and its integral."""

    def __init__(self, hazards: list[float]) -> None:
        self._survival, self._area = [1.0], [0.0]
        for i, hazard in enumerate(hazards):
            before = self._survival[-1]
            after = before * (1.0 - hazard)
            self._survival.append(after)
            self._area.append(self._area[-1] + (EDGES[i + 1] - EDGES[i]) * (before + after) / 2)

    def residual(self, num_done: int, limit: int) -> float:
        """Returns the mean of what an answer of `num_done` tokens still gets, if it ends at `limit` at the latest."""
        survival, area = self._at(num_done)
        return (self._at(limit)[1] - area) / survival if survival > 1e-12 else 1.0

    def quantile(self, share: float) -> float:
        """Returns the length, in whole tokens, that is not exceeded with probability `share`."""
        target = 1.0 - share
        i = next((i for i, survival in enumerate(self._survival) if survival <= target), NUM_BINS)
        before, after = self._survival[i - 1], self._survival[i]
        part = 1.0 if before <= after else min(1.0, (before - target) / (before - after))
        return float(ceil(EDGES[i - 1] + part * (EDGES[i] - EDGES[i - 1])))

    def _at(self, length: int) -> tuple[float, float]:
        """Returns survival and area at a length."""
        i = min(max(0, bisect_left(EDGES, length) - 1), NUM_BINS - 1)
        low, high = EDGES[i], EDGES[i + 1]
        part = min(1.0, (length - low) / (high - low))
        before, after = self._survival[i], self._survival[i + 1]
        survival = before + part * (after - before)
        return survival, self._area[i] + part * (high - low) * (before + survival) / 2


class LengthForecasts:
    """Length predictions for the requests in flight, and their errors.

    Attributes:
        errors: of the answers that have ended.
    """

    def __init__(self, predictor: LengthPredictor) -> None:
        self.errors = LengthErrors()
        self._predictor = predictor
        self._open: dict[str, _Forecast] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def add(self, request: Request) -> None:
        """Predicts the answers of a request that was accepted."""
        mean, p90 = self._predictor.expect(request), self._predictor.quantile(request, 0.9)
        self._open[request.request_id] = _Forecast(request, mean, p90, 0, mean)

    def end(self, event: Ended) -> None:
        """Learns from an answer that has ended."""
        found = self._open.pop(event.request_id, None) if event.last else self._open.get(event.request_id)
        if found is None:
            return
        is_whole = event.reason is FinishReason.STOP
        if is_whole:
            self.errors.num_answers += 1
            self.errors.num_tokens += event.num_output_tokens
            self.errors.num_error_tokens += abs(event.num_output_tokens - found.mean)
            self.errors.num_above_p90 += event.num_output_tokens > found.p90
        self._predictor.learn(found.request, event.num_output_tokens, is_whole=is_whole)

    def remaining(self, progress: RequestSnapshot) -> float:
        """Returns how many tokens a request is expected to get yet, in all its open answers: at least one in each."""
        found = self._open.get(progress.request_id)
        if found is None or not progress.num_sequences:
            return 0.0
        num_done = progress.num_output_tokens // progress.num_sequences
        if not found.expected_at <= num_done < found.expected_at + KEEP_TOKENS:
            found.expected_at, found.expected = num_done, self._predictor.expect(found.request, num_done)
        return progress.num_sequences * max(1.0, found.expected - (num_done - found.expected_at))


@dataclass(slots=True)
class _Forecast:
    """What was predicted of the answers of a request: at its arrival, and last, when they had `expected_at` tokens."""

    request: Request
    mean: float
    p90: float
    expected_at: int
    expected: float
