"""The drafters of one runner: calls each in turn and measures its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cloister.executor.drafters import NOTHING, Draft, Drafter, DraftRequest, HiddenRows, VerifyFeedback
from cloister.executor.state import SequenceState
from cloister.types.clock import Clock
from cloister.types.errors import EngineError
from cloister.types.step import SequencePlan


class DrafterGroup:
    """Every drafter that a runner has.

    Args:
        drafters: drafters by their names in plans.
        takes_trees: the program supports token trees; otherwise drafts are reduced to one branch.

    Attributes:
        wants_hidden, num_top: which fields of `VerifyFeedback` they need.
        wants_every_hidden: whether one needs the hidden states of all positions.
    """

    def __init__(self, drafters: Mapping[str, Drafter], clock: Clock, *, takes_trees: bool) -> None:
        self._drafters = dict(drafters)
        self._clock = clock
        self._takes_trees = takes_trees
        self._took_s: dict[str, float] = {}
        self._followers = [name for name, drafter in drafters.items() if type(drafter).follow is not Drafter.follow]
        self._observers = [name for name, drafter in drafters.items() if type(drafter).observe is not Drafter.observe]
        self.wants_hidden = any(drafter.wants_hidden for drafter in drafters.values())
        self._readers = [name for name, drafter in drafters.items() if drafter.wants_every_hidden]
        self.wants_every_hidden = bool(self._readers)
        self.num_top = max((drafter.num_top for drafter in drafters.values()), default=0)

    def __len__(self) -> int:
        """Drafters."""
        return len(self._drafters)

    def wants(self, plans: Sequence[SequencePlan]) -> bool:
        """Whether a step has drafts to verify, or drafters observe it."""
        watches = bool(self._observers)
        return any(plan.num_drafts or (watches and plan.is_watched) for plan in plans)

    def take_times(self) -> dict[str, float]:
        """Returns the seconds that each drafter took since the last call."""
        took, self._took_s = self._took_s, {}
        return took

    def draft(self, parts: Sequence[tuple[SequencePlan, SequenceState]]) -> dict[int, Draft]:
        """Returns a draft for each sequence whose plan requests one, by its id.

        Raises:
            EngineError: the plan names an unknown drafter.
        """
        by_name: dict[str, list[DraftRequest]] = {}
        for plan, state in parts:
            if plan.num_drafts:
                request = DraftRequest(state, plan.num_drafts, plan.parents, state.is_coupled)
                by_name.setdefault(plan.drafter, []).append(request)
        drafts: dict[int, Draft] = {}
        for name, requests in by_name.items():
            if name not in self._drafters:
                raise EngineError(f"the step plan wants drafts of {name!r}, which the runner does not have")
            with self._timing(name):
                made = self._drafters[name].draft(requests)
            for request, draft in zip(requests, made, strict=True):
                if draft.token_ids:
                    drafts[request.state.seq_id] = draft if self._takes_trees else first_branch(draft)
        return drafts

    def follow(self, parts: Sequence[tuple[SequencePlan, SequenceState]]) -> None:
        """Tells drafters which prompts are computed in this step, and up to which position."""
        if not self._followers:
            return
        prompts = [
            (state, plan.start + plan.num_tokens)
            for plan, state in parts
            if not plan.num_drafts and (plan.num_tokens > 1 or not plan.num_samples)
        ]
        for name in self._followers if prompts else ():
            with self._timing(name):
                self._drafters[name].follow(prompts)

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        """Passes the model's output of a step to the drafters."""
        for name in self._observers if seen else ():
            with self._timing(name):
                self._drafters[name].observe(seen)

    def keep_hidden(self, parts: Sequence[HiddenRows]) -> None:
        """Passes the hidden states of a step to the drafters that read those of all positions."""
        for name in self._readers if parts else ():
            with self._timing(name):
                self._drafters[name].keep_hidden(parts)

    def forget(self, seq_id: int) -> None:
        """A sequence left."""
        for drafter in self._drafters.values():
            drafter.forget(seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """A sequence was forked."""
        for drafter in self._drafters.values():
            drafter.fork(parent_id, child_id)

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks became free."""
        for drafter in self._drafters.values():
            drafter.wipe_blocks(block_ids)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied."""
        for drafter in self._drafters.values():
            drafter.copy_blocks(pairs)

    def wipe_buffers(self) -> None:
        """Overwrites residue of steps."""
        for drafter in self._drafters.values():
            drafter.wipe_buffers()

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        since_s = self._clock.now()
        yield
        self._took_s[name] = self._took_s.get(name, 0.0) + self._clock.now() - since_s


def first_branch(draft: Draft) -> Draft:
    """Returns the most probable chain of a tree: at each node the first child."""
    if draft.parents is None:
        return draft
    places: list[int] = []
    for place, parent in enumerate(draft.parents):
        if parent == (places[-1] if places else -1):
            places.append(place)
    probs = None if draft.probs is None else draft.probs[places]
    return Draft([draft.token_ids[place] for place in places], None, probs) if places else NOTHING
