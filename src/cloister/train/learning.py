"""How heads learn: each guesses what the model itself would go on with at its place, the model's weights frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cloister.backends.base import IntArray
from cloister.train.checkpoints import Checkpoints, step_generator
from cloister.train.heads import HeadsModule
from cloister.train.hidden_states import HiddenStates, RowArray, TargetArray, find_targets
from cloister.train.optimizer import Optimizer, Schedule
from cloister.train.teacher import Teacher, read_rows

FARTHER: Final = 0.8
"""What a head's loss counts for, of that of the head before it (Cai et al. 2024, section 2.2.1)."""
OWN_SHARE: Final = 0.75
"""Of the places in a step, where the model wrote a part of the passages itself: that is what heads will draft."""
CHECKPOINT_EVERY: Final = 200


@dataclass(frozen=True, slots=True)
class Lesson:
    """How long and how quickly heads learn.

    Attributes:
        steps: of `rows` places each.
        rate: learning rate at its peak.
    """

    steps: int
    rows: int
    rate: float
    seed: int


def learn(
    heads: HeadsModule,
    num_heads: int,
    teacher: Teacher,
    places: HiddenStates,
    choices: IntArray,
    lesson: Lesson,
    checkpoint: Path,
    advance: Callable[[int, float], object],
) -> None:
    """Trains heads on every place that is not held out; goes on from a checkpoint if there is one.

    Args:
        choices: what the model would go on with behind each place, [num_places].
        advance: told the steps done since it was last told, and the loss in nats for each token.
    """
    candidates = places.having(1, held_out=False)
    is_own = places.is_own[candidates]
    own, others = candidates[is_own], candidates[~is_own]
    schedule = Schedule(lesson.rate, min(50, lesson.steps // 10), lesson.steps, decay=0.6)
    optimizer = Optimizer(heads, schedule, weight_decay=0.0)
    checkpoints = Checkpoints(checkpoint, CHECKPOINT_EVERY)
    first = checkpoints.restore(heads, optimizer)
    advance(first, float("nan"))
    for step in range(first, lesson.steps):
        rows = _draw(own, others, lesson.rows, step_generator(lesson.seed, step))
        loss = _teach(heads, teacher, read_rows(places, rows), find_targets(places, choices, rows, num_heads))
        optimizer.step(step)
        advance(1, loss)
        if (step + 1) % checkpoints.every == 0:
            checkpoints.save(step + 1, heads, optimizer)


def _draw(own: RowArray, others: RowArray, count: int, generator: torch.Generator) -> RowArray:
    """Returns the places of one step."""
    num_own = 0 if not len(own) else count if not len(others) else round(OWN_SHARE * count)
    parts = [
        some[torch.randint(len(some), (size,), generator=generator).numpy()]
        for some, size in ((own, num_own), (others, count - num_own))
        if size
    ]
    return np.concatenate(parts)


def _teach(heads: HeadsModule, teacher: Teacher, hidden: Tensor, targets: TargetArray) -> float:
    """Adds to the heads' gradients; returns the loss, in which farther heads count less."""
    guesses = heads(hidden)
    shares = [FARTHER**head for head in range(len(targets))]
    total, gradients = 0.0, torch.empty_like(guesses)
    for head, target in enumerate(targets):
        loss, gradient = teacher.teach(guesses[head].detach(), torch.from_numpy(target))
        share = shares[head] / sum(shares)
        total += share * loss
        gradients[head] = gradient * share
    guesses.backward(gradients)
    return total
