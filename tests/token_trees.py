"""Token trees for tests of back ends: steps that have them, and the paths through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cloister.backends.base import FloatArray, ForwardBatch
from tests.driving import Driver

KV_FORMS: dict[str, dict[str, Any]] = {  # of the native back end: what it computes in, and what KV is
    "float32": {"dtype": "float32", "kv_dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "kv_dtype": "int4"},
}


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The ancestors of a node and itself, the oldest first."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def plan_trees(driver: Driver, parts: Mapping[object, Sequence[int]], parents: Mapping[object, Sequence[int]]) -> ForwardBatch:
    """`Driver.plan` in which the tokens of the sequences that `parents` names are trees."""
    starts = np.cumsum([0, *map(len, parts.values())])
    batch = driver.plan(parts)
    positions, above = batch.positions.copy(), np.arange(-1, starts[-1] - 1, dtype=np.int32)
    for seq, start, end in zip(parts, starts, starts[1:], strict=False):
        above[start] = -1
        if seq in parents:
            shape = parents[seq]
            assert len(shape) == end - start
            depths = [len(path_to(shape, node)) - 1 for node in range(len(shape))]
            positions[start:end] = positions[start] + np.array(depths)
            above[start:end] = [parent if parent < 0 else parent + start for parent in shape]
    return replace(batch, positions=positions, parents=above)


def keep_path(driver: Driver, seq: object, num_nodes: int, path: Sequence[int]) -> None:
    """Keeps one path of the tree that a sequence ends with, and forgets the other nodes."""
    start = driver.length(seq) - num_nodes
    moves = [
        move
        for place, node in enumerate(path)
        if node != place
        for move in zip(driver.slots(seq, start + node), driver.slots(seq, start + place), strict=True)
    ]
    driver.program.move_positions(np.array(moves, np.int32).reshape(-1, 2))
    driver.cut(seq, start + len(path))


def run_path(driver: Driver, base: object, seq: object, tokens: Sequence[int]) -> FloatArray:
    """Logits of tokens as a chain behind all of another sequence, whose blocks it shares."""
    driver.share(base, seq, driver.length(base))
    return driver.run(seq, tokens)
