"""Tuning to the chat template on facts and skills, with windows of the corpus beside them so that it is not forgotten."""

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cloister.train.decoder import Decoder
from cloister.train.optimizer import Checkpoints, Schedule, step_generator
from training.lessons import Lessons
from training.loop import train
from training.pretrain import draw_windows


@dataclass(frozen=True)
class Tuning:
    """Steps of ``chat_rows`` rows of ``chat_length`` tokens, each beside one corpus window of ``corpus_length``."""

    steps: int
    chat_rows: int
    chat_length: int
    corpus_length: int
    corpus_weight: float
    rate: float
    decay: float = 0.7


def lesson_source(seed: int, step: int) -> Random:
    """The random source of the chats of one step."""
    return Random(f"lessons {seed} {step}")


def tune(
    model: Decoder,
    row: NDArray[np.uint16],
    lessons: Lessons,
    tuning: Tuning,
    seed: int,
    checkpoints: Checkpoints,
    stop_after: int | None = None,
    *,
    name: str = "tune",
) -> None:
    """Train ``model`` on chats and on the corpus ``row`` ``[num_tokens]``; ``name`` is what its progress is told under."""

    def loss_of_step(step: int) -> Tensor:
        chats = lessons.rows(lesson_source(seed, step), tuning.chat_rows, tuning.chat_length)
        windows = draw_windows(row, 1, tuning.corpus_length, step_generator(seed + 1, step))
        return model.loss(*chats) + tuning.corpus_weight * model.loss(*windows)

    schedule = Schedule(tuning.rate, min(20, tuning.steps // 10), tuning.steps, tuning.decay)
    train(name, model, schedule, loss_of_step, checkpoints, stop_after)
