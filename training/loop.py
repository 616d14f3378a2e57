"""The training loop every stage shares: steps, checkpoints, a progress line."""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

from cloister.train.decoder import Decoder
from cloister.train.optimizer import Checkpoints, Optimizer, Schedule


def train(
    name: str,
    model: Decoder,
    schedule: Schedule,
    loss_of_step: Callable[[int], Tensor],
    checkpoints: Checkpoints,
    stop_after: int | None = None,
) -> None:
    """Run every step that is not done yet; ``stop_after`` ends early, as an interruption would."""
    optimizer = Optimizer(model, schedule)
    first = checkpoints.restore(model, optimizer)
    last = schedule.total if stop_after is None else min(stop_after, schedule.total)
    console, began, smooth = Console(), time.monotonic(), 0.0
    for step in range(first, last):
        loss = loss_of_step(step)
        torch.autograd.backward(loss)
        optimizer.step(step)
        smooth = loss.item() if step == first else 0.95 * smooth + 0.05 * loss.item()
        if (step + 1) % 10 == 0 or step + 1 == last:
            left = (time.monotonic() - began) / (step + 1 - first) * (last - step - 1)
            console.print(f"{name} {step + 1}/{last} loss {smooth:.3f} left {left / 60:.1f} min", highlight=False)
        if (step + 1) % checkpoints.every == 0 or step + 1 == last:
            checkpoints.save(step + 1, model, optimizer)
