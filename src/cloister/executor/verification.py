"""Verifies a sequence's drafts: walks from its last known token through them as long as the model agrees.

A seeded or greedy request gets at each node exactly the token that it would get without drafts: sampled with the noise of
(seed, index, position); a draft is accepted if it equals that token (batch invariance). This also preserves the distribution of
every request whose drafts were not sampled. For sampled drafts of a request without a seed, `executor.acceptance` decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import FloatArray, IntArray, SamplingMetadata, StepOutput
from cloister.executor.acceptance import Candidate, accept_child, distribution
from cloister.executor.drafters import Draft, VerifyFeedback
from cloister.executor.inputs import ScheduledSequence
from cloister.executor.logits_processors import process_logits
from cloister.executor.noise import Domain, noise_keys, uniforms
from cloister.executor.sampling import NOT_FINITE, NOTHING_LEFT
from cloister.executor.state import SequenceState
from cloister.types.request import TokenLogprobs
from cloister.types.step import Sample


class Verification:
    """The verification of one sequence's draft, which is empty in a step without drafts.

    Args:
        state: receives the new tokens.
        draft: the draft to verify.
        root: row of logits after the last known token; the rows of the drafts follow.

    Attributes:
        path: indices of accepted drafts so far, parents before children.
        token_ids: new tokens: accepted drafts, then the token that no draft predicted.
        logprobs: log-probabilities of these, if requested.
        has_time: another mask may be computed in this step.
    """

    __slots__ = ("draft", "has_time", "logprobs", "path", "root", "state", "token_ids")

    def __init__(self, state: SequenceState, draft: Draft, root: int) -> None:
        self.state = state
        self.draft = draft
        self.root = root
        self.path: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.has_time = True

    @property
    def row(self) -> int:
        """The row from which the next token is sampled."""
        return self.root + 1 + self.path[-1] if self.path else self.root

    @property
    def is_coupled(self) -> bool:
        """Whether a draft is accepted if and only if it equals the sampled token."""
        return self.draft.probs is None or self.state.is_coupled

    def children(self) -> list[int]:
        """Returns the indices of the drafts that may be next, in the drafter's order of confidence."""
        draft, place = self.draft, self.path[-1] if self.path else -1
        if draft.parents is None:
            return [place + 1] if place + 1 < len(draft.token_ids) else []
        return [child for child, parent in enumerate(draft.parents) if parent == place]

    def child_of(self, token_id: int) -> int | None:
        """Returns the index of the draft that equals this token, if there is one."""
        for child in self.children():
            if self.draft.token_ids[child] == token_id:
                return child
        return None

    def candidates(self) -> list[Candidate]:
        """Returns the drafts that may be next, as candidates for randomised acceptance."""
        draft = self.draft
        assert draft.probs is not None
        return [Candidate(child, draft.token_ids[child], draft.probs[child]) for child in self.children()]

    def follow(self, sampled: Sequence[int]) -> None:
        """Adds all tokens at once if the program sampled one at every node: sampled[0] at the root, [1 + i] at draft i."""
        path = follow_path(self.draft, sampled, self.state.stops)
        token_ids = [sampled[0], *[sampled[place + 1] for place in path]]
        if -1 in token_ids:  # as without drafts: tokens before a non-finite value are no answer either
            self.state.failure = (self.state.grammar and self.state.grammar.failure) or NOT_FINITE
            return
        for token_id in token_ids:
            self.state.append(token_id)
        self.path += path
        self.token_ids += token_ids

    def accept(self, token_id: int, child: int | None, entry: list[TokenLogprobs] | None) -> bool:
        """Appends the next token; returns whether verification continues.

        Args:
            child: index of the draft that equals this token; None if there is none.
            entry: its log-probabilities, if requested.
        """
        state = self.state
        if token_id < 0:
            state.failure = (state.grammar and state.grammar.failure) or NOTHING_LEFT
            return False
        state.append(token_id)
        if state.failure is not None:
            return False
        if entry is not None:
            self.logprobs = [*(self.logprobs or []), *entry]
        self.token_ids.append(token_id)
        if child is None or token_id in state.stops:
            return False
        if state.grammar is not None:
            if state.grammar.is_complete or not self.has_time:
                return False  # nothing can follow, so there is no token to sample after the draft; or not in this step
            state.grammar.look_ahead()
        self.path.append(child)
        return True

    @property
    def sample(self) -> Sample:
        """The sample of the step."""
        return Sample(self.state.seq_id, self.token_ids, self.logprobs, len(self.draft.token_ids), tuple(self.path))

    def moves(self, part: ScheduledSequence) -> list[tuple[int, int]]:
        """Returns (from, to) for the KV positions of accepted drafts that differ from those of a chain."""
        return [(part.end + place, part.end + depth) for depth, place in enumerate(self.path) if place != depth]

    def feedback(self, chosen: IntArray, output: StepOutput) -> VerifyFeedback:
        """Returns the feedback for drafters.

        Args:
            chosen: a token for each node.
            output: output of the whole step.
        """
        own = slice(self.root, self.root + 1 + len(self.draft.token_ids))
        return VerifyFeedback(
            state=self.state,
            start=len(self.state.tokens) - len(self.token_ids) - 1,
            draft=self.draft,
            path=tuple(self.path),
            chosen=chosen,
            hidden=output.hidden[own] if len(output.hidden) else None,
            top=output.top[own] if len(output.top) else None,
        )


def follow_path(draft: Draft, sampled: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    """Returns the accepted drafts if the model continues with sampled[0], and after draft i with sampled[1 + i]."""
    place, path = -1, []
    for child, token_id in enumerate(draft.token_ids):
        parent = child - 1 if draft.parents is None else draft.parents[child]
        if parent == place and token_id == sampled[place + 1] and token_id not in stops:
            place = child
            path.append(child)
    return tuple(path)


def accept_drawn(
    verifications: Sequence[Verification], logits: FloatArray, sampling: SamplingMetadata
) -> list[tuple[int | None, int]]:
    """Decides on the next token after sampled drafts: returns the accepted child, if any, and the token.

    Args:
        logits: the row of each, [num_verifications, vocab].
        sampling: how each token is sampled.
    """
    probs = distribution(process_logits(logits, [each.state for each in verifications]), sampling)
    candidates = [each.candidates() for each in verifications]
    keys = noise_keys(sampling["seed"], sampling["index"], sampling["position"])
    numbers = uniforms(keys[:, None], Domain.VERIFY, np.arange(1 + max(map(len, candidates)))).tolist()
    return [accept_child(*each) for each in zip(probs, candidates, numbers, strict=True)]
