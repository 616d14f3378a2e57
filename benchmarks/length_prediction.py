"""How well are lengths of answers predicted from public features, and does LightGBM predict them better than counting does?

`python -m benchmarks.length_prediction TRACE...` takes each trace in order. The survival curves of `cluster.lengths` predict
every answer before they learn it. LightGBM is trained on the first half, and once more with each fifth of the second half
that is over, so that it knows the recent past too. Both are judged on the second half.
"""

from __future__ import annotations

import argparse
import bisect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloister.bench.traces import TraceRow, read_trace
from cloister.cluster.lengths import LengthCurves
from cloister.types.request import Request, SamplingParams

NUM_PARTS: Final = 5
MAX_MODEL_LEN: Final = 1 << 20
"""No answer of a trace is cut off."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was predicted of one answer: quantiles, and the mean (NaN if the method has none)."""

    p50: float
    p90: float
    mean: float


def request_of(row: TraceRow) -> Request:
    """Returns a request with the features of a row: traces have the length of the prompt and no others."""
    return Request(request_id="r", token_ids=[0] * max(1, row.num_input_tokens), sampling=SamplingParams())


def by_curves(rows: Sequence[TraceRow]) -> list[Prediction]:
    """Predicts each answer before it is learned."""
    curves = LengthCurves(MAX_MODEL_LEN)
    predictions = []
    for row in rows:
        request = request_of(row)
        predictions.append(Prediction(curves.quantile(request, 0.5), curves.quantile(request, 0.9), curves.expect(request)))
        curves.learn(request, row.num_output_tokens, is_whole=True)
    return predictions[len(rows) // 2 :]


def by_all_answers(rows: Sequence[TraceRow]) -> list[Prediction]:
    """Knows no feature: quantiles and mean of all answers so far."""
    seen: list[int] = []
    total, predictions = 0, []
    for row in rows:
        if seen:
            p50, p90 = (float(seen[min(len(seen) - 1, int(share * len(seen)))]) for share in (0.5, 0.9))
            predictions.append(Prediction(p50, p90, total / len(seen)))
        else:
            predictions.append(Prediction(0.0, 0.0, 0.0))
        bisect.insort(seen, row.num_output_tokens)
        total += row.num_output_tokens
    return predictions[len(rows) // 2 :]


def by_trees(rows: Sequence[TraceRow]) -> list[Prediction]:
    """Boosted trees (LightGBM) for each quantile and the mean, on the length of the prompt and what is known of the last
    answers."""
    features, lengths = count_features(rows), np.array([row.num_output_tokens for row in rows], dtype=np.float64)
    half = len(rows) // 2
    starts = np.linspace(half, len(rows), NUM_PARTS + 1).astype(int)
    predictions: list[Prediction] = []
    for start, end in pairwise(starts):
        columns = [fit_trees(features[:start], lengths[:start], share)(features[start:end]) for share in (0.5, 0.9, None)]
        predictions += [Prediction(*map(float, row)) for row in np.stack(columns, axis=1)]
    return predictions


def fit_trees(
    features: NDArray[np.float64], lengths: NDArray[np.float64], share: float | None
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Returns what predicts a quantile, or the mean, after training."""
    import lightgbm

    settings: dict[str, object] = {"num_leaves": 15, "learning_rate": 0.05, "min_data_in_leaf": 40, "num_threads": 1, "seed": 1}
    settings |= {"verbosity": -1, "deterministic": True}
    settings |= {"objective": "regression"} if share is None else {"objective": "quantile", "alpha": share}
    model = lightgbm.train(settings, lightgbm.Dataset(features, lengths), num_boost_round=150)
    return lambda rows: np.maximum(1.0, np.asarray(model.predict(rows), dtype=np.float64))


def count_features(rows: Sequence[TraceRow]) -> NDArray[np.float64]:
    """Returns [num_rows, 4]: length of the prompt, seconds since the last request, mean of the last 20 and 200 answers."""
    lengths = np.array([row.num_output_tokens for row in rows], dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(lengths)])
    counted = []
    for i, row in enumerate(rows):
        since_s = 0.0 if i == 0 or row.arrival_s is None else row.arrival_s - (rows[i - 1].arrival_s or 0.0)
        means = [(sums[i] - sums[max(0, i - n)]) / max(1, min(i, n)) for n in (20, 200)]
        counted.append([float(row.num_input_tokens), since_s, *means])
    return np.array(counted)


METHODS: Final[dict[str, Callable[[Sequence[TraceRow]], list[Prediction]]]] = {
    "all answers": by_all_answers,
    "curves": by_curves,
    "LightGBM": by_trees,
}


def report_accuracy(paths: Sequence[Path]) -> None:
    """Prints a row for each trace and method."""
    print("| trace | answers judged | method | error of P50 | error of the mean | right size class | <= P50 | <= P90 |")
    print("|---|---|---|---|---|---|---|---|")
    for path in paths:
        trace = read_trace(path)
        actual = [row.num_output_tokens for row in trace.rows][len(trace.rows) // 2 :]
        for name, predict in METHODS.items():
            found = predict(trace.rows)
            median_error, mean_error = (
                statistics.fmean(abs(length - getattr(one, what)) for length, one in zip(actual, found, strict=True))
                for what in ("p50", "mean")
            )
            pairs = list(zip(actual, found, strict=True))
            right = statistics.fmean(length.bit_length() == int(one.p50).bit_length() for length, one in pairs)
            under = [statistics.fmean(length <= getattr(one, what) for length, one in pairs) for what in ("p50", "p90")]
            print(
                f"| {trace.name} | {len(actual)} | {name} | {median_error:.1f} | {mean_error:.1f} | {right:.0%} "
                f"| {under[0]:.0%} | {under[1]:.0%} |",
                flush=True,
            )


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    given = parser.parse_args()
    report_accuracy(given.traces)


if __name__ == "__main__":
    main()
