"""Draft heads, which predict the tokens after the next one from a hidden state: their files, and code shared by drafters with
heads.

A directory that training wrote, read without torch, holds `heads.json` (`HeadsCard`) and `heads.safetensors`. Heads predict
hidden states, which the model's own head converts to tokens; so a head has a few small layers and no vocabulary matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from cloister.backends.base import KVLayout
from cloister.backends.draft_heads import DraftHeads
from cloister.executor.drafters.base import (
    Drafter,
    DrafterContext,
    DraftRequest,
    FloatArray,
    HeadRunner,
    IntArray,
    VerifyFeedback,
)
from cloister.models.safetensors import read_header, write_tensors
from cloister.types.errors import ConfigError, ModelError

VERSION: Final = 1
CARD, TENSORS = "heads.json", "heads.safetensors"


class HeadsCard(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `heads.json`.

    Attributes:
        kind: the drafter that uses them.
        fingerprint: SHA-256 of the model for which they were trained: config and checkpoint (hex).
        parents: parents of their tree, filled best first, as `Draft.parents`; empty for a chain.
        accuracy: [num_heads][num_ranks], the fraction of held-out positions where a head's prediction of that rank was the
            model's token.
        trained: seed, steps, tokens and other information for readers.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    fingerprint: str
    version: int = VERSION
    parents: list[int] = []
    accuracy: list[list[float]] = []
    trained: dict[str, str | int | float] = {}


def heads_directory(model_path: Path, kind: str) -> Path:
    """Returns the directory of heads of a kind for a model's directory or GGUF file."""
    return (model_path.parent if model_path.is_file() else model_path) / "drafters" / kind


def write_heads(directory: Path, card: HeadsCard, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes heads; the card last, so that a directory with a card is complete.

    Raises:
        ModelError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CARD).unlink(missing_ok=True)
        write_tensors(directory / TENSORS, tensors)
        (directory / CARD).write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")
    except OSError as error:
        raise ModelError(
            f"heads cannot be written to {directory}: {error.strerror}; free space or name another place"
        ) from None


def read_card(directory: Path) -> HeadsCard:
    """Returns the card of heads (ModelError if it is damaged or of another version)."""
    try:
        card = msgspec.json.decode((directory / CARD).read_bytes(), type=HeadsCard)
    except (OSError, msgspec.DecodeError):
        raise ModelError(f"{directory / CARD} is damaged; train these heads again") from None
    if card.version != VERSION:
        raise ModelError(
            f"{directory / CARD} has version {card.version}, this release reads {VERSION}; train these heads again"
        )
    return card


def open_heads(context: DrafterContext, kind: str) -> tuple[HeadsCard, dict[str, FloatArray]]:
    """Reads the heads of a kind for a model; `context.files` may name those of a sibling model of equal shape.

    Raises:
        ConfigError: there are no such heads, or they were trained for another model.
        ModelError: the files are damaged.
    """
    directory = Path(context.files).expanduser() if context.files else heads_directory(context.model_path, kind)
    if not (directory / CARD).is_file():
        raise ConfigError(
            f"{directory} holds no {kind} heads; train them with `cloister train {kind} --model {context.model_path.name} "
            "--text FILES`, or choose another drafter",
            param="speculate",
        )
    card = read_card(directory)
    if card.kind != kind:
        raise ConfigError(f"{directory} holds {card.kind} heads, not {kind} heads; name their directory", param="speculate")
    if (card.hidden_size, card.vocab_size) != (context.hidden_size, context.vocab_size):
        raise ConfigError(
            f"the {kind} heads in {directory} are for a hidden size of {card.hidden_size} and {card.vocab_size} tokens and the "
            f"model has {context.hidden_size} and {context.vocab_size}; train heads for it with `cloister train {kind}`",
            param="speculate",
        )
    if not context.files and context.fingerprint and card.fingerprint != context.fingerprint:
        raise ConfigError(
            f"the {kind} heads in {directory} were trained for another model of the same shape; train them for this one with "
            f"`cloister train {kind}`, or name their directory if it is a sibling that they shall serve too",
            param="speculate",
        )
    tensors = {name: np.ascontiguousarray(entry.read(), np.float32) for name, entry in read_header(directory / TENSORS).items()}
    return card, tensors


def take_tensor(tensors: Mapping[str, FloatArray], name: str, *shape: int) -> FloatArray:
    """Returns one tensor of the given shape (ModelError if there is none)."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != shape:
        raise ModelError(f"{TENSORS} has no tensor {name} of the shape {list(shape)}; train these heads again")
    return tensor


class LastHidden:
    """For each sequence the hidden state from which its last token was sampled, while that token is the last."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, FloatArray]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, seen: VerifyFeedback) -> None:
        """Stores the row of a step."""
        if seen.hidden is None:
            return
        kept = self._kept.get(seen.state.seq_id)
        row = np.empty(seen.hidden.shape[1], np.float32) if kept is None else kept[1]
        row[:] = seen.hidden[seen.last_row]
        self._kept[seen.state.seq_id] = (len(seen.state.tokens), row)

    def gather(self, requests: list[DraftRequest]) -> tuple[list[int], FloatArray]:
        """Returns the indices of the requests with a stored row, and these rows [num_found, hidden]."""
        places: list[int] = []
        rows: list[FloatArray] = []
        for place, request in enumerate(requests):
            kept = self._kept.get(request.state.seq_id)
            if kept is not None and kept[0] == len(request.state.tokens) and request.num_drafts > 0:
                places.append(place)
                rows.append(kept[1])
        return places, np.array(rows, np.float32)

    def forget(self, seq_id: int) -> None:
        kept = self._kept.pop(seq_id, None)
        if kept is not None:
            kept[1].fill(0)

    def copy(self, parent_id: int, child_id: int) -> None:
        kept = self._kept.get(parent_id)
        if kept is not None:
            self.forget(child_id)
            self._kept[child_id] = (kept[0], kept[1].copy())


class HeadDrafter(Drafter):
    """Drafts from the hidden state from which each sequence's last token was sampled.

    Args:
        heads: released on `allocate`, because the code that computes them may keep them in another number format.

    Raises:
        ConfigError: the back end provides no head.
    """

    wants_hidden = True

    def __init__(self, heads: DraftHeads, context: DrafterContext) -> None:
        if context.head_runner is None:
            raise ConfigError("this back end lends no head to drafters; choose one without heads", param="speculate")
        self.num_heads, self.fixed_bytes = heads.num_heads, heads.num_bytes
        self._heads: DraftHeads | None = heads
        self._make_head_runner = context.head_runner
        self._head_runner: HeadRunner | None = None
        self._last = LastHidden()

    def allocate(self, kv: KVLayout) -> None:
        self._ready_head_runner()

    def _ready_head_runner(self) -> HeadRunner:
        if self._head_runner is None:
            assert self._heads is not None
            self._head_runner, self._heads = self._make_head_runner(self._heads), None
        return self._head_runner

    def _guess(self, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Returns the most likely ids of the first heads, best first, [num_heads, num_rows, num_top]."""
        return self._ready_head_runner().guess(hidden, num_heads, num_top)

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        for one in seen:
            self._last.keep(one)

    def forget(self, seq_id: int) -> None:
        self._last.forget(seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        self._last.copy(parent_id, child_id)
