"""Native drawing against its specification in numpy: the same noise, so the same tokens, on every instruction set."""

import numpy as np
import pytest

from cloister.backends.base import SAMPLING_METADATA
from cloister.executor.sampling import Sampler
from tests.samplers import KERNELS, draw, make_drawing_program

if not KERNELS:
    pytest.skip("the native kernels were not compiled", allow_module_level=True)

EVERY = pytest.mark.parametrize("kernels", KERNELS)
BEST = KERNELS[0]
LIMITS = [
    {},
    {"top_k": 1}, {"top_k": 20}, {"top_k": 700}, {"top_k": 1 << 40},
    {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999999}, {"top_p": 1e-9},
    {"min_p": 0.1}, {"min_p": 1e-6}, {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9}, {"top_k": 3000, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01}, {"temperature": 0}, {"temperature": 0, "top_k": 5},
]  # fmt: skip


def make_draws(num_rows, limits=({},), seed=0, temperatures=(1.0,)):
    """One draw a row, of every recipe in turn."""
    draws = np.zeros(num_rows, SAMPLING_METADATA)
    draws["temperature"], draws["top_p"], draws["row"] = np.resize(temperatures, num_rows), 1, np.arange(num_rows)
    draws["seed"], draws["index"], draws["position"] = seed, np.arange(num_rows) % 3, np.arange(num_rows) * 17 + 5
    for i in range(num_rows):
        for name, value in limits[i % len(limits)].items():
            draws[name][i] = value
    return draws


def specified(logits, draws):
    return Sampler(logits.shape[1]).sample(logits, draws).tolist()


def noisy_logits(num_rows, vocab_size, spread, seed=0):
    rng = np.random.default_rng(seed + vocab_size)
    return (rng.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)


@EVERY
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 255, 256, 257, 1000, 4096, 4099])
def test_native_tokens_are_the_specified_ones(kernels, vocab_size):
    program = make_drawing_program(kernels, vocab_size)
    for spread in (0.1, 2, 8):
        logits = noisy_logits(4 * len(LIMITS), vocab_size, spread)
        draws = make_draws(len(logits), LIMITS, seed=7, temperatures=(1, 0.7, 1.9, 0.05, 1e-6))
        assert draw(program, logits, draws) == specified(logits, draws)


@EVERY
def test_native_tokens_of_a_whole_vocabulary_are_the_specified_ones(kernels):
    logits = noisy_logits(len(LIMITS), 151_936, 3)
    logits[:, ::5] = np.round(logits[:, ::5])
    draws = make_draws(len(LIMITS), LIMITS, temperatures=(1, 0.6))
    assert draw(make_drawing_program(kernels, 151_936), logits, draws) == specified(logits, draws)


@EVERY
@pytest.mark.parametrize("vocab_size", [40, 300, 2000])
def test_equal_logits_leave_the_lowest_ids_and_are_drawn_as_specified(kernels, vocab_size):
    logits = np.zeros((5 * len(LIMITS), vocab_size), np.float32)
    logits[1::2] -= np.arange(vocab_size) % 3 == 1
    draws = make_draws(len(logits), LIMITS)
    tokens = draw(make_drawing_program(kernels, vocab_size), logits, draws)
    assert tokens == specified(logits, draws)
    draws = make_draws(len(logits), [{"top_k": 7}], seed=3)
    assert max(draw(make_drawing_program(kernels, vocab_size), logits[:1].repeat(len(logits), 0), draws)) < 7


@EVERY
def test_barred_tokens_are_never_drawn(kernels):
    logits = np.full((3 * len(LIMITS), 1000), -np.inf, np.float32)
    logits[:, [3, 300, 999]] = [1.0, 1.5, 0.5]
    draws = make_draws(len(logits), LIMITS)
    tokens = draw(make_drawing_program(kernels, 1000), logits, draws)
    assert tokens == specified(logits, draws)
    assert set(tokens) == {3, 300, 999}


@EVERY
@pytest.mark.parametrize("place", [0, 255, 300, 1000])
def test_a_row_that_is_not_finite_has_no_token_and_the_others_have_theirs(kernels, place):
    logits = noisy_logits(3, 1001, 2)
    draws = make_draws(3)
    program = make_drawing_program(kernels, 1001)
    _, middle, _ = whole = draw(program, logits, draws)
    assert middle >= 0
    for wrong in (np.nan, np.inf):
        logits[1, place] = wrong
        assert draw(program, logits, draws) == [whole[0], -1, whole[2]]
    logits[1] = -np.inf
    assert draw(program, logits, draws) == [whole[0], -1, whole[2]]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_threads_and_rows_cut_the_work_and_change_no_token(num_threads):
    logits = noisy_logits(len(LIMITS), 20_011, 2)
    draws = make_draws(len(logits), LIMITS, temperatures=(1, 1.5))
    whole = specified(logits, draws)
    program = make_drawing_program(BEST, 20_011, num_threads)
    assert draw(program, logits, draws) == whole
    for i, token in enumerate(whole):
        alone = draws[i : i + 1].copy()
        alone["row"] = 0
        assert draw(program, logits[i : i + 1], alone) == [token]


def test_no_draw_is_no_token():
    assert draw(make_drawing_program(BEST, 100), np.zeros((2, 100), np.float32), make_draws(0)) == []


def test_a_draw_from_a_row_that_is_not_there_is_refused():
    program, logits, draws = make_drawing_program(BEST, 100), np.zeros((2, 100), np.float32), make_draws(3)
    with pytest.raises(ValueError, match="row"):
        program.sample(logits, draws)
    with pytest.raises(ValueError, match="width"):
        program.sample(logits[:, :50].copy(), draws[:2])


def test_native_rows_of_weights_at_the_edge_of_float32_are_drawn():
    logits = noisy_logits(len(LIMITS), 1500, 1e37)
    draws = make_draws(len(logits), LIMITS, temperatures=(1, 1e-38, 3e38))
    assert draw(make_drawing_program(BEST, 1500), logits, draws) == specified(logits, draws)
