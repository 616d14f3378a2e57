"""The CUDA program against the torch oracle, and against itself in other company (batch invariance)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends.base import GREEDY, HIDDEN, LOGITS, FloatArray, KVLayout
from cloister.backends.spec import DecoderSpec
from tests.device import DEVICE, HAS_TRITON, needs_triton
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.thinning import thin

if HAS_TRITON:
    from cloister.backends.torch.cuda import program as programs
    from cloister.backends.torch.cuda.program import CudaProgram
    from cloister.backends.torch.cuda.tiles import TileBook

pytestmark = needs_triton
NARROW = make_spec(hidden=48, intermediate=40, heads=(4, 2), head_dim=16, vocab=96)
ONE_LAYER = replace(NARROW, layers=NARROW.layers[:1])
WINDOWED = make_spec(hidden=48, intermediate=40, heads=(3, 1), head_dim=24, window=20, qk_norm=True, vocab=96)


@pytest.fixture(autouse=True, scope="module")
def one_book() -> Iterator[None]:
    """Which tiles agree on this device is measured for the first program, not for each: it takes a third of the time."""
    book: Any = None

    def make_book(num_places: int) -> Any:
        nonlocal book
        book = book or TileBook(num_places)
        return book

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "TileBook", make_book)
        yield


def open_driver(spec: DecoderSpec, weights: Any, *, block_size: int = 16, dtype: torch.dtype = torch.float32) -> Driver:
    num_blocks = 2048 // block_size
    program = CudaProgram(spec, weights, KVLayout(num_blocks, block_size), dtype=dtype, device=torch.device(DEVICE))
    return Driver(program, num_blocks, block_size)


def tokens_of(spec: DecoderSpec, count: int) -> list[int]:
    return torch.randint(spec.vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("spec", thin([NARROW, WINDOWED], [WINDOWED]), ids=["narrow", "windowed"])
def test_logits_are_the_oracles(spec: DecoderSpec) -> None:
    weights, tokens = RandomWeights(spec), tokens_of(spec, 30)
    expected = build(spec, weights).run("a", tokens)
    assert np.abs(open_driver(spec, weights).run("a", tokens, 24) - expected).max() < 2e-4


def test_hidden_states_are_the_oracles() -> None:
    weights, tokens, rows = RandomWeights(ONE_LAYER), tokens_of(ONE_LAYER, 18), [0, 7, 17]
    oracle, ours = build(ONE_LAYER, weights), open_driver(ONE_LAYER, weights)
    expected = oracle.program.step(oracle.plan({"a": tokens}, rows), HIDDEN).hidden
    found = ours.program.step(ours.plan({"a": tokens}, rows), HIDDEN).hidden
    assert np.abs(found - expected).max() < 2e-4
    decoded = ours.program.step(ours.plan({"a": [5]}, [0]), HIDDEN).hidden
    assert np.abs(decoded - oracle.program.step(oracle.plan({"a": [5]}, [0]), HIDDEN).hidden).max() < 2e-4


@pytest.mark.slow
def test_bfloat16_differs_from_the_oracle_only_as_rounding_does() -> None:
    weights, tokens = RandomWeights(NARROW), tokens_of(NARROW, 40)
    exact = build(NARROW, weights).run("a", tokens)
    oracle = build(NARROW, weights, dtype="bfloat16").run("a", tokens)
    ours = open_driver(NARROW, weights, dtype=torch.bfloat16).run("a", tokens)
    assert np.abs(ours - exact).mean() < 1.5 * np.abs(oracle - exact).mean()


@pytest.mark.slow  # with biases and activations in one spec below
@pytest.mark.parametrize("family", [{"tied_embeddings": True}, {"norm_eps": 0.3}], ids=str)
def test_what_a_spec_says_is_obeyed(family: dict[str, Any]) -> None:
    spec = replace(NARROW, **family)
    weights, tokens = RandomWeights(spec), tokens_of(spec, 20)
    assert np.abs(open_driver(spec, weights).run("a", tokens) - build(spec, weights).run("a", tokens)).max() < 2e-4


def test_biases_activations_and_what_else_a_spec_says_are_obeyed() -> None:
    layer = NARROW.layers[0]
    attention = replace(layer.attention, qkv_bias=True, output_bias=True)
    changed = replace(layer, attention=attention, mlp=replace(layer.mlp, bias=True, activation="gelu"))
    layers = (changed, replace(layer, mlp=replace(layer.mlp, activation="gelu_tanh")))
    spec = replace(NARROW, layers=layers, tied_embeddings=True, norm_eps=0.3)
    weights, tokens = RandomWeights(spec), tokens_of(spec, 20)
    assert np.abs(open_driver(spec, weights).run("a", tokens) - build(spec, weights).run("a", tokens)).max() < 2e-4


@dataclass
class Prefilled:
    """A program of one layer that has computed the sequence "a", whose last tokens lie beyond the first split."""

    spec: DecoderSpec
    weights: RandomWeights
    tokens: list[int]
    driver: Driver
    logits: FloatArray


@pytest.fixture(scope="module")
def prefilled() -> Prefilled:
    weights, tokens = RandomWeights(ONE_LAYER), tokens_of(ONE_LAYER, 260)
    driver = open_driver(ONE_LAYER, weights, dtype=torch.bfloat16)
    return Prefilled(ONE_LAYER, weights, tokens, driver, driver.run("a", tokens))


def test_company_chunks_and_hits_change_no_bit(prefilled: Prefilled) -> None:
    """The last tokens are prefilled, hit, decoded, and computed beside others."""
    driver, tokens, alone = prefilled.driver, prefilled.tokens, prefilled.logits
    assert np.abs(alone - build(prefilled.spec, prefilled.weights).run("a", tokens)).mean() < 0.02
    driver.share("a", "hit", 254)
    beside_a_prompt = driver.step({"before": tokens[:3], "hit": tokens[254:258], "after": tokens[100:130]})["hit"]
    decoded = [driver.step({"after": [9], "hit": [token], "before": [8]})["hit"] for token in tokens[258:]]
    assert np.concatenate([beside_a_prompt, *decoded]).tobytes() == alone[254:].tobytes()


def test_a_greedy_step_returns_the_largest_logit_of_each_row() -> None:
    driver = open_driver(ONE_LAYER, RandomWeights(ONE_LAYER))
    logits = driver.run("a", tokens_of(NARROW, 9))
    best = driver.program.step(driver.plan({"b": tokens_of(NARROW, 9)}, logit_rows=[8, 2]), GREEDY).tokens
    assert best.tolist() == logits[[8, 2]].argmax(1).tolist()


def test_a_padded_decode_step_has_the_bits_of_the_step_itself(prefilled: Prefilled, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph computes, without the capture: five sequences in a step for eight."""
    driver = prefilled.driver
    driver.share("a", 4, 254)
    driver.step({number: tokens_of(prefilled.spec, 4 + number) for number in range(4)} | {4: prefilled.tokens[254:260]})
    program: Any = driver.program
    batch = driver.plan({number: [number] for number in (3, 0, 4, 2, 1)}, logit_rows=[4, 0, 2])
    expected, best = program.step(batch, LOGITS).logits, program.step(batch, GREEDY).tokens
    monkeypatch.setattr(program, "_graphs", Uncaptured(program))
    assert program.step(batch, LOGITS).logits.tobytes() == expected.tobytes()
    assert program.step(batch, GREEDY).tokens.tolist() == best.tolist()
    assert program._graphs.sizes == [(8, 32), (8, 32)]


class Uncaptured:
    """Stands for `graphs.DecodeGraphs` where there is nothing to capture with."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.sizes: list[tuple[int, int]] = []

    def run(self, arrays: list[Any], padding: Any) -> Any:
        self.sizes.append((padding.num_seqs, padding.table_width))
        return self._program._compute_captured(self._program._uploader.send(arrays))


def test_wiped_blocks_hold_nothing_and_copied_ones_the_same() -> None:
    driver, tokens = open_driver(ONE_LAYER, RandomWeights(ONE_LAYER), block_size=8), tokens_of(ONE_LAYER, 20)
    alone = driver.run("a", tokens)
    driver.share("a", "b", 12)
    assert driver.run("b", tokens[12:]).tobytes() == alone[12:].tobytes()
    driver.forget("b", "a")
    driver.free("a")
    assert sum(float(layer.abs().sum()) for layer in driver.program._cache.layers) == 0  # type: ignore[attr-defined]


def test_a_step_without_tokens_returns_no_logits() -> None:
    driver = open_driver(NARROW, RandomWeights(NARROW))
    empty = np.zeros(0, np.int32)
    batch = replace(driver.plan({"a": [1]}), token_ids=empty, positions=empty, logit_rows=empty)
    assert driver.program.step(batch, LOGITS).logits.shape == (0, 96)


def test_a_position_past_the_table_is_refused() -> None:
    driver = open_driver(replace(ONE_LAYER, max_positions=16), RandomWeights(ONE_LAYER))
    with pytest.raises(Exception, match="past position 15"):
        driver.run("a", tokens_of(NARROW, 17))
