"""What is kept of one sequence that may draft: counts, and the time that it may spend on what may not pay. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cloister.scheduler.speculation.acceptance_rates import AcceptanceRates
from cloister.scheduler.speculation.decision import DraftDecision

WATCHED: Final = DraftDecision(is_watched=True)
TRIAL_SHARE: Final = 0.008
"""Of a sequence's time that may go into drafts that are expected to lose: a sequence that gains nothing is 0.8% slower."""
MOST_SAVED: Final = 1.0
"""Steps' time that a sequence saves for trials at most."""
MOST_UNPROVEN: Final = 0.4
"""Of a sequence's part of a step's time: what its drafts may take before the first one is accepted."""


@dataclass(slots=True)
class SequenceStats:
    """One sequence.

    Attributes:
        rates: by drafter.
        is_proven: a draft was accepted, or the prior is what others' drafts were worth.
        decision: in force; the step that ends a prompt is shown to drafters.
        saved_s: time for trials.
        unproven_s: time that drafts took while none was accepted.
        trial: the drafter on trial in the next step, for `trial_size` drafts.
        was_longer: the last trial was of more drafts of the same drafter.
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

    def pass_time(self, took_s: float, plain_s: float) -> None:
        """Saves for trials.

        Args:
            took_s: this sequence's part of the time that passed.
            plain_s: of a step without drafts.
        """
        self.saved_s = min(self.saved_s + TRIAL_SHARE * took_s, MOST_SAVED * plain_s)
        self.unproven_s = max(0.0, self.unproven_s - TRIAL_SHARE * took_s)

    def bound(self, most: int, share_s: float, row_s: float) -> int:
        """Returns how many of `most` drafts this sequence can bear to lose.

        Args:
            share_s: its part of a step without drafts.
            row_s: what a draft takes.
        """
        if self.is_proven:
            return most
        return min(most, int(max(0.0, MOST_UNPROVEN * share_s - self.unproven_s) / max(row_s, 1e-9)))
