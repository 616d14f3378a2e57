"""Computes draft heads: in the back end if it can, or in numpy with the model's own head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from cloister.backends.base import Capability, Program
from cloister.backends.draft_heads import DraftHeads
from cloister.executor.drafters.base import FloatArray, HeadRunner, IntArray

_SINGLE_THREAD_PRODUCTS: Final = 1 << 18
"""Number of multiplications up to which BLAS uses this thread only: waking others takes longer, especially on a busy
machine."""

_FEWEST_OUTPUTS: Final = 16


class ProgramHeadRunner:
    """Heads computed by a back end."""

    def __init__(self, program: Program, heads: DraftHeads) -> None:
        self._program, self._loaded = program, program.load_heads(heads)

    def guess(self, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        top = self._program.guess(self._loaded, hidden, num_heads, num_top)
        return np.maximum(top, 0)  # a row that is not finite has no best token; any prediction will do


class NumpyHeadRunner:
    """Heads in numpy.

    Args:
        project: the model's own head.
    """

    def __init__(self, heads: DraftHeads, project: Callable[[FloatArray], FloatArray]) -> None:
        self._heads, self._project = heads, project

    def guess(self, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        states = guess_hidden(self._heads, hidden, num_heads)
        best = find_best(self._project(states.reshape(-1, hidden.shape[1])), num_top)
        return best.reshape(num_heads, len(hidden), num_top)


def make_head_runner(heads: DraftHeads, program: Program) -> HeadRunner:
    """Returns what computes heads for the drafters of a program."""
    if Capability.DRAFT_HEADS in program.capabilities:
        return ProgramHeadRunner(program, heads)
    return NumpyHeadRunner(heads, program.project)


def guess_hidden(heads: DraftHeads, hidden: FloatArray, num_heads: int) -> FloatArray:
    """Returns the outputs of the first heads for hidden states [num_rows, hidden]: [num_heads, num_rows, hidden]."""
    state: FloatArray = hidden[None]
    for block in heads.blocks:
        inner = _multiply(state, block.up[:num_heads]) + block.up_bias[:num_heads, None]
        state = state + _multiply(_bend(inner, heads.activation), block.down[:num_heads])
        if block.down_bias is not None:
            state = state + block.down_bias[:num_heads, None]
    return state


def find_best(logits: FloatArray, count: int) -> IntArray:
    """Returns the ids of each row's `count` largest logits [num_rows, vocab], best first; overwrites the logits."""
    best = [logits.argmax(1)]
    rows = np.arange(len(logits))
    for _ in range(1, count):  # a few passes over a row are faster than a partition
        logits[rows, best[-1]] = -np.inf
        best.append(logits.argmax(1))
    return np.stack(best, axis=1).astype(np.int32)


def _bend(inner: FloatArray, activation: str) -> FloatArray:
    bent: FloatArray = np.maximum(inner, 0) if activation == "relu" else inner / (1 + np.exp(-np.clip(inner, -80, None)))
    return bent


def _multiply(rows: FloatArray, matrices: FloatArray) -> FloatArray:
    """Returns rows [1 or num_heads, num_rows, inputs] times matrices [1 or num_heads, outputs, inputs], transposed.

    Splits the outputs so that BLAS uses one thread; if a matrix is so large that the parts would be small, BLAS computes it at
    once with all threads.
    """
    turned = matrices.transpose(0, 2, 1)
    num_rows, (num_inputs, num_outputs) = rows.shape[-2], turned.shape[1:]
    step = _SINGLE_THREAD_PRODUCTS // (num_rows * num_inputs)
    if step >= num_outputs or step < _FEWEST_OUTPUTS:
        product: FloatArray = np.matmul(rows, turned)
        return product
    product = np.empty((max(len(matrices), len(rows)), num_rows, num_outputs), np.float32)
    for start in range(0, num_outputs, step):
        np.matmul(rows, turned[..., start : start + step], out=product[..., start : start + step])
    return product
