"""The budget of a step, in tokens and in time (Sarathi-Serve, Agrawal et al. 2024, section 4.3). Pure: no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.threat import Requirement, ThreatProfile

BUDGET_THREAT = ThreatProfile(
    row="adaptive tuning of the optimisations",
    threats=frozenset({Requirement.STATELESS, Requirement.NON_TARGETABLE}),
    residue="what the tuner learned",
    where=("host memory",),
    attack="infers the users' scenario",
    mitigations=("four coefficients of step time with exponential forgetting, which never leave the engine",),
)

MAX_STEP_S = 2.0
"""Upper limit of a step without decodes: longer steps gain nothing, and a watchdog would treat them as a stall."""


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """Limits on the size of a step.

    Attributes:
        max_tokens: maximum number of tokens.
        target_s: a fixed time for every step, or None for `max_stall`.
        max_stall: a prefill chunk may stretch a step to this multiple of its decode part.
        floor_s: a step up to this time is short enough for any stream, whatever its decode part.
        chunk: prefill is rounded down to multiples of this, and a step includes at least one, so that no prompt starves.
    """

    max_tokens: int = 2048
    target_s: float | None = None
    max_stall: float = 1.7
    floor_s: float = 0.0
    chunk: int = 8


class StepBudget:
    """The remaining budget of a step while it is being filled.

    Args:
        cost: the cost model of steps.
        config: limits on the size of the step.

    Attributes:
        num_tokens, num_left: tokens used, and tokens remaining.
    """

    __slots__ = ("_config", "_cost", "_limit_s", "_num_attended", "_num_read", "num_left", "num_tokens")

    def __init__(self, cost: StepCost, config: BudgetConfig) -> None:
        self._cost = cost
        self._config = config
        self._limit_s = MAX_STEP_S if config.target_s is None else config.target_s
        self.num_tokens = 0
        self.num_left = config.max_tokens
        self._num_attended = 0.0
        self._num_read = 0

    @property
    def size(self) -> StepSize:
        """The size used so far."""
        return StepSize(self.num_tokens, self._num_attended, self._num_read)

    @property
    def predicted_s(self) -> float:
        return self._cost.predict(self.size)

    def bound_by_decodes(self, plain: StepSize, floor_s: float = 0.0) -> None:
        """Limits the time of the step relative to its decodes, unless there is a fixed target.

        Args:
            plain: size of the step with one token for each decode and no drafts.
            floor_s: a step up to this time is short enough for these decodes.
        """
        if self._config.target_s is None:
            stalled_s = max(self._cost.predict(plain) * self._config.max_stall, self._config.floor_s, floor_s)
            self._limit_s = stalled_s if plain.num_tokens else MAX_STEP_S

    def share_for_drafts(self, plain: StepSize, drafted: StepSize) -> float:
        """Returns the fraction of a step's drafts, from 0 to 1, that fits into a quarter of the time by which the step may
        grow.

        Args:
            plain, drafted: size of the step without and with the drafts.
        """
        plain_s, drafted_s = self._cost.predict(plain), self._cost.predict(drafted)
        if drafted_s <= plain_s:
            return 1.0
        return min(1.0, max(0.0, (self._limit_s - plain_s) / 4 / (drafted_s - plain_s)))

    def bound_by_slack(self, slack: float) -> None:
        """Limits what is added from now on: it may lengthen the step by at most the ratio `slack`."""
        limit_s = self.predicted_s * slack
        self._limit_s = limit_s if self._config.target_s is None else min(limit_s, self._config.target_s)

    def spend(self, start: int, num_tokens: int) -> None:
        """Counts positions [start, start + num_tokens) of one sequence."""
        self.num_tokens += num_tokens
        self.num_left -= num_tokens
        self._num_attended += num_tokens * (start + (num_tokens + 1) / 2)
        self._num_read += start + num_tokens

    def admits(self, start: int) -> bool:
        """True if another decode at position `start` fits."""
        if self.num_left < 1:
            return False
        return self._cost.predict(self.size.plus(start, 1)) <= self._limit_s

    def fit(self, start: int, num_wanted: int, *, strict: bool = False) -> int:
        """Returns how many of the positions from `start` on fit into the remaining budget.

        One chunk always fits regardless of time, so that a prompt cannot starve behind decodes; `strict` disables this.
        """
        num_most = min(num_wanted, self.num_left)
        if num_most <= 0 or not self._cost.num_learned:
            return max(0, num_most)
        chunk = self._config.chunk
        num_fit = int(self._solve(start, self._limit_s - self.predicted_s))
        if num_fit >= num_most:
            return num_most
        num_fit -= num_fit % chunk
        return min(num_most, num_fit if strict else max(num_fit, chunk))

    def _solve(self, start: int, slack_s: float) -> float:
        """Returns the largest n >= 0 with b n + c (n start + n^2 / 2) + d (start + n) <= slack_s."""
        _, b, c, d = self._cost.coefficients
        slack_s -= d * start
        if slack_s <= 0:
            return 0.0
        linear = b + d + c * (start + 0.5)
        if c <= 0.0:
            return slack_s / linear if linear > 0 else float(self._config.max_tokens)
        return (math.sqrt(linear * linear + 2 * c * slack_s) - linear) / c
