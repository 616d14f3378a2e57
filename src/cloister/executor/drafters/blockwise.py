"""Blockwise parallel decoding (Stern et al. 2018): one wide layer predicts several tokens after the next one, as a chain.

Section 5's layer: from the model's hidden state to an inner one, and from that to one output for each head, each added to the
input hidden state; the model's own head converts them to tokens. The longest prefix that the model confirms is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloister.backends.draft_heads import DraftHeads, HeadBlock
from cloister.executor.drafters.base import DRAFTERS, NOTHING, Draft, Drafter, DrafterContext, DraftRequest, FloatArray
from cloister.executor.drafters.heads import HeadDrafter, open_heads, take_tensor
from cloister.executor.drafters.medusa import THREAT
from cloister.types.errors import ModelError


def read_heads(tensors: Mapping[str, FloatArray], num_heads: int, hidden_size: int) -> DraftHeads:
    """Returns the heads in `heads.safetensors`, whose first layer is shared (ModelError if a tensor is missing)."""
    if "up.bias" not in tensors:
        raise ModelError("the heads have no tensor up.bias; train these heads again")
    inner = tensors["up.bias"].size
    block = HeadBlock(
        take_tensor(tensors, "up.weight", inner, hidden_size)[None],
        take_tensor(tensors, "up.bias", inner)[None],
        take_tensor(tensors, "down.weight", num_heads, hidden_size, inner),
        take_tensor(tensors, "down.bias", num_heads, hidden_size),
    )
    return DraftHeads((block,), "relu")


class Blockwise(HeadDrafter):
    """Drafts a chain: the most likely token of each head.

    A chain ends with a token that would end the answer.
    """

    def __init__(self, heads: DraftHeads, context: DrafterContext) -> None:
        super().__init__(heads, context)
        self._eos_token_ids = frozenset(context.eos_token_ids)
        self.max_drafts = heads.num_heads

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [NOTHING] * len(requests)
        places, hidden = self._last.gather(list(requests))
        if not places:
            return drafts
        length = min(self.max_drafts, max(requests[place].num_drafts for place in places))
        chains = self._guess(hidden, length, 1)[:, :, 0].T.tolist()
        for place, chain in zip(places, chains, strict=True):
            drafts[place] = self._cut(chain[: requests[place].num_drafts], requests[place])
        return drafts

    def _cut(self, chain: list[int], request: DraftRequest) -> Draft:
        """Truncates a chain after the token that ends the answer: later tokens are never kept."""
        if not request.state.sampling.ignore_eos:
            for place, token in enumerate(chain):
                if token in self._eos_token_ids:
                    return Draft(chain[: place + 1])
        return Draft(chain)


@DRAFTERS.register("blockwise", THREAT)
def make_blockwise(context: DrafterContext) -> Drafter:
    """Reads the heads of a model. Raises as `DrafterFactory`."""
    card, tensors = open_heads(context, "blockwise")
    return Blockwise(read_heads(tensors, card.num_heads, card.hidden_size), context)
