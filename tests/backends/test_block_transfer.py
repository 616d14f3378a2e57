"""KV moves from one program to another: what follows has the same bits, wherever its blocks lie (decisions/0022)."""

from __future__ import annotations

import pytest

from cloister.backends.base import Capability, Program
from cloister.types.errors import EngineError
from tests.backends.test_latent import INDEXED
from tests.backends.test_latent import SPEC as LATENT
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.executor.test_state import HYBRID, NATIVE_HYBRID
from tests.native import STREAMS
from tests.token_trees import KV_FORMS

PLAIN = make_spec(hidden=80, intermediate=100, heads=(6, 3), head_dim=20)
TOKENS, MORE = [7 * i % 60 for i in range(38)], [3, 1, 4, 1, 5]

CASES = {
    "torch, float32": (PLAIN, {"backend": "torch"}),
    "torch, bfloat16": (PLAIN, {"backend": "torch", "dtype": "bfloat16"}),
    "torch, a sparse index": (INDEXED, {"backend": "torch"}),
    "torch, states": (HYBRID, {"backend": "torch"}),
    "torch, layers that share KV": (STREAMS, {"backend": "torch"}),
    **{f"native, {name}": (PLAIN, {"backend": "native", **form}) for name, form in KV_FORMS.items()},
    "native, latents": (LATENT, {"backend": "native"}),
    "native, states": (NATIVE_HYBRID, {"backend": "native"}),
    "native, layers that share KV": (STREAMS, {"backend": "native"}),
}


def make_pair(name: str) -> tuple[Driver, Driver]:
    """Two programs of one model; the second one has other block numbers."""
    spec, settings = CASES[name]
    weights = RandomWeights(spec)
    return build(spec, weights, block_size=5, **settings), build(spec, weights, num_blocks=97, block_size=5, **settings)


@pytest.mark.parametrize("name", CASES)
def test_what_follows_moved_blocks_has_the_bits_of_where_they_came_from(name: str) -> None:
    source, target = make_pair(name)
    source.run("a", TOKENS)
    target.run("other", TOKENS[::-1])
    target.plan({"a": TOKENS})  # takes blocks, and computes nothing
    assert source.blocks("a") != target.blocks("a")
    contents = source.program.export_blocks(source.blocks("a"))
    target.program.import_blocks(target.blocks("a"), contents)
    assert target.program.export_blocks(target.blocks("a")) == contents
    assert target.run("a", MORE).tobytes() == source.run("a", MORE).tobytes()


@pytest.mark.parametrize("name", ["torch, states", "native, bfloat16"])
def test_a_block_that_was_not_moved_is_missed(name: str) -> None:
    source, target = make_pair(name)
    source.run("a", TOKENS)
    target.plan({"a": TOKENS})
    contents = source.program.export_blocks(source.blocks("a")[:-1])
    target.program.import_blocks(target.blocks("a")[:-1], contents)
    assert target.run("a", MORE).tobytes() != source.run("a", MORE).tobytes()


@pytest.mark.parametrize("name", ["torch, float32", "native, int8"])
def test_contents_of_another_size_are_refused_and_nothing_is_written(name: str) -> None:
    source, target = make_pair(name)
    source.run("a", TOKENS)
    first, second = source.program.export_blocks(source.blocks("a")[:2])
    before = target.program.export_blocks([0, 1])
    for contents in ([first, second[:-1]], [first, second + b"\0"], [first]):
        with pytest.raises(ValueError, match="cannot hold"):
            target.program.import_blocks([0, 1], contents)
    assert target.program.export_blocks([0, 1]) == before


def test_a_program_that_cannot_says_so() -> None:
    program = build(PLAIN, RandomWeights(PLAIN)).program
    assert Capability.KV_TRANSFER in program.capabilities
    with pytest.raises(EngineError, match="lacks the capability KV_TRANSFER"):
        Program.export_blocks(program, [0])
