"""Statistics of one sequence for speculation: counts, and its exploration budget. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cloister.scheduler.speculation.acceptance_rates import AcceptanceRates
from cloister.scheduler.speculation.decision import DraftDecision

WATCHED: Final = DraftDecision(is_watched=True)
TRIAL_SHARE: Final = 0.008
"""Exploration budget: share of a sequence's time for drafts that are expected to lose. A sequence that gains nothing is 0.8%
slower."""
MAX_SAVED: Final = 1.0
"""Upper limit of the time saved for trials, in steps."""
MAX_UNPROVEN: Final = 0.4
"""Time that a sequence's drafts may take before the first one is accepted, relative to its share of a step's time."""


@dataclass(slots=True)
class SequenceStats:
    """Statistics of one sequence.

    Attributes:
        rates: by drafter.
        is_proven: a draft was accepted, or the prior comes from other requests.
        decision: decision in force; drafters observe the step that ends a prompt.
        saved_s: time saved for trials.
        unproven_s: time of drafts while none was accepted.
        trial: the drafter on trial in the next step, for `trial_size` drafts.
        was_longer: the last trial was for more drafts of the same drafter.
        last_asked: drafter -> step of its last trial or use.
    """

    rates: dict[str, AcceptanceRates]
    is_proven: bool
    decision: DraftDecision = WATCHED
    saved_s: float = 0.0
    unproven_s: float = 0.0
    trial: str = ""
    trial_size: int = 0
    was_longer: bool = False
    last_asked: dict[str, int] = field(default_factory=dict)

    def accrue(self, took_s: float, plain_s: float) -> None:
        """Adds to the time saved for trials.

        Args:
            took_s: this sequence's share of the elapsed time.
            plain_s: time of a step without drafts.
        """
        self.saved_s = min(self.saved_s + TRIAL_SHARE * took_s, MAX_SAVED * plain_s)
        self.unproven_s = max(0.0, self.unproven_s - TRIAL_SHARE * took_s)

    def bound(self, most: int, share_s: float, row_s: float) -> int:
        """Returns how many of `most` drafts this sequence can afford to lose.

        Args:
            share_s: its share of a step without drafts.
            row_s: seconds of a draft.
        """
        if self.is_proven:
            return most
        return min(most, int(max(0.0, MAX_UNPROVEN * share_s - self.unproven_s) / max(row_s, 1e-9)))
