"""The draft: a small decoder that learns the tuned model's next-token distributions (Hinton et al. 2015)."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cloister.train.decoder import Decoder
from cloister.train.optimizer import Checkpoints, Schedule, step_generator
from training.lessons import Lessons
from training.loop import train
from training.pretrain import draw_windows
from training.tune import lesson_source


@dataclass(frozen=True)
class Distilling:
    """Steps of ``corpus_rows`` windows and ``chat_rows`` rows of chats, ``length`` tokens each."""

    steps: int
    corpus_rows: int
    chat_rows: int
    length: int
    rate: float


@dataclass(frozen=True)
class Agreement:
    """How well a draft foretells its teacher: share of equal best tokens, and expected acceptance.

    Acceptance is the sum over the vocabulary of min(p, q), the chance that speculative sampling keeps a drafted token
    (Leviathan et al. 2023, theorem 3.5).
    """

    top1: float
    acceptance: float


def divergence(student: Decoder, teacher: Decoder, tokens: Tensor, rows_per_chunk: int = 2048) -> Tensor:
    """Mean Kullback-Leibler divergence from teacher to student over every position of ``tokens``, in nats."""
    states = student.hidden_states(tokens).flatten(0, 1)
    with torch.no_grad():
        taught = teacher.hidden_states(tokens).flatten(0, 1)
    total = torch.zeros((), dtype=torch.float32)
    for start in range(0, len(states), rows_per_chunk):
        guess = F.log_softmax(student.project(states[start : start + rows_per_chunk]).float(), dim=-1)
        with torch.no_grad():
            truth = F.log_softmax(teacher.project(taught[start : start + rows_per_chunk]).float(), dim=-1)
        total = total + F.kl_div(guess, truth, reduction="sum", log_target=True)
    return total / len(states)


def distil(
    draft: Decoder,
    teacher: Decoder,
    row: NDArray[np.uint16],
    lessons: Lessons,
    distilling: Distilling,
    seed: int,
    checkpoints: Checkpoints,
) -> None:
    """Train ``draft`` to foretell ``teacher`` on the corpus and on chats."""
    teacher.requires_grad_(False)

    def loss_of_step(step: int) -> Tensor:
        windows, _ = draw_windows(row, distilling.corpus_rows, distilling.length, step_generator(seed + 2, step))
        chats, _ = lessons.rows(lesson_source(seed + 2, step), distilling.chat_rows, distilling.length)
        return divergence(draft, teacher, torch.cat([windows, chats[:, : windows.shape[1]]]))

    schedule = Schedule(distilling.rate, min(30, distilling.steps // 10), distilling.steps, decay=0.5)
    train("distil", draft, schedule, loss_of_step, checkpoints)


@torch.no_grad()
def agreement(draft: Decoder, teacher: Decoder, tokens: Tensor, counted: Tensor) -> Agreement:
    """Agreement over the positions of ``tokens`` ``[batch, positions]`` that ``counted`` marks."""
    top1 = acceptance = 0.0
    for row, mask in zip(tokens, counted, strict=True):
        p = teacher(row[None])[0][mask].float().softmax(-1)
        q = draft(row[None])[0][mask].float().softmax(-1)
        top1 += (p.argmax(-1) == q.argmax(-1)).sum().item()
        acceptance += torch.minimum(p, q).sum().item()
    total = max(1, int(counted.sum()))
    return Agreement(top1 / total, acceptance / total)
