"""The sizes of a virtual engine, and the times of its steps. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cloister.cluster.virtual.drafts import DraftKind
from cloister.cluster.virtual.kv_links import FREE_LINKS, LinkCosts
from cloister.types.step import StepPlan

PoolKind = Literal["none", "shared", "peer"]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of an engine, and the times of its steps.

    Attributes:
        stall_floor_s: a step up to this time is short enough for any stream (`scheduler.budget.BudgetConfig.floor_s`).
        step_s, token_s, sample_s, key_s, read_s: a step takes `step_s`, and that much more for each of its tokens and samples,
            for each key that a token of a prompt attends to, and for each key that an answer's next token reads.
        process_s: that much more for each sample of a sequence whose logits are processed on the host: for penalties, biases
            or log-probabilities (`types.step.StepResult.sampling_s`).
        arrival_s, load_s: that much more for each sequence that comes, and for each block of KV that comes from another engine.
        links: what its links to other engines take, beside its steps.
        curve: points (tokens of a step, seconds), by rising tokens: that much more, on the line between two points; beyond the
            last one, on the line through the last two. Few tokens take as long as the weights take to be read, and kernels are
            faster with many, so time is not proportional to them.
        start_s: from the start of its process until it is ready.
        weights: 0, or others: an engine of them says something else.
        policy: in which order its scheduler computes requests.
        num_adapters: number of adapters loaded at its start.
        drafts: what its drafter makes, if it has one.
        helper_s: compiling a grammar takes up to this time beside its steps, and a mask a tenth of it.
        tiers: slots of its KV tiers in memory and on disk; 0 for none.
        damages_tiers: share of what goes wrong there (`virtual.tier_threads`).
        pool: the tier in memory is one that engines share, or in which they lend each other slots.
    """

    num_blocks: int = 64
    block_size: int = 8
    max_num_seqs: int = 8
    max_waiting: int = 16
    max_model_len: int = 256
    max_batched_tokens: int = 64
    stall_floor_s: float = 0.0
    step_s: float = 0.01
    token_s: float = 0.0002
    sample_s: float = 0.0
    key_s: float = 0.0
    read_s: float = 0.0
    process_s: float = 0.0
    arrival_s: float = 0.0
    load_s: float = 0.0
    links: LinkCosts = FREE_LINKS
    curve: tuple[tuple[int, float], ...] = ()
    start_s: float = 0.5
    weights: int = 0
    policy: str = "fcfs"
    num_adapters: int = 0
    drafts: DraftKind = "none"
    helper_s: float = 0.0
    tiers: tuple[int, int] = (0, 0)
    damages_tiers: float = 0.0
    pool: PoolKind = "none"

    @property
    def fingerprint(self) -> str:
        """Of the weights."""
        return f"history {self.weights}"

    def step_time_s(self, plan: StepPlan) -> float:
        """Returns the seconds that a step takes."""
        elapsed_s = self.step_s + self.token_s * plan.num_tokens + self.sample_s * len(plan.forks)
        elapsed_s += self.arrival_s * len(plan.arrivals) + self.load_s * len(plan.loads)
        elapsed_s += interpolate(self.curve, plan.num_tokens)
        for part in plan.sequences:
            num_attended = part.num_tokens * (part.start + (part.num_tokens + 1) / 2)
            is_prompt = part.num_tokens > 1 or not part.num_samples
            elapsed_s += self.sample_s * part.num_samples + (self.key_s if is_prompt else self.read_s) * num_attended
        return elapsed_s


def interpolate(curve: Sequence[tuple[int, float]], num_tokens: int) -> float:
    """Returns the seconds of `num_tokens` tokens on a curve (`EngineShape.curve`); 0 without points."""
    if not curve:
        return 0.0
    if len(curve) == 1:
        return curve[0][1]
    end = min(max(1, bisect_left(curve, num_tokens, key=lambda point: point[0])), len(curve) - 1)
    (before, before_s), (after, after_s) = curve[end - 1 : end + 1]
    return max(0.0, before_s + (after_s - before_s) * (num_tokens - before) / (after - before))
