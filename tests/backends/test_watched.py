"""What a program says of a step for drafters: the likeliest tokens of rows, what the head read, and the head by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import (
    DRAW,
    BufferedProgram,
    DrawArray,
    FloatArray,
    ForwardBatch,
    HeadProgram,
    HiddenProgram,
    IntArray,
    TreeProgram,
    WatchedProgram,
)
from cloister.backends.native.program import NativeProgram
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.native import KERNELS, PARTS, without_layers

SPEC = make_spec(hidden=96, intermediate=100, heads=(3, 1), head_dim=24, vocab=1303)
SETTINGS: list[dict[str, Any]] = [
    {"backend": "torch", "dtype": "float32"},
    {"backend": "torch", "dtype": "bfloat16"},
    *({"backend": "native", "dtype": "bfloat16", "kernels": name} for name in KERNELS),
    {"backend": "native", "dtype": "float32"},
]
ROWS = [0, 3, 9, 10, 11]


def watched(driver: Driver) -> WatchedProgram:
    assert isinstance(driver.program, WatchedProgram)
    return driver.program


def head(driver: Driver) -> HeadProgram:
    assert isinstance(driver.program, HeadProgram)
    return driver.program


def draws_for(num_rows: int, temperature: float) -> DrawArray:
    draws = np.zeros(num_rows, DRAW)
    draws["row"], draws["position"] = np.arange(num_rows), np.arange(num_rows)
    draws["temperature"], draws["top_p"], draws["seed"] = temperature, 0.9, 7
    return draws


def sorted_ids(logits: FloatArray, num_top: int) -> IntArray:
    """What `find_top` shall find, by sorting everything."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top].astype(np.int32)
    order[~np.isfinite(logits).all(1)] = -1
    return order


def native_with(vocab: int, **settings: Any) -> WatchedProgram:
    spec = without_layers(vocab, 32)
    return watched(build(spec, RandomWeights(spec), backend="native", num_blocks=4, **settings))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("vocab", "num_top"), [(1, 1), (5, 3), (256, 256), (300, 7), (1303, 1), (40_003, 40)])
def test_the_largest_logits_are_those_that_sorting_finds(vocab: int, num_top: int, kernels: str) -> None:
    program = native_with(vocab, kernels=kernels, num_threads=2)
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((4, vocab)).astype(np.float32)
    logits[1] = np.round(logits[1] * 3)  # many equal ones
    logits[2] = 0.5
    assert (program.find_top(logits, num_top) == sorted_ids(logits, num_top)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_largest(bad: float) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 1303)).astype(np.float32)
    logits[1, 1300] = bad
    found = native_with(1303).find_top(logits, 4)
    assert (found[1] == -1).all()
    assert (found[[0, 2]] == sorted_ids(logits, 4)[[0, 2]]).all()


def test_more_than_the_vocabulary_has_is_refused() -> None:
    program = native_with(5)
    with pytest.raises(ValueError, match="not so many"):
        program.find_top(np.zeros((1, 5), np.float32), 6)
    assert program.find_top(np.zeros((0, 5), np.float32), 5).shape == (0, 5)
    assert program.find_top(np.zeros((2, 5), np.float32), 0).shape == (2, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_top", [0, 1, 12])
def test_a_watched_step_chooses_as_a_drawing_one_and_says_the_likeliest(temperature: float, num_top: int) -> None:
    tokens = list(range(12))
    draws = draws_for(len(ROWS), temperature)
    wanted_driver, driver = (build(SPEC, RandomWeights(SPEC), backend="native", num_threads=2) for _ in range(2))
    wanted = watched(wanted_driver).forward_draw(wanted_driver.plan({"a": tokens}, ROWS), draws)
    found, top = watched(driver).forward_watched(driver.plan({"a": tokens}, ROWS), draws, num_top)
    assert (found == wanted).all()
    plain = build(SPEC, RandomWeights(SPEC), backend="native").run("a", tokens)[ROWS]
    assert top.shape == (len(ROWS), num_top)
    assert (top == sorted_ids(plain, num_top)).all()


def test_a_watched_step_without_draws_still_says_the_likeliest() -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend="native")
    tokens, top = watched(driver).forward_watched(driver.plan({"a": [1, 2]}), np.zeros(0, DRAW), 3)
    assert tokens.shape == (0,)
    assert (top == sorted_ids(driver.run("b", [1, 2]), 3)).all()


def step_forward(driver: Driver, batch: ForwardBatch) -> None:
    driver.program.forward(batch)


def step_best(driver: Driver, batch: ForwardBatch) -> None:
    assert isinstance(driver.program, NativeProgram)
    driver.program.forward_best(batch)


def step_draw(driver: Driver, batch: ForwardBatch) -> None:
    watched(driver).forward_draw(batch, draws_for(len(ROWS), 1.0))


def step_watched(driver: Driver, batch: ForwardBatch) -> None:
    watched(driver).forward_watched(batch, draws_for(len(ROWS), 1.0), 3)


def step_masked(driver: Driver, batch: ForwardBatch) -> None:
    assert isinstance(driver.program, NativeProgram)
    every = np.full((len(ROWS), -(-SPEC.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    driver.program.forward_masked(batch, draws_for(len(ROWS), 1.0), lambda: every)


def step_hidden(driver: Driver, batch: ForwardBatch) -> None:
    assert isinstance(driver.program, HiddenProgram)
    driver.program.forward_hidden(batch)


STEPS: dict[str, list[Callable[[Driver, ForwardBatch], None]]] = {
    "torch": [step_forward, step_hidden],
    "native": [step_forward, step_best, step_draw, step_watched, step_masked, step_hidden],
}


@pytest.mark.parametrize("backend", STEPS)
def test_after_a_step_of_any_kind_it_says_what_the_head_read(backend: str) -> None:
    tokens = list(range(40, 52))
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    assert isinstance(driver.program, HiddenProgram)
    wanted = driver.program.forward_hidden(driver.plan({"a": tokens}, ROWS))
    for number, step in enumerate(STEPS[backend]):
        driver.program.forward(driver.plan({"between": [number]}))
        step(driver, driver.plan({number: tokens}, ROWS))
        first = head(driver).read_hidden()
        head(driver).project(first[:2])
        assert first.tobytes() == head(driver).read_hidden().tobytes() == wanted.tobytes(), step.__name__


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_head_by_itself_gives_the_bits_of_a_step(settings: dict[str, Any]) -> None:
    driver = build(SPEC, RandomWeights(SPEC), **settings)
    logits = driver.program.forward(driver.plan({"a": list(range(70))}))
    hidden = head(driver).read_hidden()
    assert hidden.shape == (70, SPEC.hidden_size)
    assert head(driver).project(hidden).tobytes() == logits.tobytes()
    for rows in (slice(3, 4), slice(10, 15), slice(30, 47)):
        assert head(driver).project(hidden[rows]).tobytes() == logits[rows].tobytes()
    assert head(driver).project(hidden[:0]).shape == (0, SPEC.vocab_size)


@pytest.mark.parametrize("backend", STEPS)
@pytest.mark.parametrize("name", ["logit scale", "layer norms with biases"])
def test_what_a_model_does_to_its_logits_the_head_does_too(backend: str, name: str) -> None:
    driver = build(PARTS[name], RandomWeights(PARTS[name]), backend=backend)
    logits = driver.run("a", [1, 2, 3])
    assert head(driver).project(head(driver).read_hidden()).tobytes() == logits.tobytes()


@pytest.mark.parametrize("quant", ["int8", "int4", "qoq"])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 16])
def test_a_quantised_head_by_itself_gives_the_bits_of_a_step(quant: str, num_rows: int) -> None:
    weights = QuantizedWeights(RandomWeights(SPEC), FORMATS.get(quant)(FormatOptions()))
    driver = build(SPEC, weights, backend="native", dtype="bfloat16", num_threads=2)
    logits = driver.run("a", list(range(20)))
    hidden = head(driver).read_hidden()
    assert head(driver).project(hidden[-num_rows:]).tobytes() == logits[-num_rows:].tobytes()


@pytest.mark.parametrize("backend", STEPS)
def test_after_a_wipe_there_is_nothing_to_read(backend: str) -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    driver.run("a", [1, 2, 3])
    assert isinstance(driver.program, BufferedProgram)
    driver.program.wipe_buffers()
    assert head(driver).read_hidden().shape == (0, SPEC.hidden_size)


def test_a_refused_step_leaves_what_was_read_before() -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend="native")
    driver.run("a", [1, 2, 3])
    before = head(driver).read_hidden()
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        driver.run("b", [SPEC.vocab_size])
    assert head(driver).read_hidden().tobytes() == before.tobytes()


@pytest.mark.parametrize("backend", STEPS)
def test_hidden_states_of_another_size_are_refused(backend: str) -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        head(driver).project(np.zeros((2, SPEC.hidden_size + 1), np.float32))


def test_the_native_hidden_states_and_logits_are_the_oracles() -> None:
    ours, oracle = (build(SPEC, RandomWeights(SPEC), backend=backend) for backend in ("native", "torch"))
    for driver in (ours, oracle):
        driver.run("a", list(range(30)))
    wanted = head(oracle).read_hidden()
    assert np.abs(head(ours).read_hidden() - wanted).max() < 1e-5 * np.abs(wanted).max()
    logits = head(oracle).project(wanted)
    assert np.abs(head(ours).project(wanted) - logits).max() < 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize("backend", STEPS)
def test_both_back_ends_move_and_lend_their_head(backend: str) -> None:
    program = build(SPEC, RandomWeights(SPEC), backend=backend).program
    assert isinstance(program, TreeProgram)
    assert isinstance(program, HeadProgram)
    assert isinstance(program, WatchedProgram) == (backend == "native")
