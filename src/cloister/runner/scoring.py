"""What requests want to know of the tokens of a step: log-probabilities, and why there is none to choose."""

from __future__ import annotations

from typing import Final

import numpy as np

from cloister.runner.inputs import Part
from cloister.runner.logprobs import FloatArray, IntArray, token_logprobs
from cloister.runner.state import SequenceState
from cloister.types.request import TokenLogprobs

NOT_FINITE: Final = "the model computed a value that is not a finite number; send the request again or choose another dtype"
NOTHING_LEFT: Final = "logit_bias, min_tokens and the grammar leave no token to choose; relax one of them"


def sample_logprobs(
    states: list[SequenceState], rows: list[int], logits: FloatArray, tokens: IntArray
) -> dict[int, list[TokenLogprobs]]:
    """Returns place -> logprobs of the token chosen there, for the sequences that want them."""
    wanting = [place for place, state in enumerate(states) if state.sampling.logprobs is not None and tokens[place] >= 0]
    if not wanting:
        return {}
    num_top = np.array([states[place].sampling.logprobs for place in wanting], np.int64)
    entries = token_logprobs(logits[[rows[place] for place in wanting]], tokens[wanting], num_top)
    return {place: [entry] for place, entry in zip(wanting, entries, strict=True)}


def prompt_logprobs(parts: list[Part], rows: dict[int, slice], logits: FloatArray) -> dict[int, list[TokenLogprobs]]:
    """Returns seq_id -> logprobs of the prompt tokens at the positions start + 1 onwards."""
    found = {}
    for part in parts:
        if part.state.failure is not None:
            continue
        start, count = part.plan.start, part.num_prompt_rows
        first = rows[part.plan.seq_id].start
        ids = np.array(part.state.tokens[start + 1 : start + 1 + count], np.int64)
        num_top = np.full(count, part.state.sampling.prompt_logprobs, np.int64)
        found[part.plan.seq_id] = token_logprobs(logits[first : first + count], ids, num_top)
        ids.fill(0)  # numpy keeps the memory of small arrays for others, as it is
    return found
