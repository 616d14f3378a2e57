"""Medusa (Cai et al. 2024): heads on the last hidden state each guess one place further, and a tree joins their guesses.

A head is residual SiLU blocks (section 2.1.1) whose output the model's own head reads. The paper gives each head a matrix over
the vocabulary, which would make the heads of a small model larger than the model; here each block has an output matrix instead.
Which ranks of which heads make the tree was found by the trainer from measured accuracy (`train.tree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
from cloister.types.errors import ModelError
from cloister.types.threat import Requirement, ThreatProfile

THREAT = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="one hidden state of each sequence that runs; sizes and times of packets show accepted lengths",
    where=("host memory", "network"),
    attack="traffic analysis, leak",
    mitigations=("a hidden state is overwritten when its sequence leaves", "constant-shape streaming"),
)


class Block(NamedTuple):
    """One residual block of every head: x + D SiLU(U x + u).

    Attributes:
        up: [num_heads, hidden, inner], inputs in the second dimension. up_bias: [num_heads, 1, inner].
        down: [num_heads, inner, hidden].
    """

    up: FloatArray
    up_bias: FloatArray
    down: FloatArray


class MedusaHeads:
    """A chain of residual blocks for each head (protocol `Heads`)."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = tuple(blocks)
        self.num_heads = len(blocks[0].up)
        self.num_bytes = sum(part.nbytes for block in blocks for part in block)

    @classmethod
    def of(cls, tensors: dict[str, FloatArray], num_heads: int, hidden_size: int) -> MedusaHeads:
        """Takes them from what `heads.safetensors` holds, where inputs come last (ModelError if a tensor is missing)."""
        blocks = []
        for number in range(max(1, sum(name.endswith(".up.bias") for name in tensors))):
            name = f"blocks.{number}"
            inner = tensors[f"{name}.up.bias"].shape[-1] if f"{name}.up.bias" in tensors else hidden_size
            up = take_tensor(tensors, f"{name}.up.weight", num_heads, inner, hidden_size)
            bias = take_tensor(tensors, f"{name}.up.bias", num_heads, inner)
            down = take_tensor(tensors, f"{name}.down.weight", num_heads, hidden_size, inner)
            blocks.append(Block(_turn(up), bias[:, None], _turn(down)))
        return cls(blocks)

    def guess(self, hidden: FloatArray, num_heads: int) -> FloatArray:
        state: FloatArray = hidden[None]
        for up, bias, down in self._blocks:
            inner = multiply(state, up[:num_heads]) + bias[:num_heads]
            state = state + multiply(inner / (1 + np.exp(-np.clip(inner, -80, None))), down[:num_heads])
        return state


def _turn(matrices: FloatArray) -> FloatArray:
    return np.ascontiguousarray(matrices.transpose(0, 2, 1))


class Branches(NamedTuple):
    """A tree, read for drafting.

    Attributes:
        parents: as `Draft.parents`.
        depths: how far behind the last known token each node lies, from 0.
        ranks: which of its head's guesses each node is: as many as siblings stand before it.
        widths: how many guesses are needed of each head.
    """

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    widths: list[int]

    @classmethod
    def of(cls, parents: Sequence[int]) -> Branches:
        depths: list[int] = []
        ranks: list[int] = []
        num_children: dict[int, int] = {}
        widths: list[int] = []
        for parent in parents:
            depth = depths[parent] + 1 if parent >= 0 else 0
            rank = num_children.get(parent, 0)
            num_children[parent] = rank + 1
            depths.append(depth)
            ranks.append(rank)
            if depth == len(widths):
                widths.append(0)
            widths[depth] = max(widths[depth], rank + 1)
        return cls(list(parents), depths, ranks, widths)


class Medusa(HeadDrafter):
    """Drafts the tree that its heads' measured accuracy gave, or any other of no greater depth.

    Args:
        shape: parents of that tree.
        project: the model's own head.
    """

    def __init__(self, heads: Heads, shape: Sequence[int], project: Callable[[FloatArray], FloatArray], num_bytes: int) -> None:
        super().__init__(heads, project, num_bytes)
        self.shape = tuple(shape)
        self.max_drafts = len(self.shape)
        self._branches = {self.shape[:size]: Branches.of(self.shape[:size]) for size in range(1, len(self.shape) + 1)}

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts = [NOTHING] * len(asks)
        places, hidden = self._last.gather(list(asks))
        if not places:
            return drafts
        trees = [self._tree(asks[place]) for place in places]
        depth = max(len(tree.widths) for tree in trees)
        widths = [max(tree.widths[level] for tree in trees if level < len(tree.widths)) for level in range(depth)]
        guesses = self._heads.guess(hidden, depth)
        logits = self._project(guesses.reshape(depth * len(places), -1))
        best = [find_best(logits[level * len(places) : (level + 1) * len(places)], width) for level, width in enumerate(widths)]
        for row, (place, tree) in enumerate(zip(places, trees, strict=True)):
            tokens = [best[level][row][rank] for level, rank in zip(tree.depths, tree.ranks, strict=True)]
            drafts[place] = Draft(tokens, tree.parents)
        return drafts

    def _tree(self, ask: DraftAsk) -> Branches:
        """Returns the tree that an ask wants, less the nodes that lie deeper than there are heads."""
        assert self.shape is not None
        parents = (self.shape if ask.parents is None else ask.parents)[: ask.num_drafts]
        known = self._branches.get(parents)
        if known is not None:
            return known
        tree = Branches.of(parents)
        size = next((place for place, depth in enumerate(tree.depths) if depth >= self._heads.num_heads), len(parents))
        return tree if size == len(parents) else Branches.of(parents[:size])


def find_best(logits: FloatArray, count: int) -> list[list[int]]:
    """Returns the ids of each row's `count` largest logits [num_rows, vocab], best first; writes over the logits."""
    best = [logits.argmax(1)]
    rows = np.arange(len(logits))
    for _ in range(1, count):  # a few passes over a row are quicker than a partition of it
        logits[rows, best[-1]] = -np.inf
        best.append(logits.argmax(1))
    found: list[list[int]] = np.stack(best, axis=1).tolist()
    return found


@DRAFTERS.register("medusa", THREAT)
def make_medusa(place: DraftingPlace) -> Drafter:
    """Reads the heads of a model (`DrafterFactory` says what it raises)."""
    card, tensors = open_heads(place, "medusa")
    heads = MedusaHeads.of(tensors, card.num_heads, card.hidden_size)
    tree = Branches.of(card.parents) if _is_tree(card.parents) else None
    if tree is None or len(tree.widths) > heads.num_heads or max(tree.widths) > card.vocab_size:
        raise ModelError("heads.json has no tree that these heads can fill; train these heads again")
    return Medusa(heads, card.parents, lent_head(place, "medusa"), heads.num_bytes)


def _is_tree(parents: Sequence[int]) -> bool:
    return bool(parents) and all(-1 <= parent < place for place, parent in enumerate(parents))
