"""Draft heads computed by the native back end are those computed in numpy."""

from __future__ import annotations

from itertools import product
from typing import Literal

import numpy as np
import pytest

from cloister.backends.base import Program
from cloister.backends.draft_heads import DraftHeads, HeadBlock
from cloister.executor.drafters.head_runner import NumpyHeadRunner, ProgramHeadRunner, guess_hidden, make_head_runner
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.memory_search import CAN_SEARCH, Needle
from tests.native import build_native, in_turns

SPEC = make_spec(hidden=100, intermediate=172, heads=(4, 2), head_dim=24)
NUM_HEADS, INNER = 4, 76


def make_heads(num_blocks: int, activation: Literal["silu", "relu"], *, shares: bool, biased: bool) -> DraftHeads:
    random = np.random.default_rng(num_blocks)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    blocks = []
    for number in range(num_blocks):
        num_ups = 1 if shares and number == 0 else NUM_HEADS
        biases = draw(NUM_HEADS, 100) if biased else None
        blocks.append(HeadBlock(draw(num_ups, INNER, 100), draw(num_ups, INNER), draw(NUM_HEADS, 100, INNER), biases))
    return DraftHeads(tuple(blocks), activation)


HEADS = {
    "medusa": make_heads(1, "silu", shares=False, biased=False),
    "medusa, three blocks": make_heads(3, "silu", shares=False, biased=False),
    "blockwise": make_heads(1, "relu", shares=True, biased=True),
}


def draft_program(driver: Driver) -> Program:
    return driver.program


def hidden_states(num_rows: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((num_rows, 100), np.float32)


@pytest.mark.parametrize(("name", "dtype", "kernels"), in_turns(product(HEADS, ["float32", "bfloat16"])))
def test_heads_in_the_program_guess_what_heads_in_numpy_guess(name: str, dtype: str, kernels: str) -> None:
    program = draft_program(build_native(SPEC, RandomWeights(SPEC), dtype=dtype, kernels=kernels, num_threads=2))
    loaded = program.load_heads(HEADS[name])
    for num_rows in (1, 3, 17, 40):
        for num_heads in (1, 3, NUM_HEADS):
            hidden = hidden_states(num_rows)
            logits = program.project(guess_hidden(HEADS[name], hidden, num_heads).reshape(-1, 100))
            found = program.guess(loaded, hidden, num_heads, 5)
            assert found.shape == (num_heads, num_rows, 5)
            of_found = np.take_along_axis(logits, found.reshape(-1, 5).astype(np.int64), 1)
            best = -np.sort(-logits, axis=1)[:, :5]
            spread = np.abs(logits).max()
            # tokens that are nearly as likely may change places where sums are rounded otherwise
            assert np.abs(of_found - best).max() < (1e-4 if dtype == "float32" else 0.05) * spread


def test_a_heads_guess_does_not_depend_on_its_company() -> None:
    program = draft_program(build_native(SPEC, RandomWeights(SPEC), dtype="bfloat16", num_threads=2))
    loaded, hidden = program.load_heads(HEADS["medusa, three blocks"]), hidden_states(20)
    together = program.guess(loaded, hidden, NUM_HEADS, 8)
    for row in range(20):
        alone = program.guess(loaded, hidden[row : row + 1], NUM_HEADS, 8)
        assert (alone[:, 0] == together[:, row]).all()


def test_two_sets_of_heads_are_kept_apart() -> None:
    program = draft_program(build_native(SPEC, RandomWeights(SPEC)))
    runners = [make_head_runner(heads, program) for heads in HEADS.values()]
    assert all(isinstance(head_runner, ProgramHeadRunner) for head_runner in runners)
    for head_runner, heads in zip(runners, HEADS.values(), strict=True):
        wanted = NumpyHeadRunner(heads, program.project).guess(hidden_states(3), 2, 1)
        assert (head_runner.guess(hidden_states(3), 2, 1) == wanted).all()


def test_without_heads_of_its_own_a_back_end_lends_the_models_head() -> None:
    program = build(SPEC, RandomWeights(SPEC), backend="torch").program
    head_runner = make_head_runner(HEADS["blockwise"], program)
    assert isinstance(head_runner, NumpyHeadRunner)
    native = draft_program(build_native(SPEC, RandomWeights(SPEC)))
    assert (
        head_runner.guess(hidden_states(2), 4, 1) == make_head_runner(HEADS["blockwise"], native).guess(hidden_states(2), 4, 1)
    ).all()


@pytest.mark.skipif(not CAN_SEARCH, reason="memory is searched through /proc")
def test_what_heads_read_stays_until_it_is_wiped() -> None:
    driver = build_native(SPEC, RandomWeights(SPEC))
    program, block = draft_program(driver), HEADS["medusa"].blocks[0]
    loaded = program.load_heads(DraftHeads((HeadBlock(block.up, block.up_bias, np.zeros_like(block.down)),), "silu"))
    hidden = hidden_states(4) + np.float32(7)
    needle = Needle(hidden[2, 40:60].copy())
    before = needle.count()
    program.guess(loaded, hidden, 2, 3)
    assert needle.count() >= before + 2  # a state of each head
    driver.program.wipe_buffers()
    assert needle.count() == before


def test_rows_that_are_not_finite_guess_a_token_that_exists() -> None:
    program = draft_program(build_native(SPEC, RandomWeights(SPEC)))
    head_runner = make_head_runner(HEADS["medusa"], program)
    hidden = hidden_states(2)
    hidden[0] = np.nan
    assert head_runner.guess(hidden, 2, 3).min() >= 0


def test_heads_that_do_not_fit_are_refused() -> None:
    program = draft_program(build_native(SPEC, RandomWeights(SPEC)))
    block = HEADS["medusa"].blocks[0]
    narrow = HeadBlock(block.up[..., :50].copy(), block.up_bias, block.down[:, :50].copy())
    with pytest.raises(ValueError, match="do not fit"):
        program.load_heads(DraftHeads((narrow,), "silu"))
    loaded = program.load_heads(HEADS["medusa"])
    for number, num_heads in ((loaded, NUM_HEADS + 1), (loaded, 0), (loaded + 1, 1)):
        with pytest.raises(ValueError, match="no such draft heads"):
            program.guess(number, hidden_states(1), num_heads, 1)
    with pytest.raises(ValueError, match="size of the model"):
        program.guess(loaded, np.zeros((1, 99), np.float32), 1, 1)
