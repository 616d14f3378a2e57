"""How many tokens each sequence drafts: as many as pay, none where that would cost. Pure: no clock, no arrays, no content."""

from cloister.sched.speculation.adaptive import SPECULATION_THREAT, AdaptiveSpeculation, SpeculationConfig
from cloister.sched.speculation.choice import NO_DRAFTS, Choice, DrafterLimits, Speculation
from cloister.sched.speculation.fixed import FixedSpeculation

__all__ = [
    "NO_DRAFTS",
    "SPECULATION_THREAT",
    "AdaptiveSpeculation",
    "Choice",
    "DrafterLimits",
    "FixedSpeculation",
    "Speculation",
    "SpeculationConfig",
]
