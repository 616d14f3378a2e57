"""Log-probabilities of the model's own distribution, for requests that want them: before temperature, penalties and
truncation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cloister.executor.inputs import ScheduledSequence
from cloister.executor.sampling import row_pieces
from cloister.executor.state import SequenceState
from cloister.types.request import TokenLogprobs

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def sample_logprobs(
    states: list[SequenceState], rows: list[int], logits: FloatArray, tokens: IntArray
) -> dict[int, list[TokenLogprobs]]:
    """Returns index -> logprobs of the chosen token, for the sequences that want them."""
    wanting = [place for place, state in enumerate(states) if state.sampling.logprobs is not None and tokens[place] >= 0]
    if not wanting:
        return {}
    num_top = np.array([states[place].sampling.logprobs for place in wanting], np.int64)
    entries = token_logprobs(logits[[rows[place] for place in wanting]], tokens[wanting], num_top)
    return {place: [entry] for place, entry in zip(wanting, entries, strict=True)}


def prompt_logprobs(
    parts: list[ScheduledSequence], rows: dict[int, slice], logits: FloatArray
) -> dict[int, list[TokenLogprobs]]:
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
        ids.fill(0)  # numpy caches the memory of small arrays without clearing it
    return found


def token_logprobs(logits: FloatArray, token_ids: IntArray, num_top: IntArray) -> list[TokenLogprobs]:
    """Returns one entry per row.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: [num_rows], the chosen tokens.
        num_top: [num_rows], number of most likely tokens to list; lower ids first among equal ones.
    """
    entries: list[TokenLogprobs] = []
    for piece in row_pieces(*logits.shape):
        entries += _piece_logprobs(logits[piece], token_ids[piece], num_top[piece])
    return entries


def _piece_logprobs(logits: FloatArray, token_ids: IntArray, num_top: IntArray) -> list[TokenLogprobs]:
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    chosen = shifted[np.arange(len(token_ids)), token_ids] - log_sum
    tops = _most_likely(shifted, log_sum, np.minimum(num_top, logits.shape[1]))
    return [
        TokenLogprobs(token_id=token, logprob=logprob, top=top)
        for token, logprob, top in zip(token_ids.tolist(), chosen.tolist(), tops, strict=True)
    ]


def _most_likely(shifted: FloatArray, log_sum: FloatArray, num_top: IntArray) -> list[tuple[tuple[int, float], ...]]:
    """Lists the `num_top` most likely tokens of every row, best first."""
    widest = int(num_top.max(initial=0))
    if widest == 0:
        return [()] * len(num_top)
    start = shifted.shape[1] - widest
    least = np.partition(shifted, start, axis=1)[:, start]
    rows, ids = np.nonzero(shifted >= least[:, None])
    values = shifted[rows, ids]
    order = np.lexsort((ids, -values, rows))
    logprobs = values[order] - log_sum[rows]
    pairs = list(zip(ids[order].tolist(), logprobs.tolist(), strict=True))
    starts = np.searchsorted(rows, np.arange(len(num_top))).tolist()
    return [tuple(pairs[first : first + count]) for first, count in zip(starts, num_top.tolist(), strict=True)]
