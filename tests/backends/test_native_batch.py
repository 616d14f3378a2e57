"""A batch whose numbers lead out of an array is refused before anything is written, without repeating what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.base import GREEDY, LOGITS, SAMPLING_METADATA, ForwardBatch, IntArray, Wants
from cloister.backends.native.program import NativeProgram
from tests.driving import Driver, RandomWeights
from tests.native import NARROW, PARTS, SHORT_CONVOLUTIONS, build_native

LARGEST = 2**31 - 1
NUM_BLOCKS = 8

Change = tuple[str, tuple[int, ...], int]

WRONG: list[tuple[str, Change]] = [
    ("token id", ("token_ids", (2,), NARROW.vocab_size)),
    ("token id", ("token_ids", (2,), -1)),
    ("token id", ("token_ids", (2,), LARGEST)),
    ("position", ("positions", (4,), LARGEST)),
    ("position", ("positions", (4,), -1)),
    ("position", ("positions", (4,), 20)),
    ("sequences", ("query_starts", (0,), 1)),
    ("sequences", ("query_starts", (1,), LARGEST)),
    ("sequences", ("query_starts", (1,), -5)),
    ("sequences", ("query_starts", (2,), 4)),
    ("more tokens than its context", ("context_lens", (0,), 2)),
    ("more tokens than its context", ("context_lens", (0,), -LARGEST)),
    ("shorter than", ("context_lens", (0,), LARGEST)),
    ("shorter than", ("context_lens", (0,), 33)),
    ("block", ("block_tables", (1, 0), NUM_BLOCKS)),
    ("block", ("block_tables", (1, 0), -1)),
    ("logits", ("logit_rows", (0,), 5)),
    ("logits", ("logit_rows", (0,), -1)),
    ("parent", ("parents", (0,), 0)),
    ("parent", ("parents", (1,), 2)),
    ("parent", ("parents", (1,), LARGEST)),
    ("parent", ("parents", (1,), -2)),
    ("parent", ("parents", (4,), 1)),
]


def make_batch() -> tuple[Driver, NativeProgram, ForwardBatch]:
    """Three tokens of one sequence and two of another, the first with 17 positions before them."""
    driver = build_native(NARROW, RandomWeights(NARROW), num_blocks=NUM_BLOCKS)
    assert isinstance(driver.program, NativeProgram)
    driver.run("a", list(range(17)))
    batch = replace(driver.plan({"a": [1, 2, 3], "b": [4, 5]}, [2, 4]), parents=np.array([-1, 0, 1, -1, 3], np.int32))
    return driver, driver.program, batch


def changed(batch: ForwardBatch, name: str, at: Sequence[int], value: int) -> ForwardBatch:
    array: IntArray = getattr(batch, name).copy()
    array[tuple(at)] = value
    return replace(batch, **{name: array})


@pytest.mark.parametrize(("what", "change"), WRONG)
def test_a_number_that_leads_out_of_an_array_is_refused(what: str, change: Change) -> None:
    _, program, batch = make_batch()
    before = [each.cache.tobytes() for each in program._caches]
    bad = changed(batch, *change)
    for wants in (LOGITS, GREEDY, Wants(sampling=np.zeros(0, SAMPLING_METADATA))):
        with pytest.raises(ValueError, match="batch") as caught:
            program.step(bad, wants)
        assert what in str(caught.value)
        assert not any(letter.isdigit() for letter in str(caught.value))
    assert [each.cache.tobytes() for each in program._caches] == before


def test_after_refusals_a_step_is_as_if_nothing_had_been() -> None:
    _, program, batch = make_batch()
    expected = program.step(batch, LOGITS).logits.tobytes()
    for _, change in WRONG:
        with pytest.raises(ValueError, match="batch"):
            program.step(changed(batch, *change), LOGITS)
    assert program.step(batch, LOGITS).logits.tobytes() == expected


def test_entries_of_a_table_past_the_context_are_not_looked_at() -> None:
    _, program, batch = make_batch()
    expected = program.step(batch, LOGITS).logits.tobytes()
    assert batch.block_tables[1, 1] == -1
    assert program.step(changed(batch, "block_tables", (1, 1), LARGEST), LOGITS).logits.tobytes() == expected


def test_a_position_beyond_the_learned_ones_is_refused() -> None:
    spec = replace(PARTS["learned positions"], max_positions=20)
    driver = build_native(spec, RandomWeights(spec), num_blocks=NUM_BLOCKS)
    driver.run("a", list(range(20)))
    with pytest.raises(ValueError, match="beyond those that the model learned"):
        driver.step({"a": [3]})


GOOD_SPANS = [[0, 2, 0, 3], [2, 3, 3, 0], [3, 4, 1, 1], [4, 5, 1, -1]]


def with_states() -> tuple[NativeProgram, ForwardBatch]:
    """Two steps of three and of two tokens, the last of them a draft, of a model with states."""
    driver = build_native(SHORT_CONVOLUTIONS, RandomWeights(SHORT_CONVOLUTIONS), num_blocks=NUM_BLOCKS)
    assert isinstance(driver.program, NativeProgram)
    return driver.program, replace(driver.plan({"a": [1, 2, 3], "b": [4, 5]}, [4]), state_spans=np.array(GOOD_SPANS, np.int32))


@pytest.mark.parametrize(
    ("what", "at", "value"),
    [
        ("state that the cache does not have", (0, 2), NUM_BLOCKS),
        ("state that the cache does not have", (0, 2), -1),
        ("state that the cache does not have", (3, 3), -2),
        ("state that the cache does not have", (1, 3), LARGEST),
        ("make up its tokens", (0, 0), 1),
        ("make up its tokens", (1, 1), 2),
        ("make up its tokens", (3, 1), 6),
        ("make up its tokens", (3, 1), LARGEST),
        ("several sequences", (1, 1), 4),
        ("go on from each other", (1, 2), 2),
        ("go on from each other", (0, 3), 0),
        ("known tokens of a batch follow drafts", (0, 3), -1),
    ],
)
def test_spans_of_states_that_lead_out_of_an_array_are_refused(what: str, at: tuple[int, int], value: int) -> None:
    program, batch = with_states()
    before = [each.cache.tobytes() for each in program._caches]
    spans = batch.state_spans
    assert spans is not None
    spans[at] = value
    if what == "several sequences":
        spans[2, 0] = 4
    if what == "go on from each other" and value == 0:
        spans[1, 2] = 0
    with pytest.raises(ValueError, match=what):
        program.step(batch, LOGITS)
    assert [each.cache.tobytes() for each in program._caches] == before


@pytest.mark.parametrize("accepted", [(3, 1), (5, 1), (-1, 1), (LARGEST, 1), (4, NUM_BLOCKS), (4, -1)])
def test_drafts_that_the_last_step_did_not_have_are_refused(accepted: tuple[int, int]) -> None:
    program, batch = with_states()
    program.step(batch, LOGITS)
    before = [each.cache.tobytes() for each in program._caches]
    with pytest.raises(ValueError, match=r"no such draft|does not have"):
        program.accept_drafts(np.array([(4, 1), accepted], np.int32))
    assert [each.cache.tobytes() for each in program._caches] == before
    program.accept_drafts(np.array([(4, 1)], np.int32))
    assert [each.cache.tobytes() for each in program._caches] != before
    with pytest.raises(ValueError, match="no such draft"):
        program.accept_drafts(np.array([(4, 1)], np.int32))
