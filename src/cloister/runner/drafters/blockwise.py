"""Blockwise parallel decoding (Stern et al. 2018): one wide layer guesses several places behind the next one, as a chain.

Section 5's layer: from the model's hidden state to an inner one, and from that to one output for each head, every output added
to the hidden state it came from; the model's own head makes tokens of them. The longest prefix that the model agrees with is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cloister.runner.drafters.base import (
    DRAFTERS,
    NOTHING,
    Draft,
    DraftAsk,
    Drafter,
    DraftingPlace,
    FloatArray,
)
from cloister.runner.drafters.head_drafter import HeadDrafter, lent_head
from cloister.runner.drafters.heads import Heads, multiply, open_heads, take_tensor
from cloister.runner.drafters.medusa import THREAT
from cloister.types.errors import ModelError


class BlockwiseHeads:
    """One feed-forward layer for all heads: x + D_k relu(U x + u) + d_k (protocol `Heads`).

    Args:
        up: [hidden, inner]. down: [num_heads, inner, hidden].
        up_bias: [inner]. down_bias: [num_heads, 1, hidden].
    """

    def __init__(self, up: FloatArray, up_bias: FloatArray, down: FloatArray, down_bias: FloatArray) -> None:
        self._up, self._up_bias, self._down, self._down_bias = up, up_bias, down, down_bias
        self.num_heads = len(down)
        self.num_bytes = sum(part.nbytes for part in (up, up_bias, down, down_bias))

    @classmethod
    def of(cls, tensors: dict[str, FloatArray], num_heads: int, hidden_size: int) -> BlockwiseHeads:
        """Takes them from what `heads.safetensors` holds, where inputs come last (ModelError if a tensor is missing)."""
        if "up.bias" not in tensors:
            raise ModelError("the heads have no tensor up.bias; train these heads again")
        inner = tensors["up.bias"].size
        up = take_tensor(tensors, "up.weight", inner, hidden_size)
        down = take_tensor(tensors, "down.weight", num_heads, hidden_size, inner)
        return cls(
            np.ascontiguousarray(up.T),
            take_tensor(tensors, "up.bias", inner),
            np.ascontiguousarray(down.transpose(0, 2, 1)),
            take_tensor(tensors, "down.bias", num_heads, hidden_size)[:, None],
        )

    def guess(self, hidden: FloatArray, num_heads: int) -> FloatArray:
        inner = np.maximum(multiply(hidden, self._up[None]) + self._up_bias, 0)
        return hidden + multiply(inner, self._down[:num_heads]) + self._down_bias[:num_heads]


class Blockwise(HeadDrafter):
    """Drafts a chain: the likeliest token of each head.

    Args:
        project: the model's own head.
        eos_token_ids: a chain ends with one of these, as the answer would.
    """

    def __init__(
        self, heads: Heads, project: Callable[[FloatArray], FloatArray], eos_token_ids: Sequence[int], num_bytes: int
    ) -> None:
        super().__init__(heads, project, num_bytes)
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_drafts = heads.num_heads

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts = [NOTHING] * len(asks)
        places, hidden = self._last.gather(list(asks))
        if not places:
            return drafts
        length = min(self.max_drafts, max(asks[place].num_drafts for place in places))
        logits = self._project(self._heads.guess(hidden, length).reshape(length * len(places), -1))
        chains = logits.argmax(1).reshape(length, len(places)).T.tolist()
        for place, chain in zip(places, chains, strict=True):
            drafts[place] = self._cut(chain[: asks[place].num_drafts], asks[place])
        return drafts

    def _cut(self, chain: list[int], ask: DraftAsk) -> Draft:
        """Ends a chain with the token that ends the answer: what would follow is never kept."""
        if not ask.state.sampling.ignore_eos:
            for place, token in enumerate(chain):
                if token in self._eos_token_ids:
                    return Draft(chain[: place + 1])
        return Draft(chain)


@DRAFTERS.register("blockwise", THREAT)
def make_blockwise(place: DraftingPlace) -> Drafter:
    """Reads the heads of a model (`DrafterFactory` says what it raises)."""
    card, tensors = open_heads(place, "blockwise")
    heads = BlockwiseHeads.of(tensors, card.num_heads, card.hidden_size)
    return Blockwise(heads, lent_head(place, "blockwise"), place.eos_token_ids, heads.num_bytes)
