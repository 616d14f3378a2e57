"""What drafts tokens for the model to verify: one drafter a file, found by name."""

from cloister.runner.drafters import blockwise, medusa, ngram, rest
from cloister.runner.drafters.base import DRAFTERS, NOTHING, Draft, DraftAsk, Drafter, DraftingPlace, Seen

__all__ = [
    "DRAFTERS",
    "NOTHING",
    "Draft",
    "DraftAsk",
    "Drafter",
    "DraftingPlace",
    "Seen",
    "blockwise",
    "medusa",
    "ngram",
    "rest",
]
