"""Hidden states of the served model at every position of the passages, the inputs of draft heads, and the model's own head.

The states are computed once, by the model's own program in its number format, and stored in a file as bfloat16: training reads
each of them many times.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.base import HIDDEN, Capability, ForwardBatch, IntArray, Program
from cloister.backends.tensors import dequantized
from cloister.models import LoadedModel
from cloister.train.passages import Passage
from cloister.types.errors import ConfigError

BoolArray = npt.NDArray[np.bool_]
RowArray = npt.NDArray[np.int64]
TargetArray = npt.NDArray[np.int64]
_NUMBER_BYTES: Final = 2
_SPARE_BYTES: Final = 64 << 20
"""Disk space that hidden states must leave free, in bytes."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Positions of all passages, concatenated.

    Attributes:
        hidden: [num_places, hidden] bfloat16, mapped.
        token_ids: [num_places] int32.
        ends: [num_places] int64, end of each position's passage.
        is_learned: [num_places] whether heads are trained at this position: not in the prompt of an answer.
        is_held_out, is_own: [num_places], properties of the position's passage.
    """

    hidden: npt.NDArray[np.void]
    token_ids: IntArray
    ends: npt.NDArray[np.int64]
    is_learned: BoolArray
    is_held_out: BoolArray
    is_own: BoolArray

    def having(self, ahead: int, *, held_out: bool) -> RowArray:
        """Returns the positions for training, or for measuring, that are followed by at least `ahead` more positions of their
        passage."""
        places = np.arange(len(self.token_ids), dtype=np.int64)
        wanted: RowArray = places[self.is_learned & (self.is_held_out == held_out) & (places + ahead < self.ends)]
        return wanted


def read_places(
    program: Program,
    passages: Sequence[Passage],
    hidden_size: int,
    block_size: int,
    num_blocks: int,
    file: Path,
    advance: Callable[[int], object],
) -> HiddenStates:
    """Runs passages through a model; continues an incomplete file.

    Args:
        num_blocks: size of the program's KV cache: as many passages run at once as fit.
        advance: called with the number of newly computed tokens.

    Raises:
        ConfigError: the program provides no hidden states, or the disk is too small for them.
    """
    if Capability.HIDDEN not in program.capabilities:
        raise ConfigError("this back end shows no hidden states; train with the back end native or torch", param="backend")
    lengths = np.array([len(passage.token_ids) for passage in passages], np.int64)
    total, row_bytes = int(lengths.sum()), hidden_size * _NUMBER_BYTES
    _record(program, passages, file, row_bytes, block_size, num_blocks, advance)
    ends = lengths.cumsum()
    firsts = np.repeat(ends - lengths, lengths)
    prompts = np.repeat(np.array([passage.start for passage in passages], np.int64), lengths)
    return HiddenStates(
        hidden=np.memmap(file, ml_dtypes.bfloat16, "r", shape=(total, hidden_size)),
        token_ids=np.concatenate([np.array(passage.token_ids, np.int32) for passage in passages]),
        ends=np.repeat(ends, lengths),
        is_learned=np.arange(total) >= firsts + prompts,
        is_held_out=np.repeat(np.array([passage.is_held_out for passage in passages]), lengths),
        is_own=np.repeat(np.array([passage.is_own for passage in passages]), lengths),
    )


def find_targets(places: HiddenStates, choices: IntArray, rows: RowArray, num_heads: int) -> TargetArray:
    """Returns the targets of each head at some positions, [num_heads, num_rows]: the model's choice that many positions later.

    -1 if the passage ends earlier.

    Args:
        choices: [num_places], the model's next token after each position.
    """
    ahead = rows + np.arange(1, num_heads + 1)[:, None]
    is_there = ahead < places.ends[rows]
    return np.where(is_there, choices[np.minimum(ahead, len(choices) - 1)], -1).astype(np.int64)


def _record(
    program: Program,
    passages: Sequence[Passage],
    file: Path,
    row_bytes: int,
    block_size: int,
    num_blocks: int,
    advance: Callable[[int], object],
) -> None:
    """Appends hidden states to a file until all passages are complete."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        num_done, num_rows = _count_done(file, passages, row_bytes)
        left = sum(len(passage.token_ids) for passage in passages[num_done:]) * row_bytes
        free = shutil.disk_usage(file.parent).free - _SPARE_BYTES
        if left > free:
            raise ConfigError(
                f"hidden states take {left / 1e9:.1f} GB and {file.parent} has {max(0, free) / 1e9:.1f} GB; give fewer "
                "--tokens, or another place with --work",
                param="work",
            )
        advance(num_rows)
        with file.open("ab") as out:
            out.truncate(num_rows * row_bytes)
            for some in _group(passages[num_done:], block_size, num_blocks):
                hidden = program.step(batch_passages(some, block_size), HIDDEN).hidden
                out.write(hidden.astype(ml_dtypes.bfloat16).tobytes())
                out.flush()
                advance(len(hidden))
    except OSError as error:
        raise ConfigError(f"{file.parent} cannot hold hidden states: {error.strerror}", param="work") from None


def _count_done(file: Path, passages: Sequence[Passage], row_bytes: int) -> tuple[int, int]:
    """Returns how many complete passages, and rows of them, a file has."""
    in_file = file.stat().st_size // row_bytes if file.exists() else 0
    rows = 0
    for number, passage in enumerate(passages):
        if rows + len(passage.token_ids) > in_file:
            return number, rows
        rows += len(passage.token_ids)
    return len(passages), rows


def _group(passages: Sequence[Passage], block_size: int, num_blocks: int) -> Iterator[list[Passage]]:
    """Yields batches of passages in order, as large as fit into the KV cache."""
    some: list[Passage] = []
    used = 0
    for passage in passages:
        need = -(-len(passage.token_ids) // block_size)
        if some and used + need > num_blocks:
            yield some
            some, used = [], 0
        some.append(passage)
        used += need
    if some:
        yield some


def batch_passages(passages: Sequence[Passage], block_size: int) -> ForwardBatch:
    """Returns the batch that computes whole passages, each in its own blocks, with outputs at every position."""
    lengths = np.array([len(passage.token_ids) for passage in passages], np.int32)
    needs = -(-lengths // block_size)
    tables = np.zeros((len(passages), int(needs.max())), np.int32)
    for row, (end, need) in enumerate(zip(needs.cumsum(), needs, strict=True)):
        tables[row, :need] = np.arange(end - need, end)
    starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return ForwardBatch(
        token_ids=np.concatenate([np.array(passage.token_ids, np.int32) for passage in passages]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        query_starts=starts,
        context_lens=lengths,
        block_tables=tables,
        logit_rows=np.arange(int(starts[-1]), dtype=np.int32),
    )


# The served model's output head in torch, for training draft heads.


_ROWS: Final = 2048
_ROWS_IN_CACHE: Final = 128
"""Rows of logits held at once during training: few enough to fit into caches."""


class Teacher:
    """Computes logits of hidden states after the final norm, as the model's head does."""

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
        """Returns the mean cross entropy of predicted hidden states, in nats, and its gradient.

        The head is frozen, so the gradient is known in closed form: no logits are kept for a second pass.

        Args:
            guesses: [num_rows, hidden].
            targets: [num_rows], the right tokens; negative ones are ignored.
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
        """Returns the model's next token after each training position, [num_places] int32.

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
    """Returns the hidden states of some positions, [num_rows, hidden] bfloat16."""
    bits = np.ascontiguousarray(places.hidden[rows]).view(np.int16)  # torch cannot read ml_dtypes
    return torch.from_numpy(bits).view(torch.bfloat16)
