"""The served model's own head in torch: what hidden states mean, and what heads are trained through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.base import IntArray
from cloister.backends.tensors import dequantized
from cloister.models import LoadedModel
from cloister.train.hidden_states import HiddenStates

_ROWS: Final = 2048
_ROWS_IN_CACHE: Final = 128
"""Rows of logits that are held at once while heads learn: few enough to stay near the processor."""


class Teacher:
    """Logits of hidden states after the final norm, as the model's head makes them."""

    def __init__(self, model: LoadedModel) -> None:
        spec, weights = model.spec, model.weights
        matrix = weights.read("embed.weight" if spec.tied_embeddings else "head.weight")
        self.weight = torch.from_numpy(np.array(dequantized(matrix), np.float32))
        self._rounded = self.weight.to(torch.bfloat16)
        bias = torch.from_numpy(np.array(weights.read("head.bias"), np.float32)) if spec.head_bias else None
        self._bias, self._scale, self._softcap = bias, spec.logit_scale, spec.logit_softcap

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits [..., vocab] of hidden states [..., hidden], multiplied in their own type."""
        weight = self._rounded if hidden.dtype == torch.bfloat16 else self.weight
        logits = F.linear(hidden, weight).float()
        if self._bias is not None:
            logits = logits + self._bias
        logits = logits * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    @torch.no_grad()
    def teach(self, guesses: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Returns the mean cross entropy of guessed hidden states, in nats, and its gradient.

        The head is frozen, so the gradient is known in closed form: no logits are kept for a second pass.

        Args:
            guesses: [num_rows, hidden].
            targets: [num_rows], the right tokens; a negative one does not count.
        """
        weight = self._rounded if guesses.dtype == torch.bfloat16 else self.weight
        gradient = torch.empty_like(guesses)
        share = 1.0 / max(1, int((targets >= 0).sum()))
        total = 0.0
        for start in range(0, len(guesses), _ROWS_IN_CACHE):
            some = slice(start, start + _ROWS_IN_CACHE)
            logits, right = self.logits(guesses[some]), targets[some].clamp(min=0)[:, None]
            counted = (targets[some] >= 0).float()[:, None] * share
            norm = logits.logsumexp(-1, keepdim=True)
            total += float(((norm - logits.gather(1, right)) * counted).sum())
            slope = torch.exp(logits - norm).scatter_add_(1, right, torch.full(right.shape, -1.0)) * counted
            if self._softcap is not None:
                slope *= 1 - (logits / self._softcap) ** 2
            gradient[some] = (slope * self._scale).to(weight.dtype) @ weight
        return total, gradient

    @torch.no_grad()
    def choose(self, places: HiddenStates, advance: Callable[[int], object]) -> IntArray:
        """Returns the token that the model would go on with behind each place that is learned from, [num_places] int32.

        -1 elsewhere.
        """
        chosen = np.full(len(places.token_ids), -1, np.int32)
        wanted = np.flatnonzero(places.is_learned)
        for start in range(0, len(wanted), _ROWS):
            some = wanted[start : start + _ROWS]
            chosen[some] = self.logits(read_rows(places, some).float()).argmax(-1).numpy()
            advance(len(some))
        return chosen


def read_rows(places: HiddenStates, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """Returns the hidden states of some places, [num_rows, hidden] bfloat16."""
    bits = np.ascontiguousarray(places.hidden[rows]).view(np.int16)  # torch reads no ml_dtypes
    return torch.from_numpy(bits).view(torch.bfloat16)
