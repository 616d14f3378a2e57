"""The CUDA program as a server runs it: through the back end, with captured graphs, in any company.

Triton's kernels alone are tested in `tests/backends/test_triton_*.py`, which run on the device where there is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends import BACKENDS
from cloister.backends.base import GREEDY, LOGITS, KVLayout
from cloister.backends.spec import DecoderSpec
from cloister.quant import FORMATS, FormatOptions, quantize_on_read
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec

NARROW = make_spec(hidden=256, intermediate=172, heads=(8, 2), head_dim=32)
WINDOWED = make_spec(hidden=96, intermediate=100, heads=(3, 1), head_dim=24, window=50, qk_norm=True)
WIDE = make_spec(hidden=2048, intermediate=5632, heads=(16, 4), head_dim=128, num_layers=1, vocab=2100)


def open_driver(spec: DecoderSpec, weights: Any, *, dtype: str, block_size: int = 16) -> Driver:
    backend = BACKENDS.get("torch")(num_threads=1, device="cuda", dtype=dtype)
    num_blocks = 8192 // block_size
    return Driver(backend.build(spec, weights, KVLayout(num_blocks, block_size)), num_blocks, block_size)


def tokens_of(spec: DecoderSpec, count: int) -> list[int]:
    return torch.randint(spec.vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("spec", [NARROW, WINDOWED, WIDE], ids=["narrow", "windowed", "wide"])
def test_float32_logits_are_the_oracles(spec: DecoderSpec) -> None:
    weights, tokens = RandomWeights(spec), tokens_of(spec, 600)
    expected = build(spec, weights, num_blocks=64).run("a", tokens)
    assert np.abs(open_driver(spec, weights, dtype="float32").run("a", tokens, 250) - expected).max() < 1e-3


@pytest.mark.parametrize("spec", [NARROW, WIDE], ids=["narrow", "wide"])
def test_bfloat16_differs_from_the_oracle_only_as_rounding_does(spec: DecoderSpec) -> None:
    weights, tokens = RandomWeights(spec), tokens_of(spec, 300)
    exact = build(spec, weights, num_blocks=64).run("a", tokens)
    oracle = build(spec, weights, num_blocks=64, dtype="bfloat16").run("a", tokens)
    ours = open_driver(spec, weights, dtype="bfloat16").run("a", tokens)
    assert np.abs(ours - exact).mean() < 1.5 * np.abs(oracle - exact).mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [NARROW, WINDOWED, WIDE], ids=["narrow", "windowed", "wide"])
def test_company_chunks_blocks_and_hits_change_no_bit(spec: DecoderSpec, dtype: str) -> None:
    """Steps of one token each are replayed graphs of several sizes, the others are launched: all must agree."""
    weights = RandomWeights(spec)

    def make(block_size: int, num_threads: int) -> Driver:
        return open_driver(spec, weights, dtype=dtype, block_size=block_size)

    assert differing_arrangements(make, tokens_of(spec, 301), vocab=spec.vocab_size) == []


@pytest.mark.parametrize("name", ["int8", "int4", "qoq"])
def test_company_changes_no_bit_in_any_number_format(name: str) -> None:
    weights = quantize_on_read(WIDE, RandomWeights(WIDE), FORMATS.get(name)(FormatOptions()))

    def make(block_size: int, num_threads: int) -> Driver:
        return open_driver(WIDE, weights, dtype="bfloat16", block_size=block_size)

    found = differing_arrangements(
        make, tokens_of(WIDE, 270), vocab=WIDE.vocab_size, chunks=(1, 100), block_sizes=(5,), companions=(2, 31)
    )
    assert found == []


@pytest.mark.parametrize("num_seqs", [1, 5, 8, 40, 100])
def test_a_captured_step_has_the_bits_of_the_launched_one(num_seqs: int) -> None:
    driver = open_driver(NARROW, RandomWeights(NARROW), dtype="bfloat16")
    program: Any = driver.program
    driver.step({number: tokens_of(NARROW, 1 + 3 * number % 70) for number in range(num_seqs)} | {0: tokens_of(NARROW, 700)})
    batch = driver.plan({number: [7] for number in range(num_seqs)})
    graphs, program._graphs = program._graphs, None
    launched = program.step(batch, LOGITS).logits
    program._graphs = graphs
    assert program.step(batch, LOGITS).logits.tobytes() == launched.tobytes()
    assert program.step(batch, LOGITS).logits.tobytes() == launched.tobytes()
    assert program.step(batch, GREEDY).tokens.tolist() == launched.argmax(1).tolist()


def test_graphs_of_many_sizes_take_turns() -> None:
    driver, plain = (open_driver(NARROW, RandomWeights(NARROW), dtype="bfloat16") for _ in range(2))
    plain_program: Any = plain.program
    plain_program._graphs = None
    for one in (driver, plain):
        one.step({number: tokens_of(NARROW, 250 + number) for number in range(12)})
    for step in range(30):
        parts = {number: [step] for number in range(1 + step % 12)}
        ours, expected = driver.step(parts), plain.step(parts)
        assert all(ours[number].tobytes() == expected[number].tobytes() for number in parts)


def test_hybrid_binding_by_multiprocessor_changes_no_bit() -> None:
    weights = RandomWeights(WIDE)
    found = []
    for binding in ("multiprocessor", "interleaved"):
        driver = open_driver(WIDE, weights, dtype="bfloat16")
        program: Any = driver.program
        program._attention._binding = binding
        driver.step({number: tokens_of(WIDE, 300 + number) for number in range(8)})
        found.append(driver.step({number: [3] for number in range(8)} | {"prompt": tokens_of(WIDE, 900)}))
    first, second = found
    assert all(first[seq].tobytes() == second[seq].tobytes() for seq in first)


def test_the_memory_need_covers_what_a_program_takes() -> None:
    backend = BACKENDS.get("torch")(num_threads=1, device="cuda", dtype="bfloat16")
    weights = RandomWeights(WIDE)
    need = backend.need(WIDE, weights, block_size=16, max_batched_tokens=512)
    assert need.available_bytes is not None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    driver = Driver(backend.build(WIDE, weights, KVLayout(512, 16)), 512, 16)
    driver.run("a", tokens_of(WIDE, 512))
    driver.step({"a": [1]})
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= need.weights_bytes + 512 * need.kv_block_bytes + need.activations_bytes
