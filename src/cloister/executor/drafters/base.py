"""The protocol of drafters, which propose several tokens per step for the model to verify (speculative decoding; Leviathan et
al. 2023, section 2).

The quality of drafts never changes answers: verification preserves the tokens of a seeded request, and the distribution of any
other. Drafts only affect the number of tokens per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cloister.backends.base import KVLayout, Program, SamplingMetadata
from cloister.backends.draft_heads import DraftHeads
from cloister.executor.state import SequenceState
from cloister.types.registry import Registry

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


class Draft(msgspec.Struct, frozen=True):
    """Proposed continuations of a sequence: a tree in the drafter's order of confidence.

    Every prefix of the list is a tree: parents precede their children.

    Attributes:
        parents: for each token the index of its parent, -1 for the last known token; None for a chain.
        probs: the distribution that each token was drawn from, [num_tokens, vocab], after temperature and truncation; None for
            tokens that were not sampled, or sampled with the same noise as the model's own token.
    """

    token_ids: list[int]
    parents: list[int] | None = None
    probs: FloatArray | None = None

    @property
    def depths(self) -> list[int]:
        """Distance of each row of logits from the last known token: that token's row, then each draft's."""
        if self.parents is None:
            return list(range(1 + len(self.token_ids)))
        depths = [0]
        for parent in self.parents:
            depths.append(1 + depths[parent + 1])
        return depths

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Draft(num_tokens={len(self.token_ids)})"


NOTHING = Draft([])


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a draft of one sequence. Its block table has space for the drafts after its last token.

    Attributes:
        num_drafts: maximum number of tokens.
        parents: requested shape of the draft, or a prefix of it; None lets the drafter choose.
        is_coupled: sampled tokens use the noise of (seed, index, position), as the model's do, and need no `Draft.probs`;
            otherwise they use independent noise and come with `Draft.probs`.
    """

    state: SequenceState
    num_drafts: int
    parents: tuple[int, ...] | None = None
    is_coupled: bool = True


@dataclass(frozen=True, slots=True)
class VerifyFeedback:
    """The model's output of a step for one observed sequence. Rows: the last token known before the step, then each draft.

    Attributes:
        state: the sequence, including its new tokens.
        start: position of the last token known before the step.
        draft: the verified draft; `NOTHING` if there was none.
        path: the accepted drafts, parents before children.
        chosen: [1 + num_drafts] the model's next token after each row: on the path the sampled token, elsewhere one sampled
            with that position's noise, or the most likely one.
        hidden: [1 + num_drafts, hidden] after the final norm, if a drafter needs it.
        top: [1 + num_drafts, k] the most likely tokens, best first, if a drafter needs k of them.
    """

    state: SequenceState
    start: int
    draft: Draft
    path: tuple[int, ...]
    chosen: IntArray
    hidden: FloatArray | None = None
    top: IntArray | None = None

    @property
    def last_row(self) -> int:
        """The row from which the last token was sampled."""
        return self.path[-1] + 1 if self.path else 0


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states of a sequence that a step computed.

    Attributes:
        state: the sequence, including its new tokens.
        start: position of the first.
        rows: [num_positions, hidden] after the final norm, of known tokens only: accepted drafts among them, rejected ones not.
    """

    state: SequenceState
    start: int
    rows: FloatArray


class Drafter:
    """Drafts for the sequences of one runner. Not thread-safe. `forget` overwrites all state of a sequence.

    Attributes:
        wants_hidden: it needs `VerifyFeedback.hidden`.
        wants_every_hidden: it needs the hidden states of all positions (`keep_hidden`).
        num_top: number of tokens that it needs in `VerifyFeedback.top`.
        shape: parents of its tree, filled best first, of which any prefix may be requested; None if the drafter chooses.
        max_drafts: maximum number of tokens that it can draft for one sequence.
        kv_block_bytes: its memory for each KV block of the model: KV, or an index of the tokens.
        fixed_bytes: its other memory: weights, datastores, caches of constant size.
        has_probs: its drafts may come with `Draft.probs`, which are as large as logits.
    """

    wants_hidden: bool = False
    wants_every_hidden: bool = False
    num_top: int = 0
    shape: tuple[int, ...] | None = None
    max_drafts: int = 16
    kv_block_bytes: int = 0
    fixed_bytes: int = 0
    has_probs: bool = False

    def allocate(self, kv: KVLayout) -> None:
        """Allocates its memory. Called once, before any other method.

        Args:
            kv: the model's blocks; a drafter with `kv_block_bytes` allocates as many, with the same ids.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a draft of at most `num_drafts` tokens for each request; `NOTHING` if it has no proposal."""
        raise NotImplementedError

    def follow(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        """Called with the prompts that this step computes, up to (excluding) the given position; for drafters with KV."""

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        """Called with the model's output for observed sequences, whichever drafter drafted for them."""

    def keep_hidden(self, parts: Sequence[HiddenRows]) -> None:
        """Called after each step with the hidden states of all sequences in it, if it wants them; copies what it keeps."""

    def forget(self, seq_id: int) -> None:
        """Overwrites all state of a finished sequence. Unknown ids are ignored."""

    def fork(self, parent_id: int, child_id: int) -> None:
        """`child_id` was forked from `parent_id`; a drafter that does nothing here starts without state."""

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites the KV of these block ids, which became free."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the KV of these block ids (source, target), as the model's were copied."""

    def wipe_buffers(self) -> None:
        """Overwrites residue of steps outside of the state of sequences."""


class HeadRunner(Protocol):
    """Draft heads, ready for inference."""

    def guess(self, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Returns the most likely ids of the first heads, best first, [num_heads, num_rows, num_top].

        Args:
            hidden: after the final norm, [num_rows, hidden].
        """
        ...


class DraftModel(Protocol):
    """A small model that was read, but not built.

    Attributes:
        vocab_size, max_positions: of the small model.
        weights_bytes: its memory without KV, including activations.
    """

    vocab_size: int
    max_positions: int
    weights_bytes: int

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block of its KV."""
        ...

    def build(self, kv: KVLayout) -> Program:
        """Builds its program, with its own KV."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The context in which a drafter is created.

    Attributes:
        model_path: directory of the model; drafters trained for it are in its `drafters/NAME`.
        vocab_size, hidden_size, max_model_len, max_num_seqs, block_size, eos_token_ids: of the model and its engine.
        files: directory or file from the settings for this drafter (draft model, heads, datastore); None searches `model_path`.
        open_model: reads a small model: an embedded model's name or a directory.
        head_runner: prepares draft heads, once the model's program is built; None if the back end cannot.
        sampling_metadata: how the next token of each sequence is sampled from a row, [num_states] of `SAMPLING_METADATA`; its
            `position` is that of the next token, so a draft at depth d (from 0) adds d.
        open_mtp: reads the layer of the model's checkpoint that predicts further tokens.
        fingerprint: SHA-256 of the model's files (hex), compared with that of drafters trained for it; empty skips the check.
    """

    model_path: Path
    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    files: str | None
    open_model: Callable[[str], DraftModel]
    head_runner: Callable[[DraftHeads], HeadRunner] | None
    sampling_metadata: Callable[[list[SequenceState], list[int]], SamplingMetadata]
    open_mtp: Callable[[], DraftModel]
    fingerprint: str = ""


class DrafterFactory(Protocol):
    """Creates a drafter for one engine, before memory is budgeted (`Drafter.allocate` follows).

    Raises:
        CloisterError: a file that it needs is missing; the message says what to do.
    """

    def __call__(self, context: DrafterContext) -> Drafter: ...


DRAFTERS: Registry[DrafterFactory] = Registry("drafter")
