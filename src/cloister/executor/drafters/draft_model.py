"""Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): a small model drafts a chain, one token after another."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.executor.drafters.base import DRAFTERS, NOTHING, Draft, DraftAsk, Drafter, DraftingPlace
from cloister.executor.drafters.draft_files import open_draft
from cloister.executor.drafters.small_model import DRAFT_MODEL_THREAT, PagedDrafter


class DraftModelDrafter(PagedDrafter):
    """Drafts chains with one small model whose KV goes along with the model's."""

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Returns a chain for each; `NOTHING` while the small model catches up, or beyond the positions that it learned."""
        drafts = [NOTHING] * len(asks)
        ready = self._begin(asks)
        if ready:
            grown = self._growers[0].grow([stretch for _, stretch in ready])
            for (place, stretch), draft in zip(ready, grown, strict=True):
                self._keep(stretch, draft.token_ids[: stretch.num_drafts - 1], stretch.num_drafts - 1)
                drafts[place] = draft
        return drafts


@DRAFTERS.register("draft_model", DRAFT_MODEL_THREAT)
def make_draft_model(place: DraftingPlace) -> Drafter:
    """Opens the small model (errors as of `open_draft`)."""
    return DraftModelDrafter(place, [open_draft(place)])
