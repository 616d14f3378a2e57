"""States of one program's layers as steps advance them: known tokens at once, drafts when they were accepted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cloister.backends.base import ForwardBatch, IntArray, KVLayout
from cloister.backends.spec import StateSpec
from cloister.backends.torch.cache import StateCache
from cloister.backends.torch.mixers import StateMixer
from cloister.backends.torch.schedule import Team


class StateSpan(NamedTuple):
    """Tokens [first, end) of one sequence, which go on from the state in the block `read`.

    Attributes:
        written: block that takes the state behind the last one; -1 for drafts.
        parents: of drafts, the token before each; None for a chain.
    """

    first: int
    end: int
    read: int
    written: int
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StateStep:
    """How one step advances states.

    Attributes:
        sequences: the spans of each sequence, in order.
        drafts: tokens of the batch that are drafts, [num_drafts].
    """

    sequences: tuple[tuple[StateSpan, ...], ...]
    drafts: Tensor


class States:
    """The states of all sequences in every layer that has one.

    Known tokens change a state in place. Drafts read copies: what the layers made of them is kept until it is known which are
    accepted, and these then change the state by the same arithmetic, so that a rejected draft leaves no trace.
    """

    def __init__(self, layout: KVLayout, layers: Mapping[int, StateSpec], team: Team, device: torch.device) -> None:
        self.cache = StateCache(layout, layers, device)
        self._has_groups = bool(layout.groups)
        self._team = team
        self._places: dict[int, int] = {}  # token of the last step's batch -> row of what is kept of its drafts
        self._kept: dict[int, Tensor] = {}

    def schedule(self, batch: ForwardBatch) -> StateStep:
        """Returns how a step advances states, and forgets the drafts of the step before.

        Raises:
            ValueError: the batch does not say where the states are.
        """
        self.forget_drafts()
        if batch.state_spans is None:
            spans = list(self._first_blocks(batch))
        else:
            spans = [self._span(batch, row) for row in batch.state_spans.tolist()]
        starts = batch.query_starts
        sequences = groupby(spans, key=lambda span: int(np.searchsorted(starts, span.first, side="right")))
        drafts = [token for span in spans if span.written < 0 for token in range(span.first, span.end)]
        self._places = {token: place for place, token in enumerate(drafts)}
        return StateStep(tuple(tuple(own) for _, own in sequences), torch.tensor(drafts, dtype=torch.int64))

    def advance(self, layer: int, mixer: StateMixer, features: Tensor, step: StateStep) -> Tensor:
        """Returns [num_rows, num_mixed] of a layer for the features of a step [num_rows, num_features]."""
        mixed = features.new_zeros(len(features), mixer.num_mixed)
        tasks = [partial(self._advance_sequence, layer, mixer, features, spans, mixed) for spans in step.sequences]
        self._team.run(tasks, 8.0 * len(features) * self.cache.layers[layer].shape[1])
        if self._places:
            self._kept[layer] = features.index_select(0, step.drafts.to(features.device))
        return mixed

    def accept_drafts(self, mixers: Mapping[int, StateMixer], accepted: IntArray) -> None:
        """Advances states by the accepted drafts of the last step (`backends.base.Program.accept_drafts`)."""
        for block, pairs in groupby(accepted.tolist(), key=lambda pair: pair[1]):
            places = torch.tensor([self._places[token] for token, _ in pairs])
            for layer, kept in self._kept.items():
                path = kept.index_select(0, places.to(kept.device))
                mixers[layer].advance(path, self.cache.at(layer, block))
                path.zero_()
        self.forget_drafts()

    def forget_drafts(self) -> None:
        """Overwrites what is kept of drafts."""
        for kept in self._kept.values():
            kept.zero_()
        self._kept.clear()
        self._places.clear()

    def _advance_sequence(
        self, layer: int, mixer: StateMixer, features: Tensor, spans: Sequence[StateSpan], mixed: Tensor
    ) -> None:
        for span in spans:
            state = self.cache.at(layer, span.read)
            if span.written >= 0:
                if span.written != span.read:
                    state = self.cache.at(layer, span.written).copy_(state)
                mixed[span.first : span.end] = mixer.advance(features[span.first : span.end], state)
            elif span.parents is None:
                copied = state.clone()
                mixed[span.first : span.end] = mixer.advance(features[span.first : span.end], copied)
                copied.zero_()
            else:
                self._advance_tree(mixer, features, span, state, mixed)

    def _advance_tree(self, mixer: StateMixer, features: Tensor, span: StateSpan, state: Tensor, mixed: Tensor) -> None:
        """Each node goes on from a copy of its parent's state."""
        states = {span.first - 1: state}
        for token, parent in zip(range(span.first, span.end), span.parents or (), strict=True):
            states[token] = states[parent].clone()
            mixed[token : token + 1] = mixer.advance(features[token : token + 1], states[token])
        for token in range(span.first, span.end):
            states[token].zero_()

    def _span(self, batch: ForwardBatch, row: Sequence[int]) -> StateSpan:
        first, end, read, written = row
        if written >= 0 or batch.parents is None:
            return StateSpan(first, end, read, written)
        parents = tuple(batch.parents[first:end].tolist())
        return StateSpan(first, end, read, written, None if parents == tuple(range(first - 1, end - 1)) else parents)

    def _first_blocks(self, batch: ForwardBatch) -> Iterator[StateSpan]:
        """Yields the spans of a batch that does not name them, for programs without groups of layers."""
        if self._has_groups or batch.parents is not None:
            raise ValueError("a step of layers with a state needs `state_spans` where there are groups or token trees")
        starts, blocks = batch.query_starts.tolist(), batch.block_tables[:, 0].tolist()
        for first, end, block in zip(starts, starts[1:], blocks, strict=False):
            if batch.positions[first] == 0:  # nobody wipes blocks for such a program
                self.cache.wipe([block])
            yield StateSpan(first, end, block, block)
