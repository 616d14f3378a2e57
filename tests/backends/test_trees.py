"""Token trees: a node has the bits that it would have if its ancestors alone stood before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import FloatArray
from tests.driving import Driver, RandomWeights, build
from tests.native import KERNELS, NARROW, WINDOWED

TOKENS = (11, 12, 13, 14, 15, 16, 17)
PARENTS = (-1, -1, 0, 0, 1, 2, 5)  # two roots; the first has two children, one of which goes on
PATHS = {0: (0,), 1: (1,), 2: (0, 2), 3: (0, 3), 4: (1, 4), 5: (0, 2, 5), 6: (0, 2, 5, 6)}
NATIVE = [{"backend": "native", "dtype": dtype, "kernels": name} for name in KERNELS[:2] for dtype in ("float32", "bfloat16")]


def run_tree(driver: Driver, prompt: list[int], companion: list[int] | None = None) -> FloatArray:
    """Logits of the nodes of one tree after a prompt, [7, vocab], beside a sequence that is none if there is one."""
    driver.run("tree", prompt)
    parts: dict[str, Any] = {"other": companion} if companion else {}
    batch = driver.plan({**parts, "tree": TOKENS})
    start = len(companion or [])
    depths = np.array([len(PATHS[node]) - 1 for node in range(len(TOKENS))])
    positions, parents = batch.positions.copy(), np.arange(-1, len(batch.token_ids) - 1, dtype=np.int32)
    positions[start:] = len(prompt) + depths
    parents[start:] = [parent if parent < 0 else parent + start for parent in PARENTS]
    parents[0] = -1 if companion else parents[0]
    return driver.program.forward(replace(batch, positions=positions, parents=parents))[start:]


@pytest.mark.parametrize("settings", [{"backend": "torch"}, *NATIVE], ids=str)
@pytest.mark.parametrize("length", [40, 253, 300])
def test_a_node_sees_its_ancestors_and_none_of_its_rivals(settings: dict[str, Any], length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, 320, length).tolist()
    driver = build(NARROW, RandomWeights(NARROW), block_size=5, num_blocks=800, **settings)
    logits = run_tree(driver, prompt, companion=[3, 1, 2])
    for node, path in PATHS.items():
        driver.run(node, prompt)
        alone = driver.run(node, [TOKENS[token] for token in path])[-1]
        assert logits[node].tobytes() == alone.tobytes(), f"node {node}"


def test_a_window_counts_positions_along_the_path() -> None:
    prompt = np.random.default_rng(1).integers(0, 320, 60).tolist()
    driver = build(WINDOWED, RandomWeights(WINDOWED), backend="native", num_threads=2)
    logits = run_tree(driver, prompt)
    driver.run("path", prompt)
    assert logits[6].tobytes() == driver.run("path", [TOKENS[token] for token in PATHS[6]])[-1].tobytes()
