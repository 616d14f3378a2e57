"""Which of 50 prompts was asked: random forests over what passes of an answer.

The attack of Wei et al. (2024, When Speculation Spills Secrets, section 4): the attacker asks each prompt some times, keeps how
many tokens each packet brought, and compares. Here it has sizes to the byte and times; accepted drafts are in one packet with
the token after them, and make it larger, later and fewer packets. Five-fold cross-validation over
answers: who tells prompts apart has seen other answers to the same prompts, as there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import StratifiedKFold

from benchmarks.traffic.captures import Capture

VIEWS: Final = ("sizes and times", "times", "number of chunks")
NUM_CHUNKS: Final = 96
NUM_FOLDS: Final = 5
NUM_TREES: Final = 100
LEVEL: Final = 1.96

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Share:
    """A share of answers whose prompt was found, and its 95% interval (Wilson 1927)."""

    found: int
    total: int

    @property
    def share(self) -> float:
        return self.found / self.total

    @property
    def bounds(self) -> tuple[float, float]:
        n, p, z = self.total, self.share, LEVEL
        centre, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (centre - width) / (1 + z * z / n), (centre + width) / (1 + z * z / n)


def find_prompts(captures: Sequence[Capture], view: str, seed: int, num_threads: int = 1) -> Share:
    """Returns how many answers a forest finds the prompt of, seeing only what `view` (of `VIEWS`) names."""
    labels = np.array([capture.label for capture in captures])
    features = make_features(captures, view)
    folds = StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=seed)
    num_found = 0
    for train, test in folds.split(features, labels):
        forest = RandomForestClassifier(NUM_TREES, max_features="sqrt", n_jobs=num_threads, random_state=seed)
        forest.fit(features[train], labels[train])
        num_found += int((forest.predict(features[test]) == labels[test]).sum())
    return Share(num_found, len(labels))


def make_features(captures: Sequence[Capture], view: str) -> Floats:
    """Returns one row an answer: what each chunk shows, in order, and counts and quantiles over all chunks."""
    rows = []
    for capture in captures:
        sizes, gaps = np.array(capture.sizes, dtype=np.float64), np.diff(capture.times_s, prepend=0.0)
        number = np.array([float(len(sizes))])
        columns = {"sizes and times": (sizes, gaps), "times": (gaps,), "number of chunks": (number,)}[view]
        rows.append(np.concatenate([_describe(column) for column in columns]))
    return np.array(rows)


def _describe(column: Floats) -> Floats:
    row = np.zeros(NUM_CHUNKS)
    row[: min(len(column), NUM_CHUNKS)] = column[:NUM_CHUNKS]
    totals = [len(column), column.sum(), column.mean(), column.std()]
    return np.concatenate([row, totals, np.quantile(column, np.linspace(0, 1, 11))])
