"""Choosing among some of the tokens: what a mask bars is as if its logit were minus infinity, whatever is beside it."""

import numpy as np
import pytest

from cloister.backends.base import LOGITS, SAMPLING_METADATA, Wants
from tests.driving import RandomWeights, make_spec
from tests.native import build_native
from tests.samplers import KERNELS, make_drawing_program
from tests.thinning import cover

if not KERNELS:
    pytest.skip("the native kernels were not compiled", allow_module_level=True)

EVERY = pytest.mark.parametrize("kernels", KERNELS)
VOCABS = (1, 31, 33, 300, 5_000, 151_936)


def make_draws(num, **columns):
    draws = np.zeros(num, SAMPLING_METADATA)
    draws["temperature"], draws["top_p"], draws["row"], draws["position"] = 1.0, 1.0, np.arange(num), np.arange(num)
    for name, value in columns.items():
        draws[name] = value
    return draws


def pack(allowed):
    """[num_draws, vocab] bool -> [num_draws, num_words] uint32."""
    words = -(-allowed.shape[1] // 32)
    padded = np.zeros((len(allowed), words * 32), np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


LIMITS = ({}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1})


@pytest.mark.parametrize(("kernels", "vocab", "limits"), cover(KERNELS, VOCABS, LIMITS), ids=str)
def test_masks_bar_as_minus_infinity_does(kernels, vocab, limits):
    program = make_drawing_program(kernels, vocab)
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((6, vocab)).astype(np.float32)
    allowed = rng.random((6, vocab)) < np.array([0.001, 0.01, 0.5, 0.99, 1.0, 0.2])[:, None]
    allowed[:, rng.integers(vocab)] = True
    draws = make_draws(6, seed=3, **limits)
    found = program.sample_masked(logits, draws, pack(allowed))
    assert found.tolist() == program.sample(np.where(allowed, logits, -np.inf).astype(np.float32), draws).tolist()
    assert all(allowed[row, token] for row, token in enumerate(found))


@EVERY
def test_a_draw_does_not_feel_the_masks_beside_it(kernels):
    program = make_drawing_program(kernels, 5_000)
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 5_000)).astype(np.float32)
    free = np.ones((4, 5_000), bool)
    draws = make_draws(4, seed=5)
    alone = program.sample(logits, draws).tolist()
    assert program.sample_masked(logits, draws, pack(free)).tolist() == alone
    barred = free.copy()
    barred[1, 100:] = False
    found = program.sample_masked(logits, draws, pack(barred)).tolist()
    assert [found[i] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]
    assert found[1] < 100


@EVERY
def test_draws_of_one_row_have_masks_of_their_own(kernels):
    program = make_drawing_program(kernels, 300)
    logits = np.zeros((1, 300), np.float32)
    allowed = np.zeros((3, 300), bool)
    allowed[[0, 1, 2], [5, 77, 299]] = True
    assert program.sample_masked(logits, make_draws(3, row=0), pack(allowed)).tolist() == [5, 77, 299]


@EVERY
def test_nothing_is_chosen_where_nothing_is_left_or_a_logit_is_no_number(kernels):
    program = make_drawing_program(kernels, 300)
    logits = np.zeros((4, 300), np.float32)
    logits[1, 200], logits[2, 200] = np.nan, -np.inf
    allowed = np.ones((4, 300), bool)
    allowed[0] = False
    allowed[1:3, 200] = False  # what is barred still says that the row is broken, as it does without a mask
    assert program.sample_masked(logits, make_draws(4), pack(allowed)).tolist()[:3] == [-1, -1, -1]
    assert program.sample_masked(logits, make_draws(4), pack(allowed))[3] >= 0


@EVERY
def test_masks_of_the_wrong_size_are_refused(kernels):
    program = make_drawing_program(kernels, 300)
    logits = np.zeros((2, 300), np.float32)
    for shape in ((2, 9), (1, 10)):
        with pytest.raises(ValueError, match="masks"):
            program.sample_masked(logits, make_draws(2), np.zeros(shape, np.uint32))


@EVERY
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1, 1, 2]], ids=["each its own", "some", "one shared"])
def test_a_masked_step_chooses_as_from_logits_in_hand(kernels, rows):
    spec = make_spec(hidden=64, intermediate=96, heads=(2, 1), head_dim=32, vocab=1500)
    driver = build_native(spec, RandomWeights(spec), num_threads=2, kernels=kernels)
    batch = driver.plan({name: list(range(3, 9 + number)) for number, name in enumerate("abc")}, [5, 12, 20])
    rng = np.random.default_rng(len(rows))
    masks = pack(rng.random((len(rows), 1500)) < 0.3)
    draws = make_draws(len(rows), row=rows, seed=9)
    expected = driver.program.sample_masked(driver.program.step(batch, LOGITS).logits, draws, masks)
    order = []
    found = driver.program.step(batch, Wants(sampling=draws, masks=lambda: order.append("asked") or masks)).tokens
    assert found.tolist() == expected.tolist()
    assert order == ["asked"]


def test_a_draw_from_logits_that_were_not_kept_is_refused():
    spec = make_spec(hidden=64, intermediate=96, heads=(2, 1), head_dim=32, vocab=1500)
    driver = build_native(spec, RandomWeights(spec), num_threads=2)
    batch = driver.plan({"a": [3, 4, 5]}, [2])
    with pytest.raises(ValueError, match="not kept"):
        driver.program.step(batch, Wants(sampling=make_draws(1, row=1), masks=lambda: pack(np.ones((1, 1500), bool))))
