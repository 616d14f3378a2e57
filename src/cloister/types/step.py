"""The interface of scheduler and executor: the plan of one step, and its result.

A plan holds counts and blocks, never token ids of running sequences: the runner keeps those, so a plan can be made while
the step before it still runs (plans hold no token ids).
"""

from __future__ import annotations

from typing import Final

import msgspec

from cloister.types.images import ImageTile
from cloister.types.request import Embedding, PoolingParams, SamplingParams, TokenLogprobs


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that the runner does not hold yet: new, or resumed after preemption.

    Attributes:
        token_ids: prompt, and what was generated before a preemption.
        num_prompt_tokens: how many of them are prompt.
        seed: key of the sampling noise, with `index` and the position (batch invariance).
        index: which of the request's n sequences.
        stop_token_ids: ids that end the sequence (EOS included unless ignored); barred until `min_tokens`.
        images: images in the prompt (`Request.images`).
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    adapter: str | None = None
    pooling: PoolingParams | None = None
    images: tuple[ImageTile, ...] = ()

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"NewSequence(seq_id={self.seq_id}, num_tokens={len(self.token_ids)})"


class SequencePlan(msgspec.Struct, kw_only=True):
    """The part of one sequence in a step: compute positions [start, start + num_tokens).

    Attributes:
        table_start, new_block_ids: the block table from index `table_start` on becomes `new_block_ids`.
        num_samples: tokens to sample after the last position (0 while a prompt is incomplete, else 1); each draft that is
            accepted is one more.
        num_drafts: of `num_tokens` the last so many are drafted by the runner, after what is known; an upper bound.
        drafter: who drafts them; empty where nobody does.
        parents: for each draft the place among the drafts of the one before it, -1 for what is known; None leaves the shape
            to the drafter.
        is_watched: what the model says in this step is shown to the drafters, which may draft in the next one; what became of
            drafts is shown to them anyway.
    """

    seq_id: int
    start: int
    num_tokens: int
    table_start: int
    new_block_ids: list[int]
    num_samples: int
    num_drafts: int = 0
    drafter: str = ""
    parents: tuple[int, ...] | None = None
    is_watched: bool = False


class Fork(msgspec.Struct, frozen=True):
    """`child_id` becomes a copy of `parent_id` and samples from the parent's logits of this step with its own noise.

    The child shares the parent's block table; `index` is its place among the request's n sequences.
    """

    parent_id: int
    child_id: int
    index: int


class StepPlan(msgspec.Struct, kw_only=True):
    """One step. The runner does, in this order: departures, arrivals, wipes, copies, forward, samples (forks too).

    Attributes:
        departures: sequences that the runner forgets.
        wipes: blocks to overwrite with zeros, before anyone may get them.
        copies: (source block, target block), whole blocks: copy-on-write.
    """

    plan_id: int
    sequences: list[SequencePlan] = []
    arrivals: list[NewSequence] = []
    forks: list[Fork] = []
    copies: list[tuple[int, int]] = []
    wipes: list[int] = []
    departures: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Positions computed by this step."""
        return sum([part.num_tokens for part in self.sequences])

    @property
    def num_attended(self) -> float:
        """Keys read by this step's attention, summed over the positions computed."""
        return sum([part.num_tokens * (part.start + (part.num_tokens + 1) / 2) for part in self.sequences])


class Sample(msgspec.Struct, frozen=True):
    """Tokens that one sequence gained in a step: accepted drafts, then the sampled one.

    Attributes:
        num_drafted: drafts that were verified; the KV positions planned for others were not used.
        accepted: places of the accepted ones among them, parents before children.
    """

    seq_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    num_drafted: int = 0
    accepted: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Sample(seq_id={self.seq_id}, num_tokens={len(self.token_ids)})"


MAX_SCORED_ROWS: Final = 256
"""Prompt positions whose logits are held at once where prompts are scored; the scheduler plans no more of one sequence in a
step."""


class StepResult(msgspec.Struct, kw_only=True):
    """What came out of a plan.

    Attributes:
        samples: one entry per sequence (forked children too) that sampled.
        prompt_logprobs: seq_id -> logprobs of the prompt tokens at the positions start + 1 .. start + num_tokens that
            are still prompt, in order.
        embeddings: seq_id -> vector of a prompt that was to be pooled and is computed to its end.
        failures: seq_id -> what to tell the client; such a sequence has no sample.
        complete: sequences whose grammar lets nothing follow their sample.
        elapsed_s: time the step took, for the budget and for every figure.
        draft_s: drafter -> what of that time it took.
        encode_s: what of that time images took that were encoded.
    """

    plan_id: int
    samples: list[Sample] = []
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, Embedding] = {}
    failures: dict[int, str] = {}
    complete: set[int] = set()
    elapsed_s: float = 0.0
    draft_s: dict[str, float] = {}
    encode_s: float = 0.0


class Stop(msgspec.Struct, frozen=True):
    """Output processing found the end of a sequence in the tokens of this step.

    Attributes:
        num_tokens: how many of the step's sampled tokens belong to the answer, the stopping one included.
        reason: the stop string or token id, None for EOS.
    """

    num_tokens: int
    reason: str | int | None = None

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Stop(num_tokens={self.num_tokens})"
