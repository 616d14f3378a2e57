"""Decides how many tokens each sequence drafts: as many as increase its speed. Pure: no clock, no arrays, no content."""

from cloister.scheduler.speculation.adaptive import SPECULATION_THREAT, AdaptiveSpeculation, SpeculationConfig
from cloister.scheduler.speculation.decision import NO_DRAFTS, DraftDecision, DrafterLimits, Speculation
from cloister.scheduler.speculation.fixed import FixedSpeculation

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
