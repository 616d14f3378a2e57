"""The training loop every stage shares: steps, checkpoints, a progress line.

What a step sees depends on the seed and the number of the step alone, so a run that was interrupted and resumed ends
with the same weights as one that was not.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from training.model import Decoder
from training.optimizer import Optimizer, Schedule


@dataclass(frozen=True)
class Checkpoints:
    """Where a stage keeps its state and how often it writes it."""

    path: Path
    every: int

    def save(self, step: int, model: Decoder, optimizer: Optimizer) -> None:
        """Replace the checkpoint at once, so that a crash leaves the old one or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, self.path)

    def restore(self, model: Decoder, optimizer: Optimizer) -> int:
        """Load the last checkpoint, if any; returns how many steps are done."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def load_weights(model: Decoder, checkpoint: Path) -> Decoder:
    """Put the weights of a checkpoint into a model."""
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model


def step_generator(seed: int, step: int) -> torch.Generator:
    """The random source of one step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


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
