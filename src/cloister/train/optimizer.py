"""Muon for the matrices inside the layers, AdamW for the rest, the learning-rate schedule, and resumable training.

Muon: Jordan et al. 2024, with the update size matched to AdamW's (Liu et al. 2025). Schedule: warm-up, stable, linear decay to
zero (Hägele et al. 2024). The data of a step depends only on the seed and the step number, so an interrupted and resumed run
ends with the same weights as an uninterrupted one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Schedule:
    """Peak rate, steps of warm-up, total steps, and the share of them with decay."""

    peak: float
    warmup: int
    total: int
    decay: float = 0.3

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from zero."""
        left = (self.total - step) / max(1.0, self.decay * self.total)
        return self.peak * min(1.0, (step + 1) / max(1, self.warmup), left)


class Optimizer:
    """Both optimisers combined."""

    def __init__(self, model: nn.Module, schedule: Schedule, weight_decay: float = 0.1) -> None:
        self.schedule = schedule
        self.parameters = list(model.parameters())
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in named if not (p.dim() == 2 and "embed" not in name)]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr=schedule.peak, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=schedule.peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True))

    def step(self, step: int) -> None:
        """Clip the gradients to norm 1, update with the rate of this step, and clear them."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.schedule.rate(step)
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of both optimisers."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: Iterable[dict[str, Any]]) -> None:
        """Load a state from ``state_dict``."""
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


@dataclass(frozen=True)
class Checkpoints:
    """Where a stage keeps its state and how often it writes it."""

    path: Path
    every: int

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Replace the checkpoint atomically, so that a crash leaves the old one or the new one."""
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


def step_generator(seed: int, step: int) -> torch.Generator:
    """The random source of one step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)
