"""Next-token pre-training on windows of the corpus, short ones first and a few of the full length at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cloister.train.decoder import Decoder
from cloister.train.optimizer import Checkpoints, Schedule, step_generator
from training.loop import train


@dataclass(frozen=True)
class Phase:
    """A run of steps that read ``num_sequences`` windows of ``length`` tokens each."""

    steps: int
    num_sequences: int
    length: int


def phase_of(phases: Sequence[Phase], step: int) -> Phase:
    """The phase a step falls into."""
    for phase in phases:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise IndexError(f"step {step} lies beyond the last phase")


def draw_windows(row: NDArray[np.uint16], count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows at random places of the corpus: tokens and the tokens after them, ``[count, length]`` each."""
    length = min(length, len(row) - 1)
    starts = torch.randint(0, len(row) - length, (count,), generator=generator).tolist()
    windows = torch.from_numpy(np.stack([row[s : s + length + 1] for s in starts]).astype(np.int64))
    return windows[:, :-1], windows[:, 1:]


def pretrain(
    model: Decoder,
    row: NDArray[np.uint16],
    phases: Sequence[Phase],
    peak_rate: float,
    seed: int,
    checkpoints: Checkpoints,
    stop_after: int | None = None,
) -> None:
    """Train ``model`` on the corpus ``row`` ``[num_tokens]``."""

    def loss_of_step(step: int) -> Tensor:
        phase = phase_of(phases, step)
        return model.loss(*draw_windows(row, phase.num_sequences, phase.length, step_generator(seed, step)))

    total = sum(phase.steps for phase in phases)
    train("pretrain", model, Schedule(peak_rate, min(50, total // 10), total), loss_of_step, checkpoints, stop_after)


@torch.no_grad()
def perplexity(model: Decoder, row: NDArray[np.uint16], length: int = 512, max_tokens: int = 131_072) -> float:
    """Perplexity per token over windows of ``length`` laid end to end."""
    length = min(length, len(row) - 1)
    count = max(1, min(max_tokens, len(row) - 1) // length)
    losses = []
    for start in range(0, count, 16):
        picked = range(start, min(count, start + 16))
        windows = torch.from_numpy(np.stack([row[i * length : (i + 1) * length + 1] for i in picked]).astype(np.int64))
        losses.append(model.loss(windows[:, :-1], windows[:, 1:]).item() * len(picked))
    return float(np.exp(sum(losses) / count))


@torch.no_grad()
def perplexity_by_position(model: Decoder, row: NDArray[np.uint16], length: int, num_windows: int = 6) -> dict[str, float]:
    """Perplexity of the tokens at the positions up to 1024, then of every doubling up to ``length``."""
    length = min(length, len(row) - 1)
    losses = []
    for start in range(0, min(num_windows * length, len(row) - length), length):
        window = torch.from_numpy(row[start : start + length + 1].astype(np.int64))
        losses.append(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none"))
    mean = torch.stack(losses).mean(dim=0)
    edges = [0, *(edge for edge in (1024, 2048, 4096) if edge < length), length]
    return {f"{a} to {b}": float(mean[a:b].mean().exp()) for a, b in pairwise(edges)}
