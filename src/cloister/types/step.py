"""The interface of scheduler and executor: the plan of one step, and its result.

A plan holds counts and blocks, never token ids of running sequences: the runner keeps those, so a plan can be made while the
previous step still runs.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cloister.types.documents import Documents
from cloister.types.images import ImageTile
from cloister.types.layerwise import LayerwisePlan
from cloister.types.request import Embedding, PoolingParams, SamplingParams, TokenLogprobs


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that is new to the runner, or resumed after preemption.

    Attributes:
        token_ids: prompt, and output from before a preemption.
        num_prompt_tokens: number of prompt tokens among them.
        seed: key of the sampling noise, with `index` and the position (batch invariance).
        index: which of the request's n sequences.
        stop_token_ids: ids that end the sequence (including EOS unless ignored); masked until `min_tokens`.
        images: images in the prompt (`Request.images`).
        documents: parts of the prompt that are encoded separately; no plan's positions of it are in two of them.
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
    documents: Documents | None = None

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"NewSequence(seq_id={self.seq_id}, num_tokens={len(self.token_ids)})"


class SequencePlan(msgspec.Struct, kw_only=True):
    """The part of one sequence in a step: compute positions [start, start + num_tokens).

    Attributes:
        table_start, new_block_ids: the block table from index `table_start` on becomes `new_block_ids`.
        num_samples: tokens to sample after the last position: 0 while a prompt is incomplete, else 1. Each accepted draft adds
            one.
        num_drafts: how many of the last `num_tokens` the runner drafts; an upper bound.
        drafter: name of the drafter; empty for none.
        parents: for each draft the index of its parent draft, -1 for the last known token; None lets the drafter choose the
            shape.
        is_watched: drafters observe the model's output of this step, and may draft in the next one. They always observe
            verified drafts.
        layerwise: how `start` and `num_tokens` are meant if the prompt is computed layer by layer; None if in all layers.
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
    layerwise: LayerwisePlan | None = None


class Fork(msgspec.Struct, frozen=True):
    """`child_id` becomes a copy of `parent_id` and samples from the parent's logits of this step with its own noise.

    The child shares the parent's block table; `index` is its place among the request's n sequences.
    """

    parent_id: int
    child_id: int
    index: int


class BlockLoad(msgspec.Struct, frozen=True, gc=False):
    """A block takes contents that another engine computed (`Program.import_blocks`)."""

    block: int
    content: bytes | memoryview

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"BlockLoad(block={self.block})"


class StepPlan(msgspec.Struct, kw_only=True):
    """One step. The runner processes, in this order: departures, arrivals, encodes, wipes, loads, copies, forward,
    samples (including forks).

    Attributes:
        departures: sequences that the runner drops.
        encodes: (seq_id, first position) of images whose encoding begins. It goes on beside later steps; until `EncodedImage`
            says that it is done, no plan reaches their positions.
        wipes: blocks to overwrite with zeros before they are reused.
        loads: blocks whose contents come from another engine.
        copies: (source block, target block), whole blocks: copy-on-write.
    """

    plan_id: int
    sequences: list[SequencePlan] = []
    arrivals: list[NewSequence] = []
    forks: list[Fork] = []
    copies: list[tuple[int, int]] = []
    wipes: list[int] = []
    loads: list[BlockLoad] = []
    departures: list[int] = []
    encodes: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        """Positions computed by this step."""
        return sum([part.num_tokens for part in self.sequences])

    @property
    def num_attended(self) -> float:
        """Keys read by this step's attention, summed over the positions computed."""
        return sum([part.num_tokens * (part.start + (part.num_tokens + 1) / 2) for part in self.sequences])


class Sample(msgspec.Struct, frozen=True):
    """New tokens of one sequence in a step: accepted drafts, then the sampled one.

    Attributes:
        num_drafted: number of verified drafts; KV positions planned for further drafts were not used.
        accepted: indices of the accepted drafts, parents before children.
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
"""Most prompt positions of one sequence in a step if prompts are scored, because their logits are held at once."""


class StepResult(msgspec.Struct, kw_only=True):
    """The result of a plan.

    Attributes:
        samples: one entry per sequence that sampled, including forked children.
        prompt_logprobs: seq_id -> logprobs of the prompt tokens at the positions start + 1 .. start + num_tokens that
            are still prompt, in order.
        embeddings: seq_id -> vector of a pooled prompt that is complete.
        failures: seq_id -> message for the client; such a sequence has no sample.
        unsupported: those of `failures` that are the request's fault: its grammar cannot be followed.
        complete: sequences whose grammar is complete after their sample.
        deferred: sequences that should have got a token and did not, as the mask of their grammar was late, or their last token
            is. They compute the position of their last known token again.
        left_out: those of `deferred` whose last planned position this step did not compute.
        elapsed_s: duration of the step, for the budget and metrics.
        sampling_s: part of it that depends on what requests ask of sampling (`executor.sampling_time`).
        draft_s: drafter -> its share of that time.
    """

    plan_id: int
    samples: list[Sample] = []
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    embeddings: dict[int, Embedding] = {}
    failures: dict[int, str] = {}
    unsupported: set[int] = set()
    complete: set[int] = set()
    deferred: set[int] = set()
    left_out: set[int] = set()
    elapsed_s: float = 0.0
    sampling_s: float = 0.0
    draft_s: dict[str, float] = {}


class EncodedImage(msgspec.Struct, frozen=True):
    """The encoding of an image has ended (`StepPlan.encodes`).

    Attributes:
        offset: number of its first position.
        error: why it failed, as a message for the client; empty if it did not.
    """

    seq_id: int
    offset: int
    error: str = ""


class Stop(msgspec.Struct, frozen=True):
    """Output processing found the end of a sequence in the tokens of this step.

    Attributes:
        num_tokens: number of the step's sampled tokens that belong to the answer, including the stopping one.
        reason: the stop string or token id, None for EOS.
    """

    num_tokens: int
    reason: str | int | None = None

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Stop(num_tokens={self.num_tokens})"
