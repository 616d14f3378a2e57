"""Medusa (Cai et al. 2024): heads on the last hidden state each predict one further position, and a tree combines their
predictions.

A head is residual SiLU blocks (section 2.1.1) whose output the model's own head reads. The paper gives each head a matrix over
the vocabulary, which would make the heads of a small model larger than the model; here each block has an output matrix instead.
The trainer chose the ranks and heads of the tree from measured accuracy (`train.measuring`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cloister.backends.draft_heads import DraftHeads, HeadBlock
from cloister.executor.drafters.base import DRAFTERS, NOTHING, Draft, Drafter, DrafterContext, DraftRequest, FloatArray
from cloister.executor.drafters.heads import HeadDrafter, open_heads, take_tensor
from cloister.executor.drafters.token_trees import rank_places
from cloister.types.errors import ModelError
from cloister.types.threat import Requirement, ThreatProfile

THREAT = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="one hidden state of each sequence that runs; sizes and times of packets show accepted lengths",
    where=("host memory", "network"),
    attack="traffic analysis, leak",
    mitigations=("a hidden state is overwritten when its sequence ends", "constant-shape streaming"),
)


def read_heads(tensors: Mapping[str, FloatArray], num_heads: int, hidden_size: int) -> DraftHeads:
    """Returns the heads in `heads.safetensors` (ModelError if a tensor is missing)."""
    blocks = []
    for number in range(max(1, sum(name.endswith(".up.bias") for name in tensors))):
        name = f"blocks.{number}"
        inner = tensors[f"{name}.up.bias"].shape[-1] if f"{name}.up.bias" in tensors else hidden_size
        up = take_tensor(tensors, f"{name}.up.weight", num_heads, inner, hidden_size)
        bias = take_tensor(tensors, f"{name}.up.bias", num_heads, inner)
        blocks.append(HeadBlock(up, bias, take_tensor(tensors, f"{name}.down.weight", num_heads, hidden_size, inner)))
    return DraftHeads(tuple(blocks), "silu")


class Branches(NamedTuple):
    """A tree, prepared for drafting.

    Attributes:
        parents: as `Draft.parents`.
        depths: distance of each node from the last known token, from 0.
        ranks: rank of each node among its head's predictions: its index among its siblings.
        widths: number of predictions needed from each head.
    """

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    widths: list[int]

    @classmethod
    def of(cls, parents: Sequence[int]) -> Branches:
        depths: list[int] = []
        widths: list[int] = []
        ranks = rank_places(tuple(parents))
        for parent, rank in zip(parents, ranks, strict=True):
            depth = depths[parent] + 1 if parent >= 0 else 0
            depths.append(depth)
            if depth == len(widths):
                widths.append(0)
            widths[depth] = max(widths[depth], rank + 1)
        return cls(list(parents), depths, list(ranks), widths)


class Medusa(HeadDrafter):
    """Drafts the tree that was chosen from its heads' accuracy, or any other of at most the same depth.

    Args:
        shape: parents of the default tree.
    """

    def __init__(self, heads: DraftHeads, shape: Sequence[int], context: DrafterContext) -> None:
        super().__init__(heads, context)
        self.shape = tuple(shape)
        self.max_drafts = len(self.shape)
        self._branches = {self.shape[:size]: Branches.of(self.shape[:size]) for size in range(1, len(self.shape) + 1)}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [NOTHING] * len(requests)
        places, hidden = self._last.gather(list(requests))
        if not places:
            return drafts
        trees = [self._tree(requests[place]) for place in places]
        depth, width = max(len(tree.widths) for tree in trees), max(max(tree.widths) for tree in trees)
        best = self._guess(hidden, depth, width)
        for row, (place, tree) in enumerate(zip(places, trees, strict=True)):
            drafts[place] = Draft(best[tree.depths, row, tree.ranks].tolist(), tree.parents)
        return drafts

    def _tree(self, request: DraftRequest) -> Branches:
        """Returns the tree of a request without the nodes that are deeper than the number of heads."""
        assert self.shape is not None
        parents = (self.shape if request.parents is None else request.parents)[: request.num_drafts]
        known = self._branches.get(parents)
        if known is not None:
            return known
        tree = Branches.of(parents)
        size = next((place for place, depth in enumerate(tree.depths) if depth >= self.num_heads), len(parents))
        return tree if size == len(parents) else Branches.of(parents[:size])


@DRAFTERS.register("medusa", THREAT)
def make_medusa(context: DrafterContext) -> Drafter:
    """Reads the heads of a model. Raises as `DrafterFactory`."""
    card, tensors = open_heads(context, "medusa")
    heads = read_heads(tensors, card.num_heads, card.hidden_size)
    tree = Branches.of(card.parents) if _is_tree(card.parents) else None
    if tree is None or len(tree.widths) > heads.num_heads or max(tree.widths) > card.vocab_size:
        raise ModelError("heads.json has no tree that these heads can fill; train these heads again")
    return Medusa(heads, card.parents, context)


def _is_tree(parents: Sequence[int]) -> bool:
    return bool(parents) and all(-1 <= parent < place for place, parent in enumerate(parents))
