"""The last output of a sequence, from the event that ended it."""

from __future__ import annotations

from typing import Final

from cloister.types.events import Ended
from cloister.types.request import FinishReason, SequenceOutput

ABORTED: Final = "the request was ended before its answer was complete: nobody waited for it, or the server is shutting down"


def end_output(ended: Ended) -> SequenceOutput:
    """Returns the last output of a sequence that gained nothing more."""
    return SequenceOutput(
        request_id=ended.request_id,
        index=ended.index,
        finish_reason=ended.reason,
        stop_reason=ended.stop_reason,
        error=ended.error or (ABORTED if ended.reason is FinishReason.ABORT else None),
        num_prompt_tokens=ended.num_prompt_tokens,
        num_output_tokens=ended.num_output_tokens,
        num_cached_tokens=ended.num_cached_tokens,
    )
