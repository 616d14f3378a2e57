"""Token Recycling: rows hold what the model thought of last, each sequence its own, and none of it stays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.executor.drafters import DRAFTERS, Draft, DraftRequest, VerifyFeedback
from cloister.executor.drafters.recycling import (
    MAX_DRAFTS,
    NUM_BYTES,
    NUM_SLOTS,
    SHAPE_RATES,
    WIDTH,
    Adjacency,
    RecyclingDrafter,
)
from cloister.executor.drafters.token_trees import grow_shape
from cloister.executor.state import SequenceState
from tests.executor.drafters.answering import Sequences, ask_for, context_for, known, parents_of, walk
from tests.thinning import examples


def saw(
    state: SequenceState, top: Sequence[Sequence[int]], draft: Draft | None = None, path: tuple[int, ...] = ()
) -> VerifyFeedback:
    """A step whose rows had these candidates, for a state that has gained its tokens."""
    rows = np.array([[*row, *range(200, 200 + WIDTH - len(row))] for row in top], np.int32)
    start = len(state.tokens) - 2 - len(path)
    return VerifyFeedback(state, start, draft or Draft([]), path, rows[:, 0].copy(), top=rows)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 1 + NUM_SLOTS, 2 + NUM_SLOTS]), max_size=200))
def test_a_text_is_read_as_a_loop_over_its_pairs_would(tokens: list[int]) -> None:
    adjacency, followers, owners = Adjacency(), dict[int, list[int]](), dict[int, int]()
    adjacency.read_text(array("i", tokens))
    for first, second in pairwise(tokens):
        row = followers.setdefault(first, [])
        followers[first] = [second, *(token for token in row if token != second)][:WIDTH]
    for first in followers:
        row = adjacency.row(first)
        assert [token - 1 for token in row if token] in ([], followers[first])
        owners[first % NUM_SLOTS] = owners.get(first % NUM_SLOTS, 0) + bool(row)
    assert all(count == 1 for count in owners.values())


def test_what_the_model_thought_of_beside_its_choice_is_drafted() -> None:
    drafter, sequences = RecyclingDrafter(4), Sequences()
    state = sequences.arrive([5, 6, 10])
    state.append(20)
    drafter.observe([saw(state, [[20, 21, 22]])])
    state.append(10)
    draft = ask_for(state, MAX_DRAFTS, drafter)
    roots = [token for token, parent in zip(draft.token_ids, parents_of(draft), strict=True) if parent == -1]
    assert roots[:3] == [20, 21, 22]


def test_rejected_branches_are_recycled_and_accepted_ones_win() -> None:
    drafter = RecyclingDrafter(4)
    draft = Draft([11, 12, 11], [-1, -1, 0])
    state = known([9, 10, 11, 50])  # 11 was accepted as place 0, and 50 follows it
    drafter.observe([saw(state, [[11], [50], [60], [70]], draft, (0,))])
    after_11, after_12 = [drafter._of(state).row(token)[0] - 1 for token in (11, 12)]
    assert (after_11, after_12) == (50, 60)


def test_the_prompt_itself_is_what_an_unheard_sequence_drafts_from() -> None:
    draft = ask_for(known([1, 2, 3, 4, 5, 1]), MAX_DRAFTS, RecyclingDrafter(4))
    assert walk(draft, [2, 3, 4, 5, 1, 2]) == list(range(6))
    assert ask_for(known([7]), MAX_DRAFTS, RecyclingDrafter(4)).token_ids == []


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.integers(1, MAX_DRAFTS))
@settings(max_examples=examples(60), deadline=None)
def test_any_prefix_of_the_shape_can_be_asked_for(tokens: list[int], num_drafts: int) -> None:
    drafter = RecyclingDrafter(4)
    shape = RecyclingDrafter.shape
    assert shape is not None
    asked = ask_for(known(tokens), num_drafts, drafter, shape[:num_drafts])
    free = ask_for(known(tokens), num_drafts, RecyclingDrafter(4))
    assert asked == free
    whole = ask_for(known(tokens), MAX_DRAFTS, RecyclingDrafter(4))
    assert whole.token_ids[: len(free.token_ids)] == free.token_ids


def test_the_shape_is_a_tree_without_more_rivals_than_candidates() -> None:
    shape = grow_shape(SHAPE_RATES, 200)
    assert all(parent < place for place, parent in enumerate(shape))
    assert max(shape.count(parent) for parent in shape) <= WIDTH
    assert shape[:MAX_DRAFTS] == RecyclingDrafter.shape


def test_other_shapes_and_rows_that_are_not_finite_do_no_harm() -> None:
    drafter = RecyclingDrafter(4)
    state = known([1, 2, 3, 1])
    assert ask_for(state, 3, drafter, (-1, 0, 1)).token_ids == [2, 3, 1]
    seen = saw(state, [[0]])
    assert seen.top is not None
    seen.top[:] = -1
    drafter.observe([seen])
    assert ask_for(state, 3, drafter, (-1, 0, 1)).token_ids == [2, 3, 1]


def test_a_fork_goes_on_with_the_rows_of_its_parent_and_does_not_change_them() -> None:
    drafter, parent = RecyclingDrafter(4), known([5, 6, 10, 20])
    drafter.observe([saw(parent, [[20, 21]])])
    child = known([5, 6, 10, 20], seq_id=1)
    drafter.fork(0, 1)
    drafter.fork(7, 8)  # one that was never seen
    assert drafter._of(child).row(10) == drafter._of(parent).row(10) != []
    drafter.observe([saw(child, [[30]])])
    assert drafter._of(child).row(10) != drafter._of(parent).row(10)


def test_sequences_do_not_draft_from_each_other() -> None:
    drafter = RecyclingDrafter(4)
    mine, yours = known([1, 2, 3, 1]), known([9, 8, 7, 1], seq_id=1)
    first, second = drafter.draft([DraftRequest(mine, 8), DraftRequest(yours, 8)])
    assert 2 in first.token_ids
    assert second.token_ids == []


def test_a_departed_sequence_leaves_nothing_and_may_come_back() -> None:
    drafter, state = RecyclingDrafter(4), known([1, 2, 3, 4, 1])
    first = ask_for(state, 8, drafter)
    adjacency = drafter._of(state)
    assert adjacency._owners.any()
    drafter.forget(state.seq_id)
    drafter.forget(state.seq_id)
    assert not adjacency._owners.any()
    assert not adjacency._rows.any()
    assert ask_for(state, 8, drafter) == first


def test_it_is_registered_and_counts_what_it_keeps(tmp_path: Path) -> None:
    drafter = DRAFTERS.get("recycling")(context_for(tmp_path, max_num_seqs=3))
    adjacency = Adjacency()
    assert drafter.fixed_bytes == 3 * NUM_BYTES == 3 * (adjacency._owners.nbytes + adjacency._rows.nbytes)
    assert drafter.num_top == WIDTH
