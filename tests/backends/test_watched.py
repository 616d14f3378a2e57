"""What a program says of a step for drafters: the likeliest tokens of rows, what the head read, and the head by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cloister.backends.base import (
    HIDDEN,
    LOGITS,
    SAMPLING_METADATA,
    Capability,
    FloatArray,
    IntArray,
    MaskArray,
    SamplingMetadata,
    StepOutput,
    Wants,
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


def run_both(driver: Driver, tokens: list[int], seq: str = "a") -> StepOutput:
    """Logits and hidden states of every token."""
    return driver.program.step(driver.plan({seq: tokens}), Wants(logits=True, hidden=True))


def draws_for(num_rows: int, temperature: float) -> SamplingMetadata:
    draws = np.zeros(num_rows, SAMPLING_METADATA)
    draws["row"], draws["position"] = np.arange(num_rows), np.arange(num_rows)
    draws["temperature"], draws["top_p"], draws["seed"] = temperature, 0.9, 7
    return draws


def sorted_ids(logits: FloatArray, num_top: int) -> IntArray:
    """What `find_top` shall find, by sorting everything."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top].astype(np.int32)
    order[~np.isfinite(logits).all(1)] = -1
    return order


def native_with(vocab: int, **settings: Any) -> NativeProgram:
    spec = without_layers(vocab, 32)
    program = build(spec, RandomWeights(spec), backend="native", num_blocks=4, **settings).program
    assert isinstance(program, NativeProgram)
    return program


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
    wanted = wanted_driver.program.step(wanted_driver.plan({"a": tokens}, ROWS), Wants(sampling=draws)).tokens
    found = driver.program.step(driver.plan({"a": tokens}, ROWS), Wants(sampling=draws, num_top=num_top))
    assert (found.tokens == wanted).all()
    plain = build(SPEC, RandomWeights(SPEC), backend="native").run("a", tokens)[ROWS]
    assert found.top.shape == ((len(ROWS), num_top) if num_top else (0, 0))
    assert (found.top == sorted_ids(plain, num_top)[: len(found.top)]).all()
    with_logits = build(SPEC, RandomWeights(SPEC), backend="native")
    assert (
        with_logits.program.step(with_logits.plan({"a": tokens}, ROWS), Wants(logits=True, num_top=num_top)).top == found.top
    ).all()


def test_a_watched_step_without_draws_still_says_the_likeliest() -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend="native")
    found = driver.program.step(driver.plan({"a": [1, 2]}), Wants(sampling=np.zeros(0, SAMPLING_METADATA), num_top=3))
    assert found.tokens.shape == (0,)
    assert (found.top == sorted_ids(driver.run("b", [1, 2]), 3)).all()


def every_token() -> MaskArray:
    return np.full((len(ROWS), -(-SPEC.vocab_size // 32)), 0xFFFFFFFF, np.uint32)


DRAWS = draws_for(len(ROWS), 1.0)
WANTS: dict[str, list[Wants]] = {
    "torch": [Wants(logits=True, hidden=True), HIDDEN],
    "native": [
        Wants(logits=True, hidden=True),
        Wants(greedy=True, hidden=True),
        Wants(sampling=DRAWS, hidden=True),
        Wants(sampling=DRAWS, num_top=3, hidden=True),
        Wants(sampling=DRAWS, masks=every_token, hidden=True),
        HIDDEN,
    ],
}


@pytest.mark.parametrize("backend", WANTS)
def test_a_step_of_any_kind_says_what_the_head_read(backend: str) -> None:
    tokens = list(range(40, 52))
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    wanted = driver.program.step(driver.plan({"a": tokens}, ROWS), HIDDEN).hidden
    assert wanted.shape == (len(ROWS), SPEC.hidden_size)
    for number, wants in enumerate(WANTS[backend]):
        driver.program.step(driver.plan({"between": [number]}), LOGITS)
        found = driver.program.step(driver.plan({number: tokens}, ROWS), wants)
        assert found.hidden.tobytes() == wanted.tobytes(), number
        assert (len(found.logits), len(found.tokens)) == (
            len(ROWS) * wants.logits,
            len(ROWS) * (wants.greedy or wants.sampling is not None),
        )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_head_by_itself_gives_the_bits_of_a_step(settings: dict[str, Any]) -> None:
    driver = build(SPEC, RandomWeights(SPEC), **settings)
    found = run_both(driver, list(range(70)))
    assert found.hidden.shape == (70, SPEC.hidden_size)
    assert driver.program.project(found.hidden).tobytes() == found.logits.tobytes()
    for rows in (slice(3, 4), slice(10, 15), slice(30, 47)):
        assert driver.program.project(found.hidden[rows]).tobytes() == found.logits[rows].tobytes()
    assert driver.program.project(found.hidden[:0]).shape == (0, SPEC.vocab_size)


@pytest.mark.parametrize("backend", WANTS)
@pytest.mark.parametrize("name", ["logit scale", "layer norms with biases", "several residual streams, post norms"])
def test_what_a_model_does_to_its_logits_the_head_does_too(backend: str, name: str) -> None:
    driver = build(PARTS[name], RandomWeights(PARTS[name]), backend=backend)
    found = run_both(driver, [1, 2, 3])
    assert driver.program.project(found.hidden).tobytes() == found.logits.tobytes()


@pytest.mark.parametrize("quant", ["int8", "int4", "qoq"])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 16])
def test_a_quantised_head_by_itself_gives_the_bits_of_a_step(quant: str, num_rows: int) -> None:
    weights = QuantizedWeights(RandomWeights(SPEC), FORMATS.get(quant)(FormatOptions()))
    driver = build(SPEC, weights, backend="native", dtype="bfloat16", num_threads=2)
    found = run_both(driver, list(range(20)))
    assert driver.program.project(found.hidden[-num_rows:]).tobytes() == found.logits[-num_rows:].tobytes()


@pytest.mark.parametrize("backend", WANTS)
def test_hidden_states_of_another_size_are_refused(backend: str) -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        driver.program.project(np.zeros((2, SPEC.hidden_size + 1), np.float32))


def test_the_native_hidden_states_and_logits_are_the_oracles() -> None:
    ours, oracle = (build(SPEC, RandomWeights(SPEC), backend=backend) for backend in ("native", "torch"))
    found, wanted = (run_both(driver, list(range(30))) for driver in (ours, oracle))
    assert np.abs(found.hidden - wanted.hidden).max() < 1e-5 * np.abs(wanted.hidden).max()
    assert np.abs(ours.program.project(wanted.hidden) - wanted.logits).max() < 1e-5 * np.abs(wanted.logits).max()


@pytest.mark.parametrize("backend", WANTS)
def test_both_back_ends_take_trees_and_lend_their_head(backend: str) -> None:
    program = build(SPEC, RandomWeights(SPEC), backend=backend).program
    assert Capability.TREES | Capability.HEAD in program.capabilities
    assert (Capability.SAMPLING in program.capabilities) == (backend == "native")
