"""SpecInfer (Miao et al. 2024): the guesses of one small model or several, merged into one token tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cloister.backends.base import KVLayout
from cloister.executor.drafters.base import DRAFTERS, NOTHING, Draft, Drafter, DrafterContext, DraftModel, DraftRequest
from cloister.executor.drafters.branches import DraftTree, TreeGrower, kept_chain
from cloister.executor.drafters.draft_files import open_drafts
from cloister.executor.drafters.draft_model import DRAFT_MODEL_THREAT, PagedDrafter
from cloister.executor.drafters.token_trees import grow_shape

RATES: Final = ((0.401, 0.113, 0.059, 0.038, 0.028, 0.022),) * 8
"""How often the child of each rank is accepted, at any depth: cloister-draft for cloister-5m (`benchmarks/drafters.py`)."""
MAX_NODES: Final = 16


class SpecInferDrafter(PagedDrafter):
    """Drafts trees of a fixed shape, of which a request gets as many of the best places as it asks for.

    Args:
        models: take turns at the children of a node, the most trusted one first.
    """

    def __init__(self, context: DrafterContext, models: Sequence[DraftModel]) -> None:
        super().__init__(context, models)
        self.shape = grow_shape(RATES, MAX_NODES)
        self.max_drafts = len(self.shape)
        self._grower: TreeGrower | None = None

    def allocate(self, kv: KVLayout) -> None:
        """Builds the small models, with KV for as many blocks as the model has."""
        super().allocate(kv)
        self._grower = TreeGrower(self._programs, self._context.vocab_size, kv.block_size, self._context.sampling_metadata)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a tree for each; `NOTHING` while the small models catch up, or beyond the positions that they learned."""
        drafts = [NOTHING] * len(requests)
        ready = self._begin(requests)
        if ready and self._grower is not None:
            shapes = [(requests[place].parents or self.shape or ())[: stretch.num_drafts] for place, stretch in ready]
            trees = self._grower.grow([stretch for _, stretch in ready], shapes)
            for (place, stretch), tree in zip(ready, trees, strict=True):
                # several models do not all compute the deepest level, and what counts is what each of them computed
                chain = kept_chain(tree.parents) if len(self._models) == 1 else []
                self._keep(stretch, [tree.token_ids[node] for node in chain], num_written=stretch.num_drafts - 1)
                drafts[place] = _pruned(tree)
        return drafts


def _pruned(tree: DraftTree) -> Draft:
    """Returns a tree without what could not be chosen, what follows that, and what follows the end of a sequence."""
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
    """Opens the small models (errors as of `open_drafts`)."""
    return SpecInferDrafter(context, open_drafts(context))
