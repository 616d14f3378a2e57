"""What is drawn follows the stated distribution, and a row's token does not know of the other rows."""

from functools import partial

import numpy as np
import pytest

from cloister.executor.sampling import finite_rows, greedy_tokens
from cloister.executor.state import BatchState
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence
from tests.samplers import SAMPLERS, make_sampler
from tests.thinning import thin


def states_of(params, vocab_size, *, seeds=None, prompts=None):
    """Makes one sequence per entry of `params`; returns states, and the draw of each from the row of the same number."""
    batch = BatchState(vocab_size=vocab_size, max_model_len=1 << 20)
    for i, sampling in enumerate(params):
        tokens, num_prompt = prompts[i] if prompts else ([0], 1)
        batch.arrive(
            NewSequence(
                seq_id=i,
                token_ids=tokens,
                num_prompt_tokens=num_prompt,
                sampling=sampling,
                seed=seeds[i] if seeds else i,
                stop_token_ids=(0,),
            )
        )
    states = [batch[i] for i in range(len(params))]
    return states, batch.sampling_metadata(states, list(range(len(states))))


@pytest.fixture(params=thin(SAMPLERS, SAMPLERS[:2]))  # `test_drawing` compares the others with the first
def make(request):
    """Makes a sampler of a vocabulary size, of every kind that there is."""
    return partial(make_sampler, request.param)


def frequencies(sampler, sampling, logits, num_draws=40_000):
    """Draws `num_draws` tokens from one row of logits, each at another position."""
    states, draws = states_of([sampling], len(logits), seeds=[42])
    draws = np.repeat(draws, num_draws)
    draws["position"] = np.arange(num_draws)
    tokens = sampler.process_and_sample(np.asarray(logits, np.float32)[None], states * num_draws, draws)
    return np.bincount(tokens, minlength=len(logits))


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


LOGITS = np.array([2.0, 1.5, 1.0, 0.3, 0.0, -0.4, -1.0, -2.0, -3.0, -4.0])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), 10),
        (SamplingParams(temperature=0.5), 10),
        (SamplingParams(temperature=2.0), 10),
        (SamplingParams(top_k=4), 4),
        (SamplingParams(temperature=0.7, top_p=0.8), 3),
        (SamplingParams(min_p=0.1), 5),
        (SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05), 5),
    ],
)
def test_draws_follow_the_distribution(make, sampling, kept):
    exact = softmax(LOGITS / sampling.temperature)
    exact[kept:] = 0
    exact /= exact.sum()
    counts = frequencies(make(len(LOGITS)), sampling, LOGITS)
    assert (counts[kept:] == 0).all()
    expected = exact[:kept] * counts.sum()
    statistic = ((counts[:kept] - expected) ** 2 / expected).sum()
    critical = {2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 9: 27.9}[kept - 1]
    assert statistic < critical


def test_draws_follow_the_distribution_across_groups_of_tokens(make):
    rng = np.random.default_rng(4)
    logits = rng.standard_normal(1000) * 2
    logits[[0, 255, 256, 511, 767, 768, 999]] = 6.0
    counts = frequencies(make(1000), SamplingParams(temperature=1.3), logits, num_draws=60_000)
    expected = softmax(logits / 1.3) * counts.sum()
    order = np.argsort(-expected)
    bins = np.array_split(order, 50)  # so that each has draws enough
    seen, wanted = (np.array([values[part].sum() for part in bins]) for values in (counts, expected))
    assert ((seen - wanted) ** 2 / wanted).sum() < 85.4  # chi-square of 49 degrees of freedom, quantile 0.999
    seen, wanted = (np.add.reduceat(values, [0, 256, 512, 768]) for values in (counts, expected))
    assert ((seen - wanted) ** 2 / wanted).sum() < 16.3  # the same of 3 degrees


def test_the_last_tokens_of_a_vocabulary_are_drawn_as_often_as_the_first(make):
    counts = frequencies(make(259), SamplingParams(), np.zeros(259), num_draws=51_800)
    assert counts[256:].sum() == pytest.approx(600, abs=100)
    assert counts.sum() == 51_800


def test_a_rare_token_is_drawn_as_rarely_as_it_should_be(make):
    logits = np.zeros(1000)
    logits[0] = 12.0
    counts = frequencies(make(1000), SamplingParams(), logits, num_draws=20_000)
    rare = 999 / (np.exp(12) + 999) * 20_000
    assert abs(counts[1:].sum() - rare) < 5 * np.sqrt(rare)


def test_equal_tokens_are_drawn_equally_often(make):
    counts = frequencies(make(8), SamplingParams(), np.zeros(8), num_draws=80_000)
    assert np.abs(counts - 10_000).max() < 500


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=40),
    SamplingParams(temperature=5.0, top_p=0.999),
    SamplingParams(temperature=1, min_p=0.05),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    SamplingParams(temperature=1, logit_bias={3: 5.0, 7: -100.0}, min_tokens=3),
    SamplingParams(temperature=1, top_k=700, top_p=0.95, min_p=0.001),
    SamplingParams(temperature=1e-6),
]


def mixed_rows(num_rows, vocab_size):
    """Rows of logits with many equal ones, and how a token is chosen from each, every recipe in turn."""
    rng = np.random.default_rng(vocab_size)
    logits = (rng.standard_normal((num_rows, vocab_size)) * 4).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])
    params = [MIXED[i % len(MIXED)] for i in range(num_rows)]
    prompts = [(rng.integers(0, vocab_size, 30).tolist(), 20) for _ in range(num_rows)]
    return logits, *states_of(params, vocab_size, prompts=prompts)


def choose_some(sampler, logits, states, draws, rows):
    """Chooses for some rows only, in the order given."""
    some = draws[rows]
    some["row"] = np.arange(len(some))
    return sampler.process_and_sample(logits[rows], [states[i] for i in rows], some).tolist()


@pytest.mark.parametrize("vocab_size", [11, 1003, 4096, 5000, 151_669])
def test_a_token_is_the_same_alone_and_among_64(make, vocab_size):
    num_rows = 64 if vocab_size < 100_000 else 12
    rng = np.random.default_rng(vocab_size)
    logits, states, draws = mixed_rows(num_rows, vocab_size)
    sampler = make(vocab_size)
    alone = [choose_some(sampler, logits, states, draws, [i])[0] for i in range(num_rows)]
    for count in {1, 2, 3, 7, 8, num_rows // 2 + 1, num_rows}:
        rows = rng.permutation(num_rows)[:count]
        assert choose_some(sampler, logits, states, draws, rows) == [alone[i] for i in rows]


def test_the_choice_leaves_the_logits_as_they_are(make):
    logits, states, draws = mixed_rows(len(MIXED), 200)
    before = logits.copy()
    make(200).process_and_sample(logits, states, draws)
    assert (logits == before).all()


def test_several_draws_share_a_row(make):
    logits, states, draws = mixed_rows(3, 700)
    draws["row"] = [1, 1, 0]
    states, sampler = [states[1]] * 3, make(700)
    tokens = sampler.process_and_sample(logits[:2], states, draws)
    assert tokens.tolist() == [
        choose_some(sampler, logits[[row]], states[:1], draws[[i]], [0])[0] for i, row in enumerate((1, 1, 0))
    ]


def test_temperature_zero_is_the_largest_logit(make):
    logits = np.random.default_rng(1).standard_normal((5, 300)).astype(np.float32)
    states, draws = states_of([SamplingParams(temperature=0)] * 5, 300)
    assert (make(300).process_and_sample(logits, states, draws) == logits.argmax(axis=1)).all()


@pytest.mark.parametrize("sampling", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)])
def test_the_narrowest_filter_is_greedy(make, sampling):
    logits = np.random.default_rng(2).standard_normal((50, 3000)).astype(np.float32)
    states, draws = states_of([sampling] * 50, 3000)
    assert (make(3000).process_and_sample(logits, states, draws) == logits.argmax(axis=1)).all()


def test_tiny_temperatures_and_huge_logits_do_not_overflow(make):
    logits = np.array([[3e38, -3e38, 1.0], [1.0, 2.0, 1.9999]], np.float32)
    states, draws = states_of([SamplingParams(temperature=1e-30)] * 2, 3)
    assert make(3).process_and_sample(logits, states, draws).tolist() == [0, 1]


def test_a_seed_of_any_size_or_sign_is_taken(make):
    logits = np.zeros((4, 1000), np.float32)
    states, draws = states_of([SamplingParams()] * 4, 1000, seeds=[-1, 2**64 - 1, 2**70, 0])
    tokens = make(1000).process_and_sample(logits, states, draws)
    assert tokens[0] == tokens[1]
    assert tokens[2] == tokens[3]


def test_a_row_whose_every_token_is_barred_has_none_to_choose(make):
    params = [SamplingParams(logit_bias={0: -np.inf, 1: -np.inf, 2: -np.inf}), SamplingParams()]
    states, draws = states_of(params, 3)
    tokens = make(3).process_and_sample(np.zeros((2, 3), np.float32), states, draws)
    assert tokens[0] == -1
    assert tokens[1] >= 0


def test_rows_that_are_not_finite_are_found():
    logits = np.zeros((5, 1001), np.float32)
    logits[1, 1000], logits[2, 0], logits[4, 500] = np.nan, np.inf, -np.inf
    assert finite_rows(logits).tolist() == [True, False, False, True, False]


def test_the_best_token_is_the_first_of_the_largest_and_none_where_a_logit_is_not_finite():
    logits = np.zeros((6, 200_000), np.float32)
    logits[0, [7, 199_999]] = 3.0
    logits[1, 150_000] = np.nan
    logits[2, 3] = np.inf
    logits[3, 4] = -np.inf
    logits[4] = -1.0
    logits[5, 123_456] = np.finfo(np.float32).max
    assert greedy_tokens(logits).tolist() == [7, -1, -1, -1, 0, 123_456]
    assert greedy_tokens(logits[:0]).tolist() == []
