"""REST (He et al. 2023): drafts continuations of the last tokens from a datastore of public text, as a tree, most likely first.

It keeps no state of requests, and never adds to the datastore.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cloister.executor.drafters.base import DRAFTERS, NOTHING, Draft, Drafter, DrafterContext, DraftRequest
from cloister.executor.drafters.datastore import BUILD, HEADER, Continuations, Datastore
from cloister.executor.drafters.token_trees import fill_shape
from cloister.models.generation import digest_tokenizer
from cloister.types.errors import ConfigError
from cloister.types.threat import Requirement, ThreatProfile

THREAT = ThreatProfile(
    row="context- or datastore-based speculation (REST, Token Recycling, LLMA)",
    threats=frozenset({Requirement.STATELESS}),
    residue="none of requests: the datastore is built beforehand, and read only",
    where=("host memory", "SSD"),
    attack="accepted drafts reveal the content of a datastore of private text",
    mitigations=("only text that the builder of the datastore declares public", "no request is ever added"),
)
MAX_DRAFTS: Final = 32
MAX_MATCH: Final = 12
"""Length of the longest suffix that is looked up."""
MAX_DEPTH: Final = 16
NUM_SAMPLED: Final = 32
"""Number of continuations that are read, evenly spaced in sorted order, so that frequencies match those of the whole range."""
DOUBTS: Final = (5.0, 3.0, 2.0, 1.5, 1.2, 1.0, 0.6, 0.4, 0.3)
"""Pseudo-count of unseen continuations, by length of the match from 1 on (last entry: this long or longer)."""
LEAST_CHANCE: Final = 0.06
"""Tokens that are less likely than this are not drafted."""


class RestDrafter(Drafter):
    """Drafts from a datastore."""

    max_drafts = MAX_DRAFTS

    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore
        self.fixed_bytes = datastore.num_bytes

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        length, start, end = self._find_longest(request.state.tokens)
        if not length or request.num_drafts < 1:
            return NOTHING
        if request.parents is not None:
            return fill_shape(self._grow(length, start, end, MAX_DRAFTS), request.parents[: request.num_drafts])
        return self._grow(length, start, end, min(request.num_drafts, MAX_DRAFTS))

    def _find_longest(self, tokens: array[int]) -> tuple[int, int, int]:
        """Returns (length, start, end): the longest suffix of the known tokens in the datastore, and its range.

        A suffix is present if a longer one is, so binary search finds the length.
        """
        suffix = tokens[-MAX_MATCH:].tolist()
        found, least, most = (0, 0, 0), 1, len(suffix)
        length = min(4, most)  # most are about this long
        while least <= most:
            start, end = self._datastore.find(suffix[-length:])
            if start < end:
                found, least = (length, start, end), length + 1
            else:
                most = length - 1
            length = (least + most + 1) // 2
        return found

    def _grow(self, length: int, start: int, end: int, num_drafts: int) -> Draft:
        """Builds a tree of the continuations in a range, best first; no child is more likely than its parent."""
        step = -(-(end - start) // NUM_SAMPLED)
        rows = self._datastore.read(start, end, step, length, MAX_DEPTH)
        token_ids: list[int] = []
        parents: list[int] = []
        heap = _children(rows, step, length, _Node(-1.0, -1, -1, 0, len(rows), 0))
        heapq.heapify(heap)
        while heap and len(token_ids) < num_drafts:
            node = heapq.heappop(heap)
            token_ids.append(node.token)
            parents.append(node.parent)
            for child in _children(rows, step, length, node._replace(parent=len(parents) - 1)):
                heapq.heappush(heap, child)
        return Draft(token_ids, parents)


class _Node(NamedTuple):
    """Rows that have the same tokens up to a depth; `negative` is their negated probability, for a min-heap."""

    negative: float
    parent: int
    token: int
    first: int
    last: int
    depth: int


def _children(rows: Continuations, step: int, length: int, node: _Node) -> list[_Node]:
    """Returns the sufficiently likely children of a node; `node.parent` is its own index in the draft."""
    negative, place, _, first, last, depth = node
    num_found = (last - first) * step
    trust = negative / (num_found + DOUBTS[min(length + depth, len(DOUBTS)) - 1]) * step
    return [
        _Node(trust * (end - start), place, token, start, end, depth + 1)
        for token, start, end in rows.split(first, last, depth)
        if trust * (end - start) <= -LEAST_CHANCE
    ]


@DRAFTERS.register("rest", THREAT)
def make_rest_drafter(context: DrafterContext) -> Drafter:
    """Creates the drafter (`DrafterFactory`) with the datastore from the settings or the model's directory."""
    if context.files is None and not (context.model_path / "drafters" / "rest" / HEADER).is_file():
        raise ConfigError(f"this model brings no datastore to draft from; {BUILD}, and name it", param="datastore")
    path = context.model_path / "drafters" / "rest" if context.files is None else Path(context.files).expanduser()
    return RestDrafter(Datastore(path, digest_tokenizer(context.model_path), context.vocab_size))
