"""Lookahead: a window whose guesses become the model's own, a pool that keeps the latest n-grams, and nothing that stays."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.executor.drafters import DRAFTERS, Draft, VerifyFeedback
from cloister.executor.drafters.lookahead import (
    MAX_COLUMNS,
    MAX_DRAFTS,
    NUM_BYTES,
    NUM_FOLLOWING,
    NUM_KEPT,
    NUM_LEVELS,
    NUM_SLOTS,
    LookaheadDrafter,
    NgramPool,
)
from cloister.executor.state import SequenceState
from tests.executor.drafters.answering import Sequences, ask_for, context_for, known, parents_of, walk
from tests.thinning import examples

Model = Callable[[int, int], int]
"""From a token and its position to the next token."""


def step(drafter: LookaheadDrafter, state: SequenceState, draft: Draft, model: Model) -> int:
    """Verifies a draft; returns how many of it were accepted."""
    start, last = len(state.tokens) - 1, state.tokens[-1]
    depths = draft.depths
    chosen = [model(token, start + depths[row]) for row, token in enumerate((last, *draft.token_ids))]
    future = [chosen[0]]
    for depth in range(1, 1 + len(draft.token_ids)):
        future.append(model(future[-1], start + depth))
    path = walk(draft, future)
    for token in future[: len(path) + 1]:
        state.append(token)
    drafter.observe([VerifyFeedback(state, start, draft, tuple(path), np.array(chosen, np.int32))])
    return len(path)


def decode(model: Model, num_drafts: int, num_steps: int) -> tuple[list[int], int]:
    drafter, state = LookaheadDrafter(4), known([1])
    num_accepted = sum(step(drafter, state, ask_for(state, num_drafts, drafter), model) for _ in range(num_steps))
    return state.tokens.tolist(), num_accepted


def by_position(token: int, position: int) -> int:
    """A model that knows what comes where: no token comes again before 293 others."""
    return (7 * position + 8) % 293


def test_the_window_finds_what_no_text_before_it_says() -> None:
    tokens, num_accepted = decode(by_position, MAX_DRAFTS, 40)
    assert tokens == [(7 * place + 1) % 293 for place in range(len(tokens))]
    assert len(set(tokens)) == len(tokens) == 41 + num_accepted
    assert num_accepted > 30
    assert decode(by_position, NUM_LEVELS - 1, 40)[1] == 0  # no room for a column: only the text's n-grams


@given(st.integers(1, MAX_DRAFTS), st.lists(st.integers(1, MAX_DRAFTS), min_size=1, max_size=12), st.integers(2, 40))
@settings(max_examples=examples(60), deadline=None)
def test_any_number_of_drafts_may_be_asked_for_at_any_time(first: int, others: list[int], period: int) -> None:
    drafter, state = LookaheadDrafter(4), known([0, 1])
    for num_drafts in (first, *others):
        step(drafter, state, ask_for(state, num_drafts, drafter), lambda token, _: (token + 1) % period)
    assert state.tokens[1:].tolist() == [(1 + place) % period for place in range(len(state.tokens) - 1)]


def test_a_guess_lies_as_deep_as_its_column_and_level_say() -> None:
    drafter, state = LookaheadDrafter(4), known([1])
    window = drafter._of(state)
    lengths = list[set[int]]()
    for _ in range(NUM_LEVELS + 1):
        draft = ask_for(state, MAX_DRAFTS, drafter)
        lengths.append({len(column) for column in window.columns})
        depths = list[int]()
        for parent in parents_of(draft):
            depths.append(1 if parent < 0 else depths[parent] + 1)
        for number, (column, place) in enumerate(zip(window.columns, window.places, strict=True)):
            assert depths[place] == number + len(column)
            assert draft.token_ids[place] == column[-1]
        step(drafter, state, draft, lambda token, _: (token * 7 + 1) % 293)
    assert len(window.columns) == MAX_COLUMNS
    assert lengths == [*({number} for number in range(1, NUM_LEVELS + 1)), {NUM_LEVELS}]


def test_a_full_column_becomes_an_ngram_and_goes_on_with_what_the_model_said() -> None:
    drafter, state = LookaheadDrafter(4), known([1])
    window = drafter._of(state)
    window.columns = [array("i", range(10, 10 + NUM_LEVELS))]
    draft = ask_for(state, NUM_LEVELS, drafter)
    assert draft.token_ids == list(range(10, 10 + NUM_LEVELS))
    step(drafter, state, draft, lambda *_: 99)
    assert window.pool.find(10) == [[*range(11, 10 + NUM_LEVELS), 99]]
    assert window.columns[0].tolist() == [*range(11, 10 + NUM_LEVELS), 99]


def test_the_window_outlives_the_drafts_of_others_and_rows_that_are_not_finite() -> None:
    drafter, state = LookaheadDrafter(4), known([1])
    step(drafter, state, ask_for(state, MAX_DRAFTS, drafter), by_position)
    before = [column.tolist() for column in drafter._of(state).columns]
    ask_for(state, MAX_DRAFTS, drafter)  # made, but never verified: another drafter's was
    step(drafter, state, Draft([by_position(0, len(state.tokens) - 1), 7]), by_position)
    assert [column.tolist() for column in drafter._of(state).columns] == before
    draft = ask_for(state, MAX_DRAFTS, drafter)
    drafter.observe([VerifyFeedback(state, len(state.tokens) - 1, draft, (), np.full(len(draft.token_ids) + 1, -1, np.int32))])
    assert [column.tolist() for column in drafter._of(state).columns] == before


def test_the_texts_own_ngrams_are_verified_first() -> None:
    text = list(range(100, 120))
    draft = ask_for(known([*text, 100]), MAX_DRAFTS, LookaheadDrafter(4))
    assert draft.token_ids[:NUM_FOLLOWING] == text[1 : 1 + NUM_FOLLOWING]
    assert ask_for(known([*text, 100]), 3, LookaheadDrafter(4), (-1, 0)).token_ids == text[1:3]


@given(st.lists(st.tuples(st.sampled_from([1, 2, 1 + NUM_SLOTS]), st.integers(0, 5)), max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_a_pool_keeps_the_latest_ngrams_of_each_token(puts: list[tuple[int, int]]) -> None:
    pool, expected = NgramPool(), dict[int, tuple[int, list[list[int]]]]()
    for first, kind in puts:
        following = [kind] * NUM_FOLLOWING
        pool.put(first, following)
        owner, kept = expected.get(first % NUM_SLOTS, (first, []))
        kept = [other for other in kept if other != following] if owner == first else []
        expected[first % NUM_SLOTS] = (first, [following, *kept][:NUM_KEPT])
    for first in (1, 2, 1 + NUM_SLOTS):
        owner, kept = expected.get(first % NUM_SLOTS, (first, []))
        assert pool.find(first) == (kept if owner == first else [])


def test_a_fork_takes_the_pool_along_and_leaves_its_parents_as_it_is() -> None:
    drafter, parent = LookaheadDrafter(4), known([5, 6, 7, 8, 9, 5])
    first = ask_for(parent, NUM_FOLLOWING, drafter)
    child = known([5, 6, 7, 8, 9, 5], seq_id=1)
    drafter.fork(0, 1)
    drafter.fork(7, 8)  # one that was never seen
    assert ask_for(child, NUM_FOLLOWING, drafter) == first
    drafter._of(child).pool.put(5, [50] * NUM_FOLLOWING)
    assert ask_for(parent, NUM_FOLLOWING, drafter) == first


def test_a_departed_sequence_leaves_nothing_and_may_come_back() -> None:
    drafter, sequences = LookaheadDrafter(4), Sequences()
    state = sequences.arrive([5, 6, 7, 8, 9, 5])
    first = ask_for(state, MAX_DRAFTS, drafter)
    window = drafter._of(state)
    columns, pool = list(window.columns), window.pool
    assert any(any(column) for column in columns)
    drafter.forget(0)
    drafter.forget(0)
    assert not any(any(values) for values in (*columns, pool._owners, pool._counts, pool._following))
    assert ask_for(state, MAX_DRAFTS, drafter) == first


def test_another_sequence_under_the_same_number_gets_none_of_the_firsts_ngrams() -> None:
    drafter = LookaheadDrafter(4)
    ask_for(known([5, 6, 7, 8, 9, 5]), MAX_DRAFTS, drafter)
    assert 6 not in ask_for(known([3, 4, 5]), MAX_DRAFTS, drafter).token_ids


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_it_is_registered_and_counts_what_it_keeps(tmp_path: Path, num_seqs: int) -> None:
    drafter, pool = DRAFTERS.get("lookahead")(context_for(tmp_path, max_num_seqs=num_seqs)), NgramPool()
    assert sum(4 * len(values) for values in (pool._owners, pool._counts, pool._following)) == NUM_BYTES
    assert num_seqs * NUM_BYTES < drafter.fixed_bytes < num_seqs * NUM_BYTES * 1.1
