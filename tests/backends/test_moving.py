"""The accepted path of a token tree: its KV is moved bit for bit, and what follows has the bits of a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cloister.backends.base import LOGITS
from cloister.backends.native.program import NativeProgram
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.native import KERNELS, NARROW, SPECS
from tests.token_trees import KV_FORMS, keep_path, path_to, plan_trees, run_path

TOKENS = (11, 12, 13, 14, 15, 16, 17, 18, 19)
PARENTS = (-1, -1, 1, 1, 0, 3, 3, 6, 5)
MORE = tuple(range(30, 50))
ODD = make_spec(hidden=80, intermediate=100, heads=(6, 3), head_dim=20)
SETTINGS = [
    {"backend": "torch", "dtype": "float32"},
    {"backend": "torch", "dtype": "bfloat16"},
    *({"backend": "native", **form} for form in KV_FORMS.values()),
]


def accept(spec: Any, leaf: int, length: int = 38, **settings: Any) -> Driver:
    """A driver with the same tokens as "tree", kept from a tree, and as "chain"."""
    driver = build(spec, RandomWeights(spec), num_blocks=300, **{"block_size": 5, **settings})
    driver.run("chain", list(range(100, 100 + length)))
    driver.share("chain", "tree", length)
    path = path_to(PARENTS, leaf)
    driver.program.step(plan_trees(driver, {"tree": TOKENS}, {"tree": PARENTS}), LOGITS)
    keep_path(driver, "tree", len(TOKENS), path)
    driver.run("chain", [TOKENS[node] for node in path])
    assert driver.length("tree") == driver.length("chain")
    return driver


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("leaf", [0, 4, 7, 8])
def test_what_follows_an_accepted_path_has_the_bits_of_a_chain(settings: dict[str, Any], leaf: int) -> None:
    driver = accept(ODD, leaf, **settings)
    logits = driver.step({"tree": MORE, "chain": MORE})
    assert logits["tree"].tobytes() == logits["chain"].tobytes()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_path_that_was_not_moved_is_caught(settings: dict[str, Any]) -> None:
    driver = build(ODD, RandomWeights(ODD), num_blocks=300, **settings)
    driver.run("chain", MORE)
    driver.share("chain", "tree", len(MORE))
    driver.program.step(plan_trees(driver, {"tree": TOKENS}, {"tree": PARENTS}), LOGITS)
    driver.cut("tree", len(MORE) + 3)  # the first three nodes as if they were the path to node 5
    expected = run_path(driver, "chain", "path", [12, 14, 16, *MORE])[3:]
    assert driver.run("tree", MORE).tobytes() != expected.tobytes()


@pytest.mark.parametrize("form", KV_FORMS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_moved_blocks_are_those_of_a_chain_byte_for_byte(kernels: str, form: str) -> None:
    """Every block of every layer, once tokens that follow have taken the slots of the rejected nodes."""
    for block_size, spec in ((1, ODD), (5, SPECS["many heads"]), (16, NARROW)):
        driver = accept(spec, 8, backend="native", **KV_FORMS[form], kernels=kernels, block_size=block_size)
        driver.step({"tree": MORE, "chain": MORE})
        assert isinstance(driver.program, NativeProgram)
        for layer in range(driver.program.num_layers):
            for ours, theirs in zip(driver.blocks("tree"), driver.blocks("chain"), strict=True):
                assert driver.program.read_block(layer, ours) == driver.program.read_block(layer, theirs)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_moves_are_made_one_after_the_other(backend: str) -> None:
    """5 to 4, then 7 to 5: what stood in 5 is in 4, not what came from 7."""
    driver, other = (build(ODD, RandomWeights(ODD), backend=backend) for _ in range(2))
    for each in (driver, other):
        each.run("a", list(range(10)))
    slots = [driver.slot("a", position) for position in range(10)]
    assert slots == [other.slot("a", position) for position in range(10)]
    driver.program.move_positions(np.array([(slots[5], slots[4]), (slots[7], slots[5])], np.int32))
    other.program.move_positions(np.array([(slots[5], slots[4])], np.int32))
    other.program.move_positions(np.array([(slots[7], slots[5])], np.int32))
    assert driver.run("a", [1]).tobytes() == other.run("a", [1]).tobytes()
    swapped = build(ODD, RandomWeights(ODD), backend=backend)
    swapped.run("a", list(range(10)))
    swapped.program.move_positions(np.array([(slots[7], slots[5]), (slots[5], slots[4])], np.int32))
    assert swapped.run("a", [1]).tobytes() != driver.run("a", [1]).tobytes()


@pytest.mark.parametrize("move", [(0, 16 * 256), (-1, 0), (2**31 - 1, 0)])
def test_a_position_that_the_cache_does_not_have_is_refused(move: tuple[int, int]) -> None:
    driver = build(ODD, RandomWeights(ODD), backend="native")
    before = driver.run("a", list(range(20)))[-1]
    with pytest.raises(ValueError, match="does not have"):
        driver.program.move_positions(np.array([(driver.slot("a", 3), driver.slot("a", 2)), move], np.int32))
    driver.cut("a", 19)
    assert driver.run("a", [19])[0].tobytes() == before.tobytes()
