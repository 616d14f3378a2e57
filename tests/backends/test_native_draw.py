"""Where truncation ends, natively: among tens of thousands of equal tokens, in flat rows, and far from the best one."""

from functools import cache

import numpy as np
import pytest

from cloister.backends.base import SAMPLING_METADATA
from cloister.executor.noise import Noise, noise_keys
from cloister.executor.sampling import Sampler
from tests.samplers import KERNELS, draw, make_drawing_program
from tests.thinning import cover

if not KERNELS:
    pytest.skip("the native kernels were not compiled", allow_module_level=True)

EVERY = pytest.mark.parametrize("kernels", KERNELS)
VOCAB = 151_936
WIDE = [
    {"top_k": 594}, {"top_k": 595}, {"top_k": 1000}, {"top_k": 50_000}, {"top_k": VOCAB - 1}, {"top_k": VOCAB},
    {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.99}, {"top_p": 0.99999}, {"min_p": 1e-3}, {"min_p": 0.3},
    {"top_k": 50_000, "top_p": 0.9}, {"top_k": 4_000, "top_p": 0.5}, {"top_k": 50_000, "top_p": 0.99, "min_p": 0.01},
]  # fmt: skip


def make_draws(limits, temperature=1.0, seed=0):
    draws = np.zeros(len(limits), SAMPLING_METADATA)
    draws["temperature"], draws["top_p"], draws["row"], draws["seed"] = temperature, 1, np.arange(len(limits)), seed
    draws["position"] = np.arange(len(limits))
    for i, limit in enumerate(limits):
        for name, value in limit.items():
            draws[name][i] = value
    return draws


def specified(logits, draws):
    return Sampler(logits.shape[1]).sample(logits, draws).tolist()


def flat(rng):
    return rng.standard_normal(VOCAB)


def equal(rng):
    return np.zeros(VOCAB)


def steps(rng):
    """Four values, each of tens of thousands of tokens."""
    return -np.sort(rng.integers(0, 4, VOCAB))[rng.permutation(VOCAB)] / 2


def rising(rng):
    return np.linspace(-9, 0, VOCAB)


def falling(rng):
    return np.linspace(0, -9, VOCAB)


def distant(rng):
    """One token, and the others beyond where bins end."""
    return np.where(np.arange(VOCAB) == 77_777, 0.0, -40 + rng.standard_normal(VOCAB))


def barred(rng):
    return np.where(np.arange(VOCAB) % 97 == 5, rng.standard_normal(VOCAB), -np.inf)


SHAPES = [flat, equal, steps, rising, falling, distant, barred]


def wide_rows(shape):
    return np.tile(shape(np.random.default_rng(3)).astype(np.float32), (len(WIDE), 1))


@cache
def specified_for_wide_rows(shape):
    """Draws, and the tokens that they give: once for all kernels, for it takes long."""
    every = [make_draws(WIDE, temperature, seed=int(temperature * 10)) for temperature in (1.0, 1.5)]
    return [(draws, specified(wide_rows(shape), draws)) for draws in every]


@pytest.mark.parametrize(("kernels", "shape"), cover(KERNELS, SHAPES))
def test_wide_truncation_of_a_whole_vocabulary_draws_the_specified_tokens(kernels, shape):
    program, logits = make_drawing_program(kernels, VOCAB), wide_rows(shape)
    for draws, tokens in specified_for_wide_rows(shape):
        assert draw(program, logits, draws) == tokens


def draws_that_two_tokens_would_win(vocab_size, last, limit):
    """Draws in which `last`, or the token after it, is the first of all in a race of equals up to it, by turns."""
    num = 12 * vocab_size
    keys = noise_keys(np.arange(num, dtype=np.uint64), np.zeros(num, np.int64), np.zeros(num, np.int64))
    noise = Noise(vocab_size).at(keys[:, None], np.arange(last + 2)[None, :])
    firsts = noise.argmin(axis=1)
    seeds = np.flatnonzero(firsts >= last)
    draws = make_draws([limit] * len(seeds))
    draws["seed"], draws["position"] = seeds, 0
    return draws, firsts[seeds] == last


@EVERY
@pytest.mark.parametrize("limit", [{"top_k": 300}, {"top_p": 0.6}, {"top_k": 400, "top_p": 0.75}])
def test_the_last_of_equal_tokens_that_truncation_leaves_can_win_and_the_next_cannot(kernels, limit):
    vocab_size, last = 500, 299
    draws, wins = draws_that_two_tokens_would_win(vocab_size, last, limit)
    tokens = np.array(draw(make_drawing_program(kernels, vocab_size), np.zeros((len(draws), vocab_size), np.float32), draws))
    assert wins.sum() >= 3
    assert (~wins).sum() >= 3
    assert (tokens[wins] == last).all()
    assert (tokens[~wins] < last).all()


@EVERY
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_wide_row_draws_the_same_token_alone_and_in_company(kernels, num_threads):
    rng = np.random.default_rng(1)
    logits = np.stack([shape(rng) for shape in SHAPES for _ in range(2)]).astype(np.float32)
    draws = make_draws(WIDE[: len(logits)], 1.3)
    together = draw(make_drawing_program(kernels, VOCAB, 2), logits, draws)
    program = make_drawing_program(kernels, VOCAB, num_threads)
    for i, token in enumerate(together):
        alone = draws[i : i + 1].copy()
        alone["row"] = 0
        assert draw(program, logits[i : i + 1], alone) == [token]
