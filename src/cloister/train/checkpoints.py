"""Resumable training: checkpoints on disk, and one random generator per step.

What a step sees depends on the seed and the number of the step alone, so a run that was interrupted and resumed ends with the
same weights as one that was not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from cloister.train.optimizer import Optimizer

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Checkpoints:
    """Where a stage keeps its state and how often it writes it."""

    path: Path
    every: int

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Replace the checkpoint at once, so that a crash leaves the old one or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, self.path)

    def restore(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Load the last checkpoint, if any; returns how many steps are done."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def load_weights(model: M, checkpoint: Path) -> M:
    """Put the weights of a checkpoint into a model."""
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model


def step_generator(seed: int, step: int) -> torch.Generator:
    """The random source of one step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)
