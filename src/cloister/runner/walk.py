"""From the last known token through a draft, as far as the model agrees: what a step brought to one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.runner.acceptance import Candidate
from cloister.runner.drafters import Draft
from cloister.runner.inputs import Part
from cloister.runner.state import SequenceState
from cloister.types.request import TokenLogprobs
from cloister.types.step import Sample


class Walk:
    """One sequence's way through its draft.

    Args:
        state: gains the tokens.
        draft: what was verified.
        root: row of logits after the last known token; those of the drafts follow it.

    Attributes:
        path: accepted drafts so far, parents before children.
        token_ids: gained tokens: accepted drafts, then the one that no draft foresaw.
        logprobs: of these, for whoever wants them.
    """

    __slots__ = ("draft", "logprobs", "path", "root", "state", "token_ids")

    def __init__(self, state: SequenceState, draft: Draft, root: int) -> None:
        self.state = state
        self.draft = draft
        self.root = root
        self.path: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None

    @property
    def row(self) -> int:
        """The row that the next token is chosen from."""
        return self.root + 1 + self.path[-1] if self.path else self.root

    def children(self) -> list[int]:
        """Returns the places of the drafts that may come next, in the order of the drafter's trust."""
        draft, place = self.draft, self.path[-1] if self.path else -1
        if draft.parents is None:
            return [place + 1] if place + 1 < len(draft.token_ids) else []
        return [child for child, parent in enumerate(draft.parents) if parent == place]

    def child_of(self, token_id: int) -> int | None:
        """Returns the place of the draft that foresaw this token, if one did."""
        for child in self.children():
            if self.draft.token_ids[child] == token_id:
                return child
        return None

    def rivals(self) -> list[Candidate]:
        """Returns the drafts that may come next as verification of drawn ones takes them."""
        draft = self.draft
        assert draft.probs is not None
        return [Candidate(child, draft.token_ids[child], draft.probs[child]) for child in self.children()]

    def take(self, token_id: int, child: int | None) -> bool:
        """Counts a token that its sequence gained; whether the walk goes on, through the draft that foresaw it."""
        self.token_ids.append(token_id)
        if child is None or token_id in self.state.stops:
            return False
        self.path.append(child)
        return True

    @property
    def sample(self) -> Sample:
        """What the step brought."""
        return Sample(self.state.seq_id, self.token_ids, self.logprobs, len(self.draft.token_ids), tuple(self.path))

    def moves(self, part: Part) -> list[tuple[int, int]]:
        """Returns (from, to) of the accepted drafts' KV positions that are not where a chain would have them."""
        return [(part.end + place, part.end + depth) for depth, place in enumerate(self.path) if place != depth]


def follow(draft: Draft, chosen: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    """Returns the accepted drafts where the model goes on with chosen[0], and after draft i with chosen[1 + i]."""
    place, path = -1, []
    for child, token_id in enumerate(draft.token_ids):
        parent = child - 1 if draft.parents is None else draft.parents[child]
        if parent == place and token_id == chosen[place + 1] and token_id not in stops:
            place = child
            path.append(child)
    return tuple(path)
