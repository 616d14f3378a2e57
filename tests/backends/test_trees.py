"""Token trees: a node has the bits that it would have if its ancestors alone stood before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import LOGITS, FloatArray
from cloister.backends.spec import DecoderSpec, MlpSpec, MoeSpec
from tests.adapter_factory import random_adapter
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.native import KERNELS, NARROW, PARTS, SPECS, WINDOWED, changed
from tests.thinning import cover
from tests.token_trees import KV_FORMS, path_to, plan_trees, run_path

TOKENS = (11, 12, 13, 14, 15, 16, 17)
PARENTS = (-1, -1, 0, 0, 1, 2, 5)  # two roots; the first has two children, one of which goes on
NATIVE = [{"backend": "native", "dtype": dtype, "kernels": name} for name in KERNELS[:2] for dtype in ("float32", "bfloat16")]
SHARES_A_WINDOW = make_spec(hidden=96, intermediate=100, heads=(3, 1), head_dim=24, window=300)


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 320, count)]


def start(settings: Mapping[str, Any], length: int, spec: DecoderSpec = NARROW, **options: Any) -> Driver:
    """A driver that holds the prompt as "tree" and as "base"."""
    driver = build(spec, RandomWeights(spec), **{"num_blocks": 800, "block_size": 5, **settings, **options})
    driver.run("base", random_tokens(length, length))
    driver.share("base", "tree", length)
    return driver


def run_tree(driver: Driver, **company: list[int]) -> FloatArray:
    """Logits of the nodes of the tree, [7, vocab], beside sequences that are none."""
    parts: dict[object, Sequence[int]] = dict(company) | {"tree": TOKENS}
    return driver.program.step(plan_trees(driver, parts, {"tree": PARENTS}), LOGITS).logits[-len(TOKENS) :]


def differing_nodes(driver: Driver, logits: FloatArray) -> list[int]:
    """The nodes that have other bits than the last token of their path alone."""
    found = []
    for node in range(len(TOKENS)):
        alone = run_path(driver, "base", node, [TOKENS[place] for place in path_to(PARENTS, node)])[-1]
        if logits[node].tobytes() != alone.tobytes():
            found.append(node)
    return found


@pytest.mark.parametrize("settings", [{"backend": "torch"}, *NATIVE], ids=str)
@pytest.mark.parametrize("length", [40, 253, 300])
def test_a_node_sees_its_ancestors_and_none_of_its_rivals(settings: dict[str, Any], length: int) -> None:
    driver = start(settings, length)
    assert differing_nodes(driver, run_tree(driver, other=[3, 1, 2])) == []


def test_a_tree_read_as_a_chain_is_caught() -> None:
    driver = start({"backend": "native"}, 40)
    chain = driver.step({"tree": TOKENS})["tree"]
    assert differing_nodes(driver, chain) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("length", "name", "form"), cover([1, 254, 513], SPECS, KV_FORMS))
def test_a_node_keeps_its_bits_in_every_kind_of_kv(name: str, form: str, length: int) -> None:
    driver = start({"backend": "native", **KV_FORMS[form]}, length, SPECS[name], num_threads=2)
    company = {"prefills": random_tokens(1, 70), "decodes": [4]}
    assert differing_nodes(driver, run_tree(driver, **company)) == []


@pytest.mark.parametrize(("kernels", "form"), cover(KERNELS[1:], KV_FORMS))
def test_a_node_keeps_its_bits_on_every_instruction_set(kernels: str, form: str) -> None:
    driver = start({"backend": "native", **KV_FORMS[form], "kernels": kernels}, 255, WINDOWED)
    assert differing_nodes(driver, run_tree(driver, other=[3])) == []


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_neither_blocks_nor_threads_change_a_node(block_size: int, num_threads: int) -> None:
    """A context of several splits, so that a team cuts attention."""
    wanted = run_tree(start({"backend": "native"}, 700))
    driver = start({"backend": "native", "block_size": block_size, "num_threads": num_threads}, 700)
    assert run_tree(driver).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("spec", [WINDOWED, SHARES_A_WINDOW], ids=["50", "300"])
@pytest.mark.parametrize("settings", [{"backend": "torch"}, {"backend": "native", "num_threads": 2}], ids=str)
@pytest.mark.parametrize("length", [60, 302, 555])
def test_a_window_counts_positions_along_the_path(settings: dict[str, Any], spec: DecoderSpec, length: int) -> None:
    driver = start(settings, length, spec)
    assert differing_nodes(driver, run_tree(driver)) == []


@pytest.mark.parametrize("name", ["no rotation", "learned positions", "softcaps", "mixture of experts"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_whatever_a_layer_computes_a_node_keeps_its_bits(backend: str, name: str) -> None:
    spec = {
        **PARTS,
        "softcaps": changed(NARROW, attention={"softcap": 5.0}, logit_softcap=9.0),
        "mixture of experts": changed(NARROW, layer={"mlp": MoeSpec(4, 2, MlpSpec(64))}),
    }[name]
    driver = start({"backend": backend}, 100, spec)
    assert differing_nodes(driver, run_tree(driver)) == []


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_several_trees_of_sequences_with_adapters_do_not_meet(backend: str) -> None:
    driver = start({"backend": backend, "num_threads": 2}, 61)
    driver.program.load_adapter(0, random_adapter(NARROW, 4, size=0.5))
    driver.run("other", random_tokens(9, 33))
    parts: dict[object, Sequence[int]] = {"other": [5, 6, 7, 8], "tree": TOKENS, "chain": [1, 2]}
    slots = np.array([-1, 0, -1], np.int32)
    batch = plan_trees(driver, parts, {"other": (-1, -1, 1, 1), "tree": PARENTS})
    logits = driver.program.step(replace(batch, adapters=slots), LOGITS).logits[4:11]
    for node in range(len(TOKENS)):
        driver.share("base", node, 61)
        path = [TOKENS[place] for place in path_to(PARENTS, node)]
        alone = driver.program.step(replace(driver.plan({node: path}), adapters=slots[1:2]), LOGITS).logits[-1]
        assert logits[node].tobytes() == alone.tobytes(), node
    assert logits[0].tobytes() != run_path(driver, "base", "plain", TOKENS[:1])[0].tobytes()


def test_a_wide_and_a_deep_tree_cross_splits_of_attention() -> None:
    """40 nodes: a comb whose path crosses position 256, with a rival beside each of its nodes."""
    parents = tuple(-1 if node < 2 else (node - 2) // 2 * 2 for node in range(40))
    tokens = random_tokens(3, 40)
    for length in (240, 250, 256):
        driver = start({"backend": "native", "num_threads": 2}, length)
        logits = driver.program.step(plan_trees(driver, {"tree": tokens}, {"tree": parents}), LOGITS).logits
        for node in range(0, 40, 3):
            alone = run_path(driver, "base", (length, node), [tokens[place] for place in path_to(parents, node)])[-1]
            assert logits[node].tobytes() == alone.tobytes(), (length, node)


def test_the_native_nodes_are_the_oracles() -> None:
    wanted, found = (run_tree(start({"backend": backend}, 270)) for backend in ("torch", "native"))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
