"""Prompt lookup: matches are those that a plain search finds, drafts are what followed, and nothing stays."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.executor.drafters import DRAFTERS
from cloister.executor.drafters.ngram import MATCH_RATES, MAX_DRAFTS, NgramDrafter
from cloister.executor.drafters.occurrences import MAX_LENGTH, NUM_KEPT, NUM_TRIED, ORDERS, Occurrences
from tests.executor.drafters.answering import answer_with, ask_for, context_for, known, parents_of, walk
from tests.thinning import examples

Pieces = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=90), min_size=1, max_size=6)


def search(tokens: list[int]) -> dict[int, int]:
    """Every earlier end of the last token, and how many tokens before it are those before the end of all."""
    found = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, MAX_LENGTH) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            found[end] = length
    return found


@settings(max_examples=examples(150), deadline=None)
@given(Pieces)
def test_matches_are_those_that_a_plain_search_finds(pieces: list[list[int]]) -> None:
    occurrences, tokens = Occurrences(), array("i")
    for piece in pieces:
        tokens.extend(piece)
        matches, expected = occurrences.find(tokens), search(tokens.tolist())
        assert all(expected[end] == length for length, end in matches)
        assert len(matches) <= NUM_KEPT
        longest = max(expected.values(), default=0)
        order = next((order for order in ORDERS if order <= longest), None)
        assert [length for length, _ in matches] == sorted((length for length, _ in matches), reverse=True)
        if order is None:
            assert not matches
        elif sum(length >= order for length in expected.values()) <= NUM_KEPT < NUM_TRIED:
            every = sorted(((length, end) for end, length in expected.items() if length >= order), reverse=True)
            assert matches == every or len(set(tokens)) > 4  # with more n-grams than slots, chains may be cut short


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=400), st.integers(1, 60))
@settings(max_examples=examples(100), deadline=None)
def test_an_index_that_grows_token_by_token_is_the_one_built_at_once(tokens: list[int], size: int) -> None:
    growing = Occurrences()
    for end in range(size, len(tokens), size):
        growing.find(array("i", tokens[:end]))
    assert growing.find(array("i", tokens)) == Occurrences().find(array("i", tokens))


def test_a_long_match_brings_a_long_draft_and_a_short_one_few_tokens() -> None:
    text = list(range(100, 200))
    long = ask_for(known([*text, 7, *text[:20]]), MAX_DRAFTS, NgramDrafter(16))
    short = ask_for(known([*text, 7, text[20]]), MAX_DRAFTS, NgramDrafter(16))
    assert long.token_ids == text[20 : 20 + MAX_DRAFTS]
    assert 0 < len(short.token_ids) < 8
    assert ask_for(known(text), MAX_DRAFTS, NgramDrafter(16)).token_ids == []
    assert list(MATCH_RATES) == sorted(MATCH_RATES)


def test_rival_continuations_are_branches_and_the_latest_comes_first() -> None:
    draft = ask_for(known([1, 2, 3, 10, 11, 9, 1, 2, 3, 20, 21, 8, 1, 2, 3]), MAX_DRAFTS, NgramDrafter(16))
    roots = [token for token, parent in zip(draft.token_ids, parents_of(draft), strict=True) if parent == -1]
    assert roots == [20, 10]
    assert len(walk(draft, [10, 11])) == len(walk(draft, [20, 21])) == 2


def test_a_repeating_text_is_drafted_beyond_its_end() -> None:
    draft = ask_for(known([5, 6, 7] * 4), 12, NgramDrafter(16))
    assert draft.token_ids == [5, 6, 7] * 4


def test_a_shape_is_filled_as_far_as_it_goes() -> None:
    state = known([1, 2, 3, 10, 11, 9, 1, 2, 3, 20, 21, 8, 1, 2, 3])
    draft = ask_for(state, 3, NgramDrafter(16), (-1, -1, 1))
    assert draft.token_ids == [20, 10, 11]
    assert parents_of(draft) == [-1, -1, 1]


def test_an_edited_text_costs_a_third_of_the_steps() -> None:
    rng = Random(4)
    text = [rng.randrange(4000) for _ in range(400)]
    edited = [token if rng.random() > 0.03 else rng.randrange(4000) for token in text]
    outcome = answer_with(NgramDrafter(16), [*text, 1, 2], edited, 16)
    assert outcome.tokens_per_step >= 3
    assert outcome.num_drafted < 3 * outcome.num_accepted
    unrelated = answer_with(NgramDrafter(16), text, [4000 + rng.randrange(4000) for _ in range(400)], 16)
    assert unrelated.num_drafted < 100


def test_a_departed_sequence_leaves_nothing_and_may_come_back() -> None:
    text = list(range(100, 140))
    drafter = NgramDrafter(16)
    state = known([*text, 7, *text[:10]])
    first = ask_for(state, 16, drafter)
    kept = [values for chain in drafter._occurrences[state.seq_id]._chains for values in (chain.before, chain._heads)]
    assert all(any(values) for values in kept)
    drafter.forget(state.seq_id)
    drafter.forget(state.seq_id)
    assert not any(any(values) for values in kept)
    assert ask_for(state, 16, drafter) == first


def test_another_sequence_under_the_same_number_gets_no_draft_of_the_first() -> None:
    drafter = NgramDrafter(16)
    ask_for(known(list(range(100, 200)) * 2), 16, drafter)
    assert ask_for(known([3, 4, 5]), 16, drafter).token_ids == []


def test_it_is_registered_and_counts_what_it_keeps(tmp_path: Path) -> None:
    drafter = DRAFTERS.get("ngram")(context_for(tmp_path))
    tokens = array("i", range(5000))
    occurrences = Occurrences()
    occurrences.find(tokens)
    kept = sum(len(chain.before) + len(chain._heads) for chain in occurrences._chains) * tokens.itemsize
    assert kept <= drafter.kv_block_bytes / 16 * len(tokens) * 1.1
