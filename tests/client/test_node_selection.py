from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from cloister.client.node_selection import bound_capture, draw
from cloister.client.routing_audit.tails import binomial, two_sided
from cloister.types.errors import ConfigError


@dataclass(frozen=True)
class Node:
    name: str
    capacity: int


NODES = [Node("a", 1), Node("b", 2), Node("c", 5)]


def test_every_number_of_the_random_source_belongs_to_one_node() -> None:
    seen = Counter(draw(NODES, lambda below, at=at: at).name for at in range(8))
    assert seen == {"a": 1, "b": 2, "c": 5}


def test_the_random_source_is_asked_for_the_whole_capacity() -> None:
    asked: list[int] = []
    draw(NODES, lambda below: asked.append(below) or 0)
    assert asked == [8]


def test_nodes_are_drawn_by_capacity_from_the_system_s_randomness() -> None:
    num = 4000
    seen = Counter(draw(NODES).name for _ in range(num))
    for node in NODES:
        assert two_sided(binomial(num, node.capacity / 8), seen[node.name]) > 1e-7


@pytest.mark.parametrize("nodes", [[], [Node("a", 0)], [Node("a", 3), Node("b", -1)]])
def test_a_list_that_cannot_be_drawn_from_is_refused(nodes: list[Node]) -> None:
    with pytest.raises(ConfigError):
        draw(nodes)


@pytest.mark.parametrize(("share", "draws", "bound"), [(0.0, 3, 0.0), (1.0, 3, 1.0), (0.25, 1, 0.25), (0.25, 3, 0.578125)])
def test_withheld_answers_buy_no_more_than_the_bound(share: float, draws: int, bound: float) -> None:
    assert bound_capture(share, draws) == pytest.approx(bound)


def test_the_bound_is_what_withheld_answers_really_buy() -> None:
    source = random.Random(5)
    num, landed = 20_000, 0
    for _ in range(num):
        landed += any(draw(NODES, source.randrange).name == "b" for _ in range(3))
    assert two_sided(binomial(num, bound_capture(2 / 8)), landed) > 1e-6


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        bound_capture(1.5)
