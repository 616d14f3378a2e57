"""Drafts token trees level by level, with one or several small models, for many sequences at once.

A level is one forward pass over all nodes so far that have children: back ends take trees of one step (`ForwardBatch.parents`),
so a node is computed again at each level below it. A few rows cost a small model hardly more than one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cloister.backends.base import LOGITS, FloatArray, ForwardBatch, Program, SamplingMetadata, Wants
from cloister.executor.acceptance import distribution, draw_rivals
from cloister.executor.arrays import as_ints, block_tables
from cloister.executor.drafters.chain import Stretch, draft_numbers, stretch_batch
from cloister.executor.program_executor import ProgramExecutor
from cloister.executor.state import SequenceState


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes of one depth that have children, and the nodes computed to choose these.

    Attributes:
        fed: nodes that are computed, parents before children; none at the root's level.
        depths: of these.
        parents: their parents, as indices among them; -1 for the last known token.
        rows: indices in `fed` of the nodes of this depth.
        children: indices in the tree, for each row; the root's children at its level.
    """

    fed: tuple[int, ...]
    depths: tuple[int, ...]
    parents: tuple[int, ...]
    rows: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def levels_of(parents: tuple[int, ...]) -> tuple[Level, ...]:
    """Returns the levels of a tree from the root down."""
    children: dict[int, list[int]] = {}
    depths = {-1: 0}
    for place, parent in enumerate(parents):
        children.setdefault(parent, []).append(place)
        depths[place] = depths[parent] + 1
    levels = []
    for depth in range(max(depths[parent] for parent in parents) + 1):
        fed = [place for place in range(len(parents)) if place in children and depths[place] <= depth]
        nodes = [place for place in fed if depths[place] == depth] if depth else [-1]
        levels.append(
            Level(
                tuple(fed),
                tuple(depths[place] for place in fed),
                tuple(fed.index(parents[place]) if parents[place] >= 0 else -1 for place in fed),
                tuple(fed.index(place) for place in nodes) if depth else (0,),
                tuple(tuple(children[place]) for place in nodes),
            )
        )
    return tuple(levels)


def kept_chain(parents: tuple[int, ...]) -> list[int]:
    """Returns the nodes of a complete tree whose KV is at the position of a chain: each follows the one before."""
    chain: list[int] = []
    for place in levels_of(parents)[-1].fed:
        if parents[place] != (chain[-1] if chain else -1):
            break
        chain.append(place)
    return chain


class DraftTree:
    """The draft of one sequence.

    Attributes:
        token_ids: by index; -1 if there was no token to choose.
        probs: the distribution of each token; None if tokens use the model's noise.
    """

    __slots__ = ("levels", "parents", "probs", "stretch", "token_ids")

    def __init__(self, stretch: Stretch, parents: tuple[int, ...], vocab_size: int) -> None:
        self.stretch = stretch
        self.parents = parents
        self.levels = levels_of(parents)
        self.token_ids = [-1] * len(parents)
        self.probs = None if stretch.is_coupled else np.zeros((len(parents), vocab_size), np.float32)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node whose children are chosen: its row of logits, its tree, and the indices of its children."""

    row: int
    tree: DraftTree
    children: tuple[int, ...]


class TreeGrower:
    """Fills trees with tokens of small models in turn: the first child of a node comes from the first model, and so on.

    Children of one node are distinct tokens. With the model's noise they are the top tokens of the exponential race; otherwise
    each is drawn without the previous ones (Jeon et al. 2024). Verification treats them like SpecInfer's independent ones (Miao
    et al. 2024, algorithm 3), but no node is wasted on a token that was already rejected.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        vocab_size: int,
        block_size: int,
        draws: Callable[[list[SequenceState], list[int]], SamplingMetadata],
    ) -> None:
        self._executors = tuple(ProgramExecutor(program, vocab_size) for program in programs)
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._draws = draws

    def grow(self, stretches: Sequence[Stretch], shapes: Sequence[tuple[int, ...]]) -> list[DraftTree]:
        """Drafts a tree of each shape after each stretch; computes KV of every program to the end of the stretches."""
        trees = [DraftTree(*each, self._vocab_size) for each in zip(stretches, shapes, strict=True)]
        for depth in range(max(len(tree.levels) for tree in trees)):
            live = [tree for tree in trees if len(tree.levels) > depth]
            batch = _level_batch(live, depth, self._block_size) if depth else stretch_batch(stretches, self._block_size)
            nodes = list(_nodes(live, depth))
            draws = self._draws([node.tree.stretch.state for node in nodes], list(range(len(nodes))))
            if depth:
                draws["position"] += depth
            self._fill(batch, nodes, draws, depth)
        return trees

    def _fill(self, batch: ForwardBatch, nodes: Sequence[_Node], draws: SamplingMetadata, depth: int) -> None:
        most = max(len(node.children) for node in nodes)
        are_coupled = all(node.tree.probs is None for node in nodes)
        if most == 1 and are_coupled and (depth or len(self._executors) == 1):
            tokens = self._executors[0].step(batch, Wants(sampling=draws)).tokens.tolist()
            for node, token in zip(nodes, tokens, strict=True):
                node.tree.token_ids[node.children[0]] = token
            return
        executors = self._executors if not depth else self._executors[:most]
        logits = [executor.step(batch, LOGITS).logits for executor in executors]
        if not are_coupled:
            apart = [node for node in nodes if node.tree.probs is not None]
            self._draw_apart([scores[[node.row for node in apart]] for scores in logits], apart, draws, depth)
        self._race([node for node in nodes if node.tree.probs is None], logits, draws)

    def _race(self, nodes: Sequence[_Node], logits: Sequence[FloatArray], draws: SamplingMetadata) -> None:
        """Chooses children with the model's noise: the winner of the race, then the runner-up, and so on."""
        rank = 0
        while nodes:
            turn = rank % len(logits)
            tokens = self._executors[turn].sample(logits[turn], draws[[node.row for node in nodes]]).tolist()
            for node, token in zip(nodes, tokens, strict=True):
                node.tree.token_ids[node.children[rank]] = token
                if token >= 0:
                    for scores in logits:
                        scores[node.row, token] = -np.inf
            rank += 1
            nodes = [node for node in nodes if len(node.children) > rank]

    def _draw_apart(self, logits: Sequence[FloatArray], nodes: Sequence[_Node], draws: SamplingMetadata, depth: int) -> None:
        """Draws children with independent noise, from the distributions that are stored in their trees."""
        own = draws[[node.row for node in nodes]]
        probs = [distribution(scores, own) for scores in logits]
        owners = [number for number, node in enumerate(nodes) for _ in node.children]
        numbers = draft_numbers(own[owners], [depth] * len(owners), [child for node in nodes for child in node.children])
        used = 0
        for number, node in enumerate(nodes):
            assert node.tree.probs is not None
            for rank, child in enumerate(node.children):
                tokens, rows = draw_rivals(probs[rank % len(probs)][number], numbers[used + rank : used + rank + 1])
                for token, row in zip(tokens, rows, strict=True):  # one, or none if no token is left
                    node.tree.token_ids[child] = token
                    node.tree.probs[child] = row
                    for each in probs:
                        each[number, token] = 0
            used += len(node.children)


def _nodes(live: Sequence[DraftTree], depth: int) -> Iterator[_Node]:
    row = 0
    for tree in live:
        for children in tree.levels[depth].children:
            yield _Node(row, tree, children)
            row += 1


def _level_batch(live: Sequence[DraftTree], depth: int, block_size: int) -> ForwardBatch:
    """Builds the arrays that compute the nodes of a level of each tree, after the known tokens of its sequence."""
    token_ids, positions, context_lens = array("i"), array("i"), array("i")
    logit_rows, parents, query_starts = array("i"), array("i"), array("i", (0,))
    width = max([-(-(tree.stretch.end + len(tree.levels[depth].fed)) // block_size) for tree in live])
    for tree in live:
        level, known, first = tree.levels[depth], tree.token_ids, len(token_ids)
        end = tree.stretch.end
        token_ids.extend([max(known[place], 0) for place in level.fed])
        positions.extend([end - 1 + each for each in level.depths])
        parents.extend([first + parent if parent >= 0 else -1 for parent in level.parents])
        logit_rows.extend([first + row for row in level.rows])
        context_lens.append(end + len(level.fed))
        query_starts.append(len(token_ids))
    return ForwardBatch(
        token_ids=as_ints(token_ids),
        positions=as_ints(positions),
        query_starts=as_ints(query_starts),
        context_lens=as_ints(context_lens),
        block_tables=block_tables([tree.stretch.blocks for tree in live], width),
        logit_rows=as_ints(logit_rows),
        parents=as_ints(parents),
    )
