"""Two classifiers of captures: boosted trees over what can be counted, and a small network over the row of chunks.

Both are asked with five-fold cross-validation in which no source file is in training and test at once, so that what they know
is the topic. The score is the area under the ROC curve of all answers, each judged by a model that never saw its file; its
bounds come from resampling whole files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import lightgbm
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold

from benchmarks.traffic.captures import Capture

NUM_CHUNKS: Final = 128
"""Chunks of an answer that are looked at."""
NUM_KINDS: Final = 16
"""Sizes above the smallest that are told apart; a chunk of one token differs by the letters of its text."""
NUM_FOLDS: Final = 5
NUM_RESAMPLES: Final = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """Area under the ROC curve, and the bounds of its 95% interval."""

    auc: float
    low: float
    high: float


def score(name: str, captures: Sequence[Capture], seed: int) -> Score:
    """Returns how well a classifier (`trees` or `network`) tells the two classes apart."""
    labels = np.array([capture.label for capture in captures])
    groups = np.array([capture.group for capture in captures])
    features = count_features(captures) if name == "trees" else make_channels(captures)
    judge = judge_by_trees if name == "trees" else judge_by_network
    judged = np.zeros(len(labels))
    folds = StratifiedGroupKFold(NUM_FOLDS, shuffle=True, random_state=seed)
    for train, test in folds.split(features, labels, groups):
        judged[test] = judge(features[train], labels[train], features[test], seed)
    low, high = _resample(labels, judged, groups, seed)
    return Score(float(roc_auc_score(labels, judged)), low, high)


def make_rows(captures: Sequence[Capture]) -> Floats:
    """Returns [num_captures, 2, NUM_CHUNKS]: sizes and logarithms of gaps (s), zero where there is no chunk."""
    rows = np.zeros((len(captures), 2, NUM_CHUNKS))
    for row, capture in zip(rows, captures, strict=True):
        n = min(len(capture.sizes), NUM_CHUNKS)
        row[0, :n] = capture.sizes[:n]
        row[1, :n] = np.log(np.maximum(np.diff(capture.times_s[:n], prepend=0.0), 1e-6))
    return rows


def make_channels(captures: Sequence[Capture]) -> Floats:
    """Returns [num_captures, NUM_KINDS + 1, NUM_CHUNKS]: a 1 at each chunk's kind of size, and the logarithm of its gap."""
    rows = make_rows(captures)
    channels = np.zeros((len(captures), NUM_KINDS + 1, NUM_CHUNKS))
    kinds = np.clip(rows[:, 0] - _smallest(captures), 0, NUM_KINDS - 1).astype(int)
    for kind in range(NUM_KINDS):
        channels[:, kind] = (kinds == kind) & (rows[:, 0] > 0)
    channels[:, NUM_KINDS] = rows[:, 1]
    return channels


def _smallest(captures: Sequence[Capture]) -> int:
    """Returns the usual size of a chunk of one short token; the end of a stream is smaller."""
    return int(np.median([np.percentile(capture.sizes, 5) for capture in captures]))


def count_features(captures: Sequence[Capture]) -> Floats:
    """Returns the rows themselves and counts over each answer: chunks, bytes, seconds, quantiles, sizes by one and by two."""
    rows = make_rows(captures)
    steps = np.linspace(0, 1, 11)
    smallest = _smallest(captures)
    counted = []
    for capture in captures:
        sizes, gaps = np.array(capture.sizes), np.diff(capture.times_s, prepend=0.0)
        kinds = np.clip(sizes - smallest, 0, NUM_KINDS - 1)
        one = np.bincount(kinds, minlength=NUM_KINDS) / len(kinds)
        two = np.bincount(kinds[:-1] * NUM_KINDS + kinds[1:], minlength=NUM_KINDS**2) / len(kinds)
        totals = [len(sizes), sizes.sum(), capture.times_s[0], capture.times_s[-1]]
        counted.append(np.concatenate([totals, np.quantile(sizes, steps), np.quantile(gaps, steps), one, two]))
    return np.concatenate([rows.reshape(len(rows), -1), np.array(counted)], axis=1)


def judge_by_trees(train: Floats, labels: NDArray[np.int64], test: Floats, seed: int) -> Floats:
    """Returns the probability of class 1 for each row of `test`."""
    settings = {
        "objective": "binary", "learning_rate": 0.1, "num_leaves": 31, "feature_fraction": 0.3, "bagging_fraction": 0.8,
        "bagging_freq": 1, "num_threads": 1, "seed": seed, "verbosity": -1,
    }  # fmt: skip
    model = lightgbm.train(settings, lightgbm.Dataset(train, labels), num_boost_round=100)
    return np.asarray(model.predict(test), dtype=np.float64)


def judge_by_network(train: Floats, labels: NDArray[np.int64], test: Floats, seed: int) -> Floats:
    """As `judge_by_trees`. Every channel is brought to mean 0 and deviation 1 as it is in `train`."""
    torch.manual_seed(seed)
    mean, deviation = train.mean((0, 2), keepdims=True), train.std((0, 2), keepdims=True) + 1e-3
    inputs = torch.tensor((train - mean) / deviation, dtype=torch.float32)
    wanted = torch.tensor(labels, dtype=torch.float32)
    network = _make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.01)
    num_epochs, batch = 8, 128
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=num_epochs * -(-len(inputs) // batch))
    for _ in range(num_epochs):
        for picked in torch.randperm(len(inputs)).split(batch):  # type: ignore[no-untyped-call]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(network(inputs[picked]).squeeze(1), wanted[picked])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    network.eval()
    with torch.no_grad():
        judged = network(torch.tensor((test - mean) / deviation, dtype=torch.float32)).squeeze(1)
    return np.asarray(judged.numpy(), dtype=np.float64)


def _make_network() -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    channels = NUM_KINDS + 1
    for width in (16, 24, 32):
        layers += [
            torch.nn.Conv1d(channels, width, 5, padding=2),
            torch.nn.BatchNorm1d(width),
            torch.nn.ReLU(),
            torch.nn.MaxPool1d(2),
        ]
        channels = width
    layers += [torch.nn.AdaptiveAvgPool1d(4), torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(channels * 4, 1)]
    return torch.nn.Sequential(*layers)


def _resample(labels: NDArray[np.int64], judged: Floats, groups: NDArray[np.str_], seed: int) -> tuple[float, float]:
    """Returns the 2.5th and the 97.5th percentile of the score over files drawn with replacement."""
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(groups == name) for name in np.unique(groups)]
    scores = []
    for _ in range(NUM_RESAMPLES):
        picked = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
        if len(set(labels[picked])) == 2:
            scores.append(roc_auc_score(labels[picked], judged[picked]))
    return float(np.percentile(scores, 2.5)), float(np.percentile(scores, 97.5))
