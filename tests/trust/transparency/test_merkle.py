"""Trees, roots and proofs: the published vectors, every small size, and sizes at random."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.trust.transparency.merkle import (
    EMPTY_ROOT,
    extend_frontier,
    frontier_root,
    hash_children,
    hash_leaf,
    make_root,
    nodes_of,
    prove_consistency,
    prove_inclusion,
    verify_consistency,
    verify_inclusion,
)
from cloister.trust.transparency.refusal import TransparencyError
from tests.thinning import examples

VECTORS = Path(__file__).parents[2] / "vectors" / "transparency"
LEAVES = [hash_leaf(str(n).encode()) for n in range(600)]
NODES = nodes_of(LEAVES)
SIZES = st.integers(1, len(LEAVES))


def load(name: str) -> list[Any]:
    return [pytest.param(case, id=case["case"]) for case in json.loads((VECTORS / name).read_text())]


def decode(text: str | None) -> bytes:
    return base64.b64decode(text or "")


def slow_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, word for word."""
    if len(leaves) <= 1:
        return leaves[0] if leaves else EMPTY_ROOT
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hash_children(slow_root(leaves[:k]), slow_root(leaves[k:]))


@pytest.mark.parametrize("case", load("inclusion.json"))
def test_published_inclusion_proofs_are_judged_as_published(case: Any) -> None:
    proof = [decode(part) for part in case["proof"] or ()]
    arguments = (decode(case["leafHash"]), case["leafIdx"], case["treeSize"], proof, decode(case["root"]))
    if case["wantErr"]:
        with pytest.raises(TransparencyError):
            verify_inclusion(*arguments)
    else:
        verify_inclusion(*arguments)


@pytest.mark.parametrize("case", load("consistency.json"))
def test_published_consistency_proofs_are_judged_as_published(case: Any) -> None:
    proof = [decode(part) for part in case["proof"] or ()]
    arguments = (case["size1"], case["size2"], decode(case["root1"]), decode(case["root2"]), proof)
    if case["wantErr"]:
        with pytest.raises(TransparencyError):
            verify_consistency(*arguments)
    else:
        verify_consistency(*arguments)


def test_every_proof_of_every_small_tree_holds_and_no_other_leaf_or_tree_takes_it() -> None:
    roots = [slow_root(LEAVES[:size]) for size in range(18)]
    for size in range(1, 18):
        assert make_root(NODES, size) == roots[size]
        for index in range(size):
            proof = prove_inclusion(NODES, index, size)
            verify_inclusion(LEAVES[index], index, size, proof, roots[size])
            for other in range(size):
                if other != index:
                    with pytest.raises(TransparencyError):
                        verify_inclusion(LEAVES[index], other, size, proof, roots[size])
        for old in range(1, size + 1):
            proof = prove_consistency(NODES, old, size)
            verify_consistency(old, size, roots[old], roots[size], proof)
            for other in range(1, size + 1):
                if other != old:
                    with pytest.raises(TransparencyError):
                        verify_consistency(other, size, roots[old], roots[size], proof)


@settings(max_examples=examples(40), deadline=None)
@given(SIZES, st.data())
def test_proofs_of_trees_of_any_size_hold_until_one_bit_is_changed(size: int, data: st.DataObject) -> None:
    root = make_root(NODES, size)
    index = data.draw(st.integers(0, size - 1))
    old = data.draw(st.integers(1, size))
    inclusion, consistency = prove_inclusion(NODES, index, size), prove_consistency(NODES, old, size)
    verify_inclusion(LEAVES[index], index, size, inclusion, root)
    verify_consistency(old, size, make_root(NODES, old), root, consistency)
    bit = data.draw(st.integers(0, 255))
    for part in range(len(inclusion)):
        with pytest.raises(TransparencyError):
            verify_inclusion(LEAVES[index], index, size, flip(inclusion, part, bit), root)
    for part in range(len(consistency)):
        with pytest.raises(TransparencyError):
            verify_consistency(old, size, make_root(NODES, old), root, flip(consistency, part, bit))


def flip(proof: tuple[bytes, ...], part: int, bit: int) -> tuple[bytes, ...]:
    changed = bytearray(proof[part])
    changed[bit // 8] ^= 1 << bit % 8
    return (*proof[:part], bytes(changed), *proof[part + 1 :])


@settings(max_examples=examples(40), deadline=None)
@given(SIZES, SIZES)
def test_who_reads_every_new_leaf_knows_the_new_root(one: int, other: int) -> None:
    old, new = sorted((one, other))
    frontier = extend_frontier((), 0, LEAVES[:old])
    assert frontier_root(frontier) == make_root(NODES, old)
    assert frontier_root(extend_frontier(frontier, old, LEAVES[old:new])) == make_root(NODES, new)
    skipped = extend_frontier(frontier, old, [*LEAVES[old : new - 1], hash_leaf(b"another")] if new > old else [LEAVES[0]])
    assert frontier_root(skipped) != make_root(NODES, new)


def test_an_empty_tree_has_the_root_of_nothing() -> None:
    assert make_root(NODES, 0) == frontier_root(()) == EMPTY_ROOT
    assert prove_consistency(NODES, 0, 5) == ()
