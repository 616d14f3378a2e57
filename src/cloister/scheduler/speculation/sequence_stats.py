"""What is kept of one sequence that may draft: counts, and the time that it may spend on what may not pay. Pure."""

from __future__ import annotations

from typing import Final

from cloister.scheduler.speculation.decision import DraftDecision
from cloister.scheduler.speculation.rates import Rates

WATCHED: Final = DraftDecision(is_watched=True)
TRIAL_SHARE: Final = 0.008
"""Of a sequence's time that may go into trials of what is expected to lose."""
MOST_SAVED: Final = 1.0
"""Steps' time that a sequence saves for trials at most."""
MOST_LOST: Final = 0.4
"""Of a sequence's part of a step's time: what its drafts may take before the first one is accepted."""
LOST_SHARE: Final = 0.008
"""Of a sequence's time that they may take besides."""


class SequenceStats:
    """One sequence.

    Attributes:
        choice: in force.
        rates: by drafter.
        saved_s: time for trials.
        is_proven: a draft was accepted, or the prior is what others' drafts were worth.
        lost_s: time that drafts took while none was accepted.
        num_misses: drafts in a row that brought nothing.
        trial: the drafter on trial in the next step, for `trial_size` drafts.
        is_for_more: the last trial was for more drafts of the same drafter.
        tried: drafter -> step of its last trial or use.
    """

    __slots__ = (
        "choice", "is_for_more", "is_proven", "lost_s", "num_misses", "rates", "saved_s", "trial", "trial_size", "tried"
    )  # fmt: skip

    def __init__(self, *, is_proven: bool) -> None:
        self.choice = WATCHED  # the step that ends a prompt is
        self.rates: dict[str, Rates] = {}
        self.saved_s = 0.0
        self.is_proven = is_proven
        self.lost_s = 0.0
        self.num_misses = 0
        self.is_for_more = False
        self.trial = ""
        self.trial_size = 0
        self.tried: dict[str, int] = {}

    def go_on(self, took_s: float, plain_s: float) -> None:
        """Takes in that time passed.

        Args:
            took_s: this sequence's part of it.
            plain_s: of a step without drafts.
        """
        self.saved_s = min(self.saved_s + TRIAL_SHARE * took_s, MOST_SAVED * plain_s)
        self.lost_s = max(0.0, self.lost_s - LOST_SHARE * took_s)

    def bound(self, most: int, share_s: float, row_s: float) -> int:
        """Returns how many of `most` drafts this sequence can bear to lose.

        Args:
            share_s: its part of a step without drafts.
            row_s: what a draft takes.
        """
        if self.is_proven:
            return most
        left_s = max(0.0, MOST_LOST * share_s - self.lost_s)
        return min(most, int(left_s / max(row_s, 1e-9)))
