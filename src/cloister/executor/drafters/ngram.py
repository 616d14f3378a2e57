"""Drafts from earlier text: finds the longest suffix of the known tokens that occurred before, and drafts what followed it.

Prompt lookup (Saxena 2023) and LLMA (Yang et al. 2023, section 3), which copy from the prompt or from references; this one
copies from prompt and output. The length of a draft depends on the length of the match.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Final

from cloister.executor.drafters.base import DRAFTERS, NOTHING, Draft, Drafter, DrafterContext, DraftRequest
from cloister.executor.drafters.occurrences import BYTES_PER_TOKEN, Occurrences
from cloister.executor.drafters.token_trees import Trie, fill_shape
from cloister.types.threat import Requirement, ThreatProfile

THREAT = ThreatProfile(
    row="context- or datastore-based speculation (REST, Token Recycling, LLMA)",
    threats=frozenset({Requirement.STATELESS}),
    residue="positions of n-grams of the request, until it departs",
    where=("memory of the engine process",),
    attack="another request's draft, or a memory dump, reveals the text",
    mitigations=("an index for each sequence, of its own tokens alone", "overwritten when the sequence departs"),
)
MAX_DRAFTS: Final = 32
MATCH_RATES: Final = (0.0, 0.32, 0.6, 0.66, 0.73, 0.85, 0.86, 0.87, 0.95)
"""Probability that the token after a match is right, by length of the match (last entry: this long or longer)."""
LEAST_WEIGHT: Final = 0.1
"""Tokens that are less likely than this are not drafted."""
RECENCY: Final = 0.5
"""Weight of each earlier match relative to the next later one."""


def _chances(num_matched: int) -> list[float]:
    """Returns the probability that a draft is accepted up to each of its tokens, down to the threshold."""
    last = len(MATCH_RATES) - 1
    rates = [MATCH_RATES[min(num_matched + depth, last)] for depth in range(MAX_DRAFTS)]
    return [chance for chance in accumulate(rates, mul) if chance >= LEAST_WEIGHT]


_CHANCES: Final = tuple(_chances(num_matched) for num_matched in range(len(MATCH_RATES)))


class NgramDrafter(Drafter):
    """Drafts from each sequence's own text.

    Args:
        block_size: of the model's KV blocks, for the memory budget.
    """

    max_drafts = MAX_DRAFTS

    def __init__(self, block_size: int) -> None:
        self.kv_block_bytes = BYTES_PER_TOKEN * block_size
        self._occurrences: dict[int, Occurrences] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def forget(self, seq_id: int) -> None:
        if (occurrences := self._occurrences.pop(seq_id, None)) is not None:
            occurrences.wipe()

    def _draft(self, request: DraftRequest) -> Draft:
        tokens = request.state.tokens
        occurrences = self._occurrences.get(request.state.seq_id)
        if occurrences is None:
            occurrences = self._occurrences[request.state.seq_id] = Occurrences()
        matches = occurrences.find(tokens)
        if not matches or request.num_drafts < 1:
            return NOTHING
        if len(matches) > 1:
            draft = _merge(tokens, matches).best(
                MAX_DRAFTS if request.parents is not None else request.num_drafts, LEAST_WEIGHT
            )
        else:
            num_matched, end = matches[0]
            draft = Draft(copy_from(tokens, end, min(len(_chances_at(num_matched)), request.num_drafts)))
        return draft if request.parents is None else fill_shape(draft, request.parents[: request.num_drafts])


def _chances_at(num_matched: int) -> list[float]:
    return _CHANCES[min(num_matched, len(_CHANCES) - 1)]


def _merge(tokens: array[int], matches: list[tuple[int, int]]) -> Trie:
    """Merges the continuations of several matches into one tree; later matches weigh more."""
    trie = Trie()
    share = (1 - RECENCY) / (1 - RECENCY ** len(matches))
    for num_matched, end in matches:
        chances = _chances_at(num_matched)
        trie.add(copy_from(tokens, end, len(chances)), [share * chance for chance in chances])
        share *= RECENCY
    return trie


def copy_from(tokens: array[int], start: int, count: int) -> list[int]:
    """Returns `count` tokens from `start` on; beyond the end the copy repeats itself, as in LZ77."""
    copied = tokens[start : start + count].tolist()
    while len(copied) < count:
        copied += copied[: count - len(copied)]
    return copied


@DRAFTERS.register("ngram", THREAT)
def make_ngram_drafter(context: DrafterContext) -> Drafter:
    """Creates the drafter (`DrafterFactory`); it needs no files."""
    return NgramDrafter(context.block_size)
