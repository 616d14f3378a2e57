"""How good heads are: the rank that each gives to the token that the model goes on with, at held-out places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from cloister.backends.base import IntArray
from cloister.train.heads import HeadsModule
from cloister.train.hidden_states import HiddenStates, find_targets
from cloister.train.teacher import Teacher, read_rows
from cloister.train.tree import MISSED, NOTHING_THERE, RankArray

NUM_RANKS: Final = 10
"""Ranks that are told apart; a tree is no wider."""
MOST_PLACES: Final = 20_000
_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one head at some places.

    Attributes:
        source: "answers" that the model wrote itself, or "text".
        head: from 1; head k guesses the k-th token behind the next one.
        top1, top5: share of places at which its best guess, or one of its best five, was right.
    """

    source: str
    head: int
    top1: float
    top5: float
    num_places: int


@torch.no_grad()
def measure_ranks(
    heads: HeadsModule,
    num_heads: int,
    teacher: Teacher,
    places: HiddenStates,
    choices: IntArray,
    advance: Callable[[int], object],
) -> tuple[RankArray, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Returns the rank of the model's token for each head at held-out places, and which of them are in answers of its own.

    Returns:
        ([num_places, num_heads] int16, `MISSED` where it is not among the first `NUM_RANKS` and `NOTHING_THERE` where the
        passage ends before; [num_places] bool).
    """
    rows = places.having(1, held_out=True)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_PLACES)).astype(np.int64)]
    ranks = np.empty((len(rows), num_heads), np.int16)
    for start in range(0, len(rows), _ROWS):
        some = rows[start : start + _ROWS]
        guesses = heads(read_rows(places, some).float())
        targets = find_targets(places, choices, some, num_heads)
        for head in range(num_heads):
            best = teacher.logits(guesses[head]).topk(min(NUM_RANKS, len(teacher.weight))).indices.numpy()
            hits = best == targets[head][:, None]
            found = np.where(hits.any(1), hits.argmax(1), MISSED)
            ranks[start : start + len(some), head] = np.where(targets[head] < 0, NOTHING_THERE, found)
        advance(len(some))
    return ranks, places.is_own[rows]


def summarise(ranks: RankArray, is_own: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Accuracy]:
    """Returns the accuracy of every head, in the model's answers and in text, of those that there are."""
    found = []
    for source, chosen in (("answers", is_own), ("text", ~is_own)):
        if not chosen.any():
            continue
        for head, whole in enumerate(ranks[chosen].T, 1):
            column = whole[whole != NOTHING_THERE]
            if not len(column):
                continue
            top1, top5 = float((column == 0).mean()), float(((column >= 0) & (column < 5)).mean())
            found.append(Accuracy(source, head, round(top1, 4), round(top5, 4), len(column)))
    return found
