"""SpecInfer (Miao et al. 2024): the predictions of one or several small models, merged into one token tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cloister.backends.base import KVLayout
from cloister.executor.drafters.base import DRAFTERS, NOTHING, Draft, Drafter, DrafterContext, DraftModel, DraftRequest
from cloister.executor.drafters.branches import DraftTree, TreeGrower, kept_chain
from cloister.executor.drafters.draft_files import open_drafts
from cloister.executor.drafters.draft_model import DRAFT_MODEL_THREAT, FollowingDrafter
from cloister.executor.drafters.token_trees import grow_shape

RATES: Final = ((0.401, 0.113, 0.059, 0.038, 0.028, 0.022),) * 8
"""Acceptance rate of the child of each rank, at any depth: cloister-draft for cloister-5m (`benchmarks/drafters.py`)."""
MAX_NODES: Final = 16


class SpecInferDrafter(FollowingDrafter):
    """Drafts trees of a fixed shape, cut to the best nodes that a request wants.

    Args:
        models: draft the children of a node in turn, the best model first.
    """

    def __init__(self, context: DrafterContext, models: Sequence[DraftModel]) -> None:
        super().__init__(context, models)
        self.shape = grow_shape(RATES, MAX_NODES)
        self.max_drafts = len(self.shape)
        self._grower: TreeGrower | None = None

    def allocate(self, kv: KVLayout) -> None:
        """Builds the small models, with as many KV blocks as the model has."""
        super().allocate(kv)
        self._grower = TreeGrower(self._programs, self._context.vocab_size, kv.block_size, self._context.sampling_metadata)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a tree for each request; `NOTHING` while the small models catch up, or beyond their maximum position."""
        drafts = [NOTHING] * len(requests)
        ready = self._begin(requests)
        if ready and self._grower is not None:
            shapes = [(requests[place].parents or self.shape or ())[: stretch.num_drafts] for place, stretch in ready]
            trees = self._grower.grow([stretch for _, stretch in ready], shapes)
            for (place, stretch), tree in zip(ready, trees, strict=True):
                # with several models not all compute the deepest level; count what all of them computed
                chain = kept_chain(tree.parents) if len(self._models) == 1 else []
                self._keep(stretch, [tree.token_ids[node] for node in chain], num_written=stretch.num_drafts - 1)
                drafts[place] = _pruned(tree)
        return drafts


def _pruned(tree: DraftTree) -> Draft:
    """Returns a tree without nodes that could not be chosen, their descendants, and nodes after the end of the sequence."""
    stops = tree.stretch.state.stops
    places: list[int] = []
    new_places = {-1: -1}
    for place, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if token >= 0 and parent in new_places:
            if token not in stops:
                new_places[place] = len(places)
            places.append(place)
    parents = [new_places[tree.parents[place]] for place in places]
    probs = tree.probs
    if len(places) < len(tree.token_ids):
        probs = None if probs is None else probs[places]
    return Draft([tree.token_ids[place] for place in places], parents, probs)


@DRAFTERS.register("spec_infer", DRAFT_MODEL_THREAT)
def make_spec_infer(context: DrafterContext) -> Drafter:
    """Opens the small models (errors as in `open_drafts`)."""
    return SpecInferDrafter(context, open_drafts(context))
