"""The vectorised filters against a plain loop, and both filters and penalties against transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from cloister.executor.logits_processors import Penalties, TokenCounts, apply_penalties
from cloister.executor.sampling import kept_tokens
from tests.thinning import examples


def kept_by_hand(scaled, top_k, top_p, min_p):
    """Sorts one row by (likelihood, lower id) and walks down."""
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    weights = [float(np.exp(scaled[i], dtype=np.float32)) for i in order]
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if top_p < 1 and kept and mass >= top_p * sum(weights):
            break
        kept.append(token)
        mass += weight
    return {token for token in kept if scaled[token] >= np.float32(np.log(max(min_p, 1e-300)))}


rows = st.lists(st.integers(-64, 0).map(lambda eighth: eighth / 8), min_size=1, max_size=40)


@settings(max_examples=examples(300), deadline=None)
@given(
    row=rows,
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.71, 0.5, 0.13, 1e-6]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)
def test_a_row_keeps_what_a_plain_loop_keeps(row, top_k, top_p, min_p):
    scaled = np.array(row, np.float32) - np.float32(max(row))
    kept = kept_tokens(scaled[None], np.array([top_k]), np.array([top_p]), np.array([min_p]))
    assert set(np.flatnonzero(kept[0]).tolist()) == kept_by_hand(scaled, top_k, top_p, min_p)


def test_rows_with_different_limits_do_not_disturb_each_other():
    rng = np.random.default_rng(3)
    scaled = np.round(rng.standard_normal((60, 3001)) * 8).astype(np.float32) / 4
    scaled -= scaled.max(axis=1, keepdims=True)
    top_k = rng.choice([0, 1, 5, 600, 1500, 3001, 5000], 60)
    top_p = rng.choice([1.0, 0.3, 0.9, 0.9999], 60)
    min_p = rng.choice([0.0, 0.01], 60)
    together = kept_tokens(scaled, top_k, top_p, min_p)
    for i in range(60):
        row = slice(i, i + 1)
        assert (together[row] == kept_tokens(scaled[row], top_k[row], top_p[row], min_p[row])).all()
        assert set(np.flatnonzero(together[i]).tolist()) == kept_by_hand(scaled[i], top_k[i], top_p[i], min_p[i])


def test_exactly_k_of_equal_tokens_stay_and_lower_ids_first():
    kept = kept_tokens(np.zeros((1, 100), np.float32), np.array([7]), np.ones(1), np.zeros(1))
    assert np.flatnonzero(kept[0]).tolist() == list(range(7))


@pytest.mark.parametrize("vocab_size", [50, 1000, 5003])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 20, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.6, 30, 0.95, 0.02),
        (1.7, 0, 0.99, 0.0),
        (1.7, 45, 0.5, 0.1),
    ],
)
def test_the_same_tokens_stay_as_in_transformers(vocab_size, temperature, top_k, top_p, min_p):
    logits = (np.random.default_rng(vocab_size + top_k).standard_normal((16, vocab_size)) * 3).astype(np.float32)
    steps = theirs.LogitsProcessorList([theirs.TemperatureLogitsWarper(temperature)])
    if top_k:
        steps.append(theirs.TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(theirs.TopPLogitsWarper(top_p))
    if min_p:
        steps.append(theirs.MinPLogitsWarper(min_p))
    expected = torch.isfinite(steps(torch.zeros((16, 1), dtype=torch.long), torch.tensor(logits))).numpy()
    scaled = (logits - logits.max(axis=1, keepdims=True)) / np.float32(temperature)
    kept = kept_tokens(scaled, np.full(16, top_k), np.full(16, top_p), np.full(16, min_p))
    assert (kept == expected).all()


def test_the_repetition_penalty_is_that_of_transformers():
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((4, 200)) * 3).astype(np.float32)
    tokens = rng.integers(0, 200, (4, 60))
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(tokens), torch.tensor(logits)).numpy()
    penalties = [Penalties(1.3, 0.0, 0.0, TokenCounts(row.astype(np.int32), 20)) for row in tokens]
    apply_penalties(logits, range(4), penalties)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


@settings(max_examples=examples(100), deadline=None)
@given(prompt=st.lists(st.integers(0, 9)), output=st.lists(st.integers(0, 9)), at=st.integers(0, 20))
def test_counts_that_grow_equal_counts_made_afresh(prompt, output, at):
    grown = TokenCounts(np.array(prompt + output[:at], np.int32), len(prompt))
    fork = grown.copy()
    other = [11 - token for token in output[at:]]
    for token, its_own in zip(output[at:], other, strict=True):
        grown.add(token)
        fork.add(its_own)
    assert as_dict(grown) == as_dict(TokenCounts(np.array(prompt + output, np.int32), len(prompt)))
    assert as_dict(fork) == as_dict(TokenCounts(np.array(prompt + output[:at] + other, np.int32), len(prompt)))


def as_dict(counts):
    return dict(zip(counts.ids.tolist(), counts.num_output.tolist(), strict=True))
