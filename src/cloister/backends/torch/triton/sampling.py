"""Chooses the most likely token on the device, so that a greedy step moves no logits.

Draws stay with the runner: the bits of its counter-based noise could be had here, but the exponential and the logarithm that
follow are rounded by numpy in its own way, and a seeded answer would change where two tokens all but tie.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES: Final = 4096


@triton.jit
def largest_kernel(logits, tokens, VOCAB: tl.constexpr, LANES: tl.constexpr):
    """One program searches one row: each lane keeps its first largest, then the lanes are compared."""
    row = logits + tl.program_id(0).to(tl.int64) * VOCAB
    lanes = tl.arange(0, LANES)
    highest, winner = tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), tl.int32)
    num_broken = tl.zeros((LANES,), tl.int32)
    for start in range(0, VOCAB, LANES):
        inside = start + lanes < VOCAB
        values = tl.load(row + start + lanes, mask=inside, other=0.0).to(tl.float32)
        num_broken += (inside & ((tl.abs(values) < float("inf")) == 0)).to(tl.int32)  # also where it is not a number
        is_higher = inside & (values > highest)
        highest, winner = tl.where(is_higher, values, highest), tl.where(is_higher, start + lanes, winner)
    first = tl.min(tl.where(highest == tl.max(highest), winner, VOCAB))
    tl.store(tokens + tl.program_id(0), tl.where(tl.sum(num_broken) == 0, first, -1))


def find_largest(logits: Tensor) -> Tensor:
    """Returns the token of the largest logit of each row, [num_rows] int32, the lowest id among equals.

    -1 stands for a row that holds anything but finite numbers.

    Args:
        logits: [num_rows, vocab].
    """
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        largest_kernel[(num_rows,)](logits, tokens, VOCAB=vocab, LANES=_LANES, num_warps=8)
    return tokens
