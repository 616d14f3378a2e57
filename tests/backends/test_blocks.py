"""The paged cache: wiped blocks hold nothing, copied blocks hold the same, tables may lie anywhere."""

from __future__ import annotations

import numpy as np

from cloister.backends.base import LOGITS, KVLayout
from cloister.backends.torch.backend import TorchBackend
from tests.driving import Driver, RandomWeights, build, make_spec

SPEC = make_spec(hidden=32, intermediate=40, heads=(2, 1), head_dim=16)
TOKENS = list(range(1, 41))


def driver(block_size: int = 8) -> Driver:
    return build(SPEC, RandomWeights(SPEC), num_blocks=32, block_size=block_size)


def stored(driver: Driver) -> float:
    return sum(float(layer.abs().sum()) for layer in driver.program._cache.layers)  # type: ignore[attr-defined]


def test_a_wiped_block_is_zero_in_every_layer() -> None:
    one = driver()
    one.run("a", TOKENS)
    assert stored(one) > 0
    one.free("a")
    assert stored(one) == 0


def test_wiping_one_sequence_leaves_another() -> None:
    one = driver()
    alone = one.run("a", TOKENS)
    one.step({"b": TOKENS, "c": TOKENS[:-1]})
    one.free("b")
    assert one.step({"c": TOKENS[-1:]})["c"].tobytes() == alone[-1:].tobytes()


def test_a_copied_block_goes_its_own_way() -> None:
    one = driver()
    alone = one.run("a", TOKENS)
    one.share("a", "b", 20)
    one.run("b", [7, 7, 7])
    one.share("a", "c", 20)
    assert one.run("c", TOKENS[20:]).tobytes() == alone[20:].tobytes()


def test_only_the_rows_asked_for_come_back_and_in_that_order() -> None:
    one = driver()
    alone = one.run("a", TOKENS)
    batch = one.plan({"b": TOKENS}, logit_rows=[39, 3])
    assert np.array_equal(one.program.step(batch, LOGITS).logits, alone[[39, 3]])
    assert one.program.step(one.plan({"c": TOKENS}, logit_rows=[]), LOGITS).logits.shape == (0, SPEC.vocab_size)


def test_the_memory_need_is_what_a_program_takes() -> None:
    backend = TorchBackend(num_threads=1, device="cpu", dtype="bfloat16")
    need = backend.need(SPEC, RandomWeights(SPEC), block_size=8, max_batched_tokens=64)
    program = backend.build(SPEC, RandomWeights(SPEC), KVLayout(num_blocks=10, block_size=8))
    cache = sum(layer.nbytes * 80 // 81 for layer in program._cache.layers)
    weights = sum(panel.nbytes for linear in program.linears for panel in linear._panels)
    assert cache == 10 * need.kv_block_bytes
    assert weights <= need.weights_bytes <= 1.1 * weights
