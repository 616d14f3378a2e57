"""Trains draft heads to predict what the model itself would generate, with the model's weights frozen; the heads as torch
modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloister.backends.base import IntArray
from cloister.train.hidden_states import HiddenStates, RowArray, TargetArray, Teacher, find_targets, read_rows
from cloister.train.optimizer import Checkpoints, Optimizer, Schedule, step_generator

# Heads as torch modules; they save the files that `executor.drafters` reads.
#
# Both kinds are initialised to zero output: added to the hidden state they do not change it, so every head starts as the
# model's own prediction of the next token (Cai et al. 2024, section 2.1.1).


class MedusaHeads(nn.Module):
    """Each head: `num_blocks` residual blocks x + D SiLU(U x + u), as wide inside as outside.

    Args:
        generator: draws U; D is zero.
    """

    def __init__(self, num_heads: int, hidden_size: int, num_blocks: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_heads, self.num_blocks = num_heads, num_blocks
        count = num_heads * num_blocks
        self.up = nn.ParameterList([_init_weight(hidden_size, hidden_size, generator) for _ in range(count)])
        self.up_bias = nn.ParameterList([torch.zeros(hidden_size) for _ in range(count)])
        self.down = nn.ParameterList([torch.zeros(hidden_size, hidden_size) for _ in range(count)])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [num_heads, num_rows, hidden] of hidden states [num_rows, hidden]."""
        kind = hidden.dtype
        states = []
        for head in range(self.num_heads):
            state = hidden
            for part in range(head, head + self.num_heads * self.num_blocks, self.num_heads):
                inner = F.silu(F.linear(state, self.up[part].to(kind), self.up_bias[part].to(kind)))
                state = state + F.linear(inner, self.down[part].to(kind))
            states.append(state)
        return torch.stack(states)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the tensors for a file of heads, as bfloat16."""
        found = {}
        for block in range(self.num_blocks):
            some = slice(block * self.num_heads, (block + 1) * self.num_heads)
            for name, parts in (("up.weight", self.up), ("up.bias", self.up_bias), ("down.weight", self.down)):
                found[f"blocks.{block}.{name}"] = _round(torch.stack(list(parts[some])))
        return found


class BlockwiseHeads(nn.Module):
    """All heads together: x + D_k relu(U x + u) + d_k.

    Args:
        inner: rows of U.
        generator: draws U; D is zero.
    """

    def __init__(self, num_heads: int, hidden_size: int, inner: int, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(_init_weight(inner, hidden_size, generator))
        self.up_bias = nn.Parameter(torch.zeros(inner))
        self.down = nn.ParameterList([torch.zeros(hidden_size, inner) for _ in range(num_heads)])
        self.down_bias = nn.ParameterList([torch.zeros(hidden_size) for _ in range(num_heads)])

    def forward(self, hidden: Tensor) -> Tensor:
        """As `MedusaHeads.forward`."""
        kind = hidden.dtype
        inner = F.relu(F.linear(hidden, self.up.to(kind), self.up_bias.to(kind)))
        parts = zip(self.down, self.down_bias, strict=True)
        return torch.stack([hidden + F.linear(inner, down.to(kind), bias.to(kind)) for down, bias in parts])

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """As `MedusaHeads.tensors`."""
        return {
            "up.weight": _round(self.up),
            "up.bias": _round(self.up_bias),
            "down.weight": _round(torch.stack(list(self.down))),
            "down.bias": _round(torch.stack(list(self.down_bias))),
        }


HeadsModule = MedusaHeads | BlockwiseHeads


MAKERS: Final[Mapping[str, Callable[[int, int, int, torch.Generator], HeadsModule]]] = {
    "medusa": MedusaHeads,
    "blockwise": BlockwiseHeads,
}
"""By kind: number of heads, hidden size, blocks of a head or rows of the inner layer, generator of the weights."""


def _init_weight(num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    drawn = torch.empty(num_rows, num_columns)
    return nn.init.normal_(drawn, std=num_columns**-0.5, generator=generator)


def _round(weight: Tensor) -> npt.NDArray[Any]:
    return np.array(weight.detach().numpy()).astype(ml_dtypes.bfloat16)


FARTHER: Final = 0.8
"""Weight of a head's loss relative to the previous head's (Cai et al. 2024, section 2.2.1)."""
OWN_SHARE: Final = 0.75
"""Share of positions in model-generated text per step, if there is any: that is what heads will draft."""
CHECKPOINT_EVERY: Final = 200


@dataclass(frozen=True, slots=True)
class Lesson:
    """Training schedule of heads.

    Attributes:
        steps: number of steps, of `rows` positions each.
        rate: peak learning rate.
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
    """Trains heads on every position that is not held out; resumes from a checkpoint if there is one.

    Args:
        choices: the model's next token after each position, [num_places].
        advance: called with the number of new steps, and the loss in nats per token.
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
    """Returns the positions of one step."""
    num_own = 0 if not len(own) else count if not len(others) else round(OWN_SHARE * count)
    parts = [
        some[torch.randint(len(some), (size,), generator=generator).numpy()]
        for some, size in ((own, num_own), (others, count - num_own))
        if size
    ]
    return np.concatenate(parts)


def _teach(heads: HeadsModule, teacher: Teacher, hidden: Tensor, targets: TargetArray) -> float:
    """Adds to the heads' gradients; returns the loss, weighted by head."""
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
