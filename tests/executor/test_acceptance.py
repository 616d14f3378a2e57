"""Verified drafts come with the model's distribution, whatever they were drawn from."""

import numpy as np
import pytest

from cloister.backends.base import SAMPLING_METADATA
from cloister.executor.acceptance import Candidate, accept_child, distribution, draw_from, draw_rivals
from cloister.executor.noise import Domain, Noise, noise_keys, uniforms
from cloister.executor.state import BatchState
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence
from tests.samplers import SAMPLERS, make_sampler
from tests.thinning import cover, thin

VOCAB = 6
NUM_DRAWS = 8_000
CHI_99_999 = {4: 28.47, 5: 30.86, 11: 42.88}
"""Quantiles at 0.99999 of the chi-square distribution by degrees of freedom."""
P = np.array([0.05, 0.3, 0.0, 0.25, 0.3, 0.1], np.float32)
Q = np.array([0.5, 0.1, 0.1, 0.1, 0.0, 0.2], np.float32)
R = np.array([0.0, 0.05, 0.05, 0.6, 0.2, 0.1], np.float32)


def keys_of(num_keys, seed=3):
    positions = np.arange(num_keys)
    return noise_keys(np.full(num_keys, seed, np.uint64), np.zeros(num_keys, np.int64), positions)


def numbers_of(domain, count, num_keys=NUM_DRAWS, seed=3):
    return uniforms(keys_of(num_keys, seed)[:, None], domain, np.arange(count))


def chi_square(tokens, probs):
    counts, expected = np.bincount(tokens, minlength=len(probs)), probs.astype(np.float64) * len(tokens)
    assert counts[expected == 0].sum() == 0
    with np.errstate(invalid="ignore"):
        return np.nansum((counts - expected) ** 2 / expected)


def verified(candidates_of, count):
    """Tokens that come of verifying candidates that are drawn anew each time."""
    drafts, checks = numbers_of(Domain.DRAFT, count), numbers_of(Domain.VERIFY, count + 1).tolist()
    return [accept_child(P, candidates_of(draft), check) for draft, check in zip(drafts, checks, strict=True)]


def independent(*sources):
    def candidates_of(numbers):
        tokens = draw_from(np.stack(sources), numbers).tolist()
        return [Candidate(place, token, q) for place, (token, q) in enumerate(zip(tokens, sources, strict=True))]

    return candidates_of


def different(numbers):
    return [Candidate(place, token, q) for place, (token, q) in enumerate(zip(*draw_rivals(Q, numbers), strict=True))]


def several_models(numbers):
    """Two different tokens of one model, one of another that is not either, and one that is always the same."""
    tokens, rows = draw_rivals(Q, numbers[:2])
    others = R.copy()
    others[tokens] = 0
    third, third_rows = draw_rivals(others, numbers[2:3])
    rows = [*rows, *third_rows, None]
    return [Candidate(place, token, q) for place, (token, q) in enumerate(zip([*tokens, *third, 4], rows, strict=True))]


CASES = {
    "one draft": (independent(Q), 1),
    "four of one model": (independent(Q, Q, Q, Q), 4),
    "different ones of one model": (different, 4),
    "of two models": (independent(Q, R, Q, R), 4),
    "different ones of two models and one not drawn": (several_models, 4),
    "of the very distribution": (independent(P, P), 2),
    "none": (lambda numbers: [], 0),
}


@pytest.mark.parametrize("case", thin(CASES, 4))
def test_verified_tokens_have_the_distribution(case):
    candidates_of, count = CASES[case]
    found = verified(candidates_of, count)
    assert chi_square([token for _, token in found], P) < CHI_99_999[4]


def test_a_draft_of_the_very_distribution_is_always_accepted():
    assert all(place == 0 for place, _ in verified(independent(P), 1))


def test_one_draft_is_accepted_as_often_as_the_distributions_overlap():
    rate = np.mean([place is not None for place, _ in verified(independent(Q), 1)])
    assert rate == pytest.approx(np.minimum(P, Q).sum(), abs=0.015)


def test_different_rivals_are_accepted_more_often_than_independent_ones():
    rates = [np.mean([place is not None for place, _ in verified(case, 3)]) for case in (independent(Q, Q, Q), different)]
    assert rates[1] > rates[0] + 0.05


def test_leaving_out_a_rival_that_was_drawn_twice_would_be_seen():
    def unique(numbers):
        found = independent(Q, Q, Q)(numbers)
        return [each for place, each in enumerate(found) if each.token not in [elder.token for elder in found[:place]]]

    found = verified(unique, 3)
    assert chi_square([token for _, token in found], P) > 4 * CHI_99_999[4]


def test_verifying_with_the_numbers_of_drafting_would_be_seen():
    candidates_of = independent(Q)
    drafts = numbers_of(Domain.DRAFT, 1)
    found = [accept_child(P, candidates_of(draft), [*draft.tolist(), *draft.tolist()]) for draft in drafts]
    assert chi_square([token for _, token in found], P) > 10 * CHI_99_999[4]


def test_a_token_that_rounding_made_impossible_to_draw_is_taken_as_the_model_likes_it():
    q = np.array([1, 0, 0, 0, 0, 0], np.float32)
    assert accept_child(P, [Candidate(7, 1, q)], [0.99, 0.5]) == (7, 1)
    place, token = accept_child(P, [Candidate(7, 2, q)], [0.0, 0.5])
    assert (place, P[token] > 0) == (None, True)


def test_what_is_left_of_equal_distributions_is_the_distribution():
    barely = np.nextafter(P, np.float32(1))
    for number in (0.0, 0.5, 1 - 2.0**-53):
        place, token = accept_child(P, [Candidate(0, 2, barely)], [0.5, number])
        assert place is None
        assert P[token] > 0


def test_nothing_to_choose_is_said():
    nothing = np.zeros(VOCAB, np.float32)
    assert accept_child(nothing, [Candidate(0, 1, Q)], [0.5, 0.5]) == (None, -1)
    assert draw_from(nothing[None], np.array([0.5])).tolist() == [-1]
    assert draw_rivals(nothing, np.array([0.5]))[0] == []


def test_tokens_without_weight_are_never_drawn():
    probs = np.array([[0, 0.25, 0, 0.75, 0]], np.float32)
    ends = [0.0, 0.25, np.nextafter(0.25, 0), 1 - 2.0**-53]
    assert [draw_from(probs, np.array([number])).item() for number in ends] == [1, 3, 1, 3]


def test_rivals_are_different_and_stop_when_nothing_is_left():
    tokens, rows = draw_rivals(np.array([0, 0.5, 0.5, 0], np.float32), np.array([0.1, 0.9, 0.3]))
    assert tokens == [1, 2]
    assert rows.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 1, 0]]


PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1e-4},
]


@pytest.mark.parametrize(("kind", "parameters"), cover(SAMPLERS, PARAMETERS))
def test_the_distribution_is_the_one_that_the_sampler_draws_from(parameters, kind):
    logits = np.random.default_rng(1).normal(size=(1, 12)).astype(np.float32) * 2
    batch = BatchState(vocab_size=12, max_model_len=8)
    batch.arrive(NewSequence(seq_id=0, token_ids=[1], num_prompt_tokens=1, sampling=SamplingParams(**parameters), seed=5))
    draws = batch.sampling_metadata([batch[0]] * NUM_DRAWS, [0] * NUM_DRAWS)
    draws["position"] = np.arange(NUM_DRAWS)
    probs = distribution(logits, draws[:1])
    assert probs.sum() == pytest.approx(1, abs=1e-6)
    drawn = make_sampler(kind, 12).process_and_sample(logits, [batch[0]] * NUM_DRAWS, draws)
    assert chi_square(drawn, probs[0]) < CHI_99_999[11]


def test_a_row_without_a_token_to_choose_has_no_distribution():
    draws = np.zeros(2, SAMPLING_METADATA)
    draws["temperature"], draws["top_p"] = 1, 1
    probs = distribution(np.array([[-np.inf] * 3, [0, -np.inf, 0]], np.float32), draws)
    assert probs.tolist() == [[0, 0, 0], [0.5, 0, 0.5]]


def test_uniform_numbers_are_uniform_and_independent_of_one_another_and_of_token_noise():
    keys = keys_of(100_000)
    columns = [uniforms(keys, domain, np.array([ordinal])) for domain in Domain for ordinal in (0, 1, 2)]
    columns.append(-np.expm1(-Noise(3).at(keys[:, None], np.array([0, 1, 2])).T.astype(np.float64))[0])
    for column in columns:
        assert column.min() >= 0
        assert column.max() < 1
        assert chi_square((column * 12).astype(np.int64), np.full(12, 1 / 12)) < CHI_99_999[11]
    together = np.corrcoef(np.stack(columns)) - np.eye(len(columns))
    assert np.abs(together).max() < 5 / np.sqrt(len(keys))
