"""What drafts tokens for the model to verify, several a step (speculative decoding; Leviathan et al. 2023, section 2).

A drafter may be as wrong as it likes: verification keeps the tokens of a request with a seed, and the distribution of one
without. It decides only how many tokens a step brings.
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
    """Tokens that may follow what is known of a sequence: a tree in the order in which its drafter trusts them.

    Every prefix of the list is a tree: parents stand before their children.

    Attributes:
        parents: for each token the place of the one before it, -1 where that is the last known token; None is a chain.
        probs: the distribution that each token was drawn from, [num_tokens, vocab], after temperature and truncation; None for
            tokens that were not drawn, or drawn with the noise that the model's own token is drawn with.
    """

    token_ids: list[int]
    parents: list[int] | None = None
    probs: FloatArray | None = None

    @property
    def depths(self) -> list[int]:
        """How far each row that a token is chosen from is behind the last known token: that one's, then each draft's."""
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
    """One sequence that wants a draft. Its block table has room for the drafts behind its last token.

    Attributes:
        num_drafts: tokens at most.
        parents: the shape that the draft shall have, as far as it goes; None leaves it to the drafter.
        is_coupled: drawn tokens take the noise of (seed, index, position) as the model's do, and need no `Draft.probs`; else
            they are drawn with noise of their own, from the `Draft.probs` that come with them.
    """

    state: SequenceState
    num_drafts: int
    parents: tuple[int, ...] | None = None
    is_coupled: bool = True


@dataclass(frozen=True, slots=True)
class VerifyFeedback:
    """What a step said of one watched sequence. Rows: the last token that was known before the step, then each draft.

    Attributes:
        state: with the tokens that it gained.
        start: position of the last token that was known before the step.
        draft: what was verified; `NOTHING` if nothing was.
        path: the accepted drafts, parents before children.
        chosen: [1 + num_drafts] what the model goes on with after each row: the token that was drawn on the path, elsewhere one
            drawn with that position's noise, or the most likely one.
        hidden: [1 + num_drafts, hidden] after the final norm, if a drafter asks for it.
        top: [1 + num_drafts, k] the most likely tokens, best first, if a drafter asks for k of them.
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
        """The row that the last sampled token was chosen from."""
        return self.path[-1] + 1 if self.path else 0


class Drafter:
    """Drafts for the sequences of one runner. Not thread-safe. Whatever it keeps of a sequence, `forget` overwrites.

    Attributes:
        wants_hidden: `VerifyFeedback.hidden` shall be there.
        num_top: how many tokens `VerifyFeedback.top` shall have.
        shape: parents of the tree that it fills best first, of which any prefix may be asked for; None if it decides itself.
        max_drafts: how many tokens it can draft at most for one sequence.
        kv_block_bytes: what it keeps for each block of the model's: KV, or an index of the tokens.
        fixed_bytes: what else it keeps in memory: weights, datastores, caches of constant size.
        has_probs: its drafts may come with `Draft.probs`, which are as large as logits.
    """

    wants_hidden: bool = False
    num_top: int = 0
    shape: tuple[int, ...] | None = None
    max_drafts: int = 16
    kv_block_bytes: int = 0
    fixed_bytes: int = 0
    has_probs: bool = False

    def allocate(self, kv: KVLayout) -> None:
        """Takes what memory it needs, once, before anything else is asked of it.

        Args:
            kv: blocks of the model's; a drafter with `kv_block_bytes` keeps as many of its own, under the same numbers.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a draft for each, of at most `num_drafts` tokens; `NOTHING` where it has no idea worth verifying."""
        raise NotImplementedError

    def follow(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        """Takes notice of prompts that this step computes up to (not with) the position given; for drafters with KV."""

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        """Learns what a step said of watched sequences, drafts of this drafter or another one."""

    def forget(self, seq_id: int) -> None:
        """A sequence left: overwrites what is kept of it. One that is not known is no error."""

    def fork(self, parent_id: int, child_id: int) -> None:
        """`child_id` goes on as a copy of `parent_id`; a drafter that does nothing here starts anew."""

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks became free: overwrites KV that is kept under their numbers."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied (source, target): does the same with KV that is kept under their numbers."""

    def wipe_buffers(self) -> None:
        """Overwrites what steps left outside of sequences' own state."""


class Guesser(Protocol):
    """Draft heads that are ready to guess."""

    def guess(self, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Returns the ids that the first heads think likeliest, best first, [num_heads, num_rows, num_top].

        Args:
            hidden: after the final norm, [num_rows, hidden].
        """
        ...


class DraftModel(Protocol):
    """A small model that was found and read, but not built.

    Attributes:
        vocab_size, max_positions: of the small model.
        weights_bytes: what it takes beside KV, activations included.
    """

    vocab_size: int
    max_positions: int
    weights_bytes: int

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block of its KV."""
        ...

    def build(self, kv: KVLayout) -> Program:
        """Builds its program, with KV of its own."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is made for.

    Attributes:
        model_path: directory of the model; what was trained for it lies in `drafters/NAME` there.
        vocab_size, hidden_size, max_model_len, max_num_seqs, block_size, eos_token_ids: of the model and its engine.
        files: directory or file that the settings name for this drafter (draft model, heads, datastore); None looks in
            `model_path`.
        open_model: reads a small model: an embedded model's name or a directory.
        guesser: readies draft heads, once the model's program is there; None where the back end cannot.
        sampling_metadata: how the next token of each sequence is chosen from a row, [num_states] of `SAMPLING_METADATA`; its
            `position` is that of the next token, so a draft at depth d (from 0) adds d.
        fingerprint: SHA-256 of the model's files (hex), which what was trained for it names too; empty checks nothing.
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
    guesser: Callable[[DraftHeads], Guesser] | None
    sampling_metadata: Callable[[list[SequenceState], list[int]], SamplingMetadata]
    fingerprint: str = ""


class DrafterFactory(Protocol):
    """Makes a drafter for one engine, before memory is budgeted (`Drafter.allocate` follows).

    Raises:
        CloisterError: what it needs is not there; the message says what to do.
    """

    def __call__(self, context: DrafterContext) -> Drafter: ...


DRAFTERS: Registry[DrafterFactory] = Registry("drafter")
