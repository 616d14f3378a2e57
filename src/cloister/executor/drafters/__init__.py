"""Drafters, which propose tokens for the model to verify: one per file, selected by name."""

from cloister.executor.drafters import (
    blockwise,
    draft_model,
    long_spec,
    lookahead,
    medusa,
    mtp,
    ngram,
    recycling,
    rest,
    spec_infer,
)
from cloister.executor.drafters.base import (
    DRAFTERS,
    NOTHING,
    Draft,
    Drafter,
    DrafterContext,
    DraftRequest,
    HiddenRows,
    VerifyFeedback,
)

__all__ = [
    "DRAFTERS",
    "NOTHING",
    "Draft",
    "DraftRequest",
    "Drafter",
    "DrafterContext",
    "HiddenRows",
    "VerifyFeedback",
    "blockwise",
    "draft_model",
    "long_spec",
    "lookahead",
    "medusa",
    "mtp",
    "ngram",
    "recycling",
    "rest",
    "spec_infer",
]
