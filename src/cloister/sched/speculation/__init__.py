"""How many tokens each sequence drafts: as many as pay, none where that would cost. Pure: no clock, no arrays, no content."""

from cloister.sched.speculation.adaptive import SPECULATION_THREAT, AdaptiveSpeculation, SpeculationConfig
from cloister.sched.speculation.decision import NO_DRAFTS, DraftDecision, DrafterLimits, Speculation
from cloister.sched.speculation.fixed import FixedSpeculation

__all__ = [
    "NO_DRAFTS",
    "SPECULATION_THREAT",
    "AdaptiveSpeculation",
    "DraftDecision",
    "DrafterLimits",
    "FixedSpeculation",
    "Speculation",
    "SpeculationConfig",
]
