"""Everything that a decoder's spec can ask for, on the native kernels against the torch oracle, and whatever the company."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from cloister.backends.base import GREEDY, FloatArray
from cloister.backends.native.program import NativeProgram
from cloister.backends.spec import DecoderSpec, MoeSpec
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build
from tests.native import KERNELS, PARTS, GivenWeights, build_native, in_turns, relative_error

NUM_TOKENS = 270


def tokens_of(spec: DecoderSpec) -> list[int]:
    return [int(token) for token in np.random.default_rng(2).integers(0, spec.vocab_size, NUM_TOKENS)]


@cache
def oracle(name: str) -> FloatArray:
    spec = PARTS[name]
    return build(spec, RandomWeights(spec)).run("a", tokens_of(spec))


@pytest.mark.parametrize(("name", "kernels"), in_turns(PARTS))
def test_float32_differs_from_the_oracle_by_the_order_of_sums_only(name: str, kernels: str) -> None:
    spec = PARTS[name]
    found = build_native(spec, RandomWeights(spec), kernels=kernels).run("a", tokens_of(spec), 150)
    assert np.abs(found - oracle(name)).max() < 1e-5 * np.abs(oracle(name)).max()


def all_chosen(spec: DecoderSpec) -> DecoderSpec:
    """The same with every expert chosen: what is rounded then does not change who computes."""
    layers = (
        replace(each, mlp=replace(each.mlp, num_chosen=each.mlp.num_experts, num_chosen_groups=each.mlp.num_groups))
        if isinstance(each.mlp, MoeSpec)
        else each
        for each in spec.layers
    )
    return replace(spec, layers=tuple(layers))


@cache
def oracle_of_all_chosen(name: str) -> FloatArray:
    spec = all_chosen(PARTS[name])
    if spec == PARTS[name]:
        return oracle(name)
    return build(spec, RandomWeights(spec)).run("a", tokens_of(spec))


@pytest.mark.parametrize(("name", "kernels"), in_turns(PARTS))
def test_bfloat16_stays_near_the_oracle(name: str, kernels: str) -> None:
    spec = all_chosen(PARTS[name])
    found = build_native(spec, RandomWeights(spec), kernels=kernels, dtype="bfloat16").run("a", tokens_of(spec))
    bound = 0.02 if "post norms" in name else 0.01  # measured 0.0102, 0.0054
    assert 1e-4 < relative_error(found, oracle_of_all_chosen(name)) < bound


def make(spec: DecoderSpec, dtype: str, kernels: str, block_size: int, num_threads: int) -> Driver:
    settings = {"num_blocks": 8192 // block_size, "block_size": block_size, "num_threads": num_threads}
    return build_native(spec, RandomWeights(spec), dtype=dtype, kernels=kernels, **settings)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (place + 2 * turn) % 4 == 1 else pytest.mark.slow)
        for place, name in enumerate(PARTS)
        for turn, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_no_arrangement_changes_a_bit(name: str, dtype: str) -> None:
    spec = PARTS[name]
    few = {"chunks": (7, 90), "block_sizes": (5,), "companions": (3, 40)}
    found = differing_arrangements(partial(make, spec, dtype, KERNELS[0]), tokens_of(spec), vocab=spec.vocab_size, **few)
    assert found == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("not gated, gelu", "layers.0.up.weight"),
        ("not gated, relu, biases", "layers.0.up.weight"),
        ("gated, relu", "layers.0.gate.weight"),
        ("layer norms", "layers.0.attention_norm.weight"),
        ("attention softcap", "layers.0.q.weight"),
        ("logit softcap", "head.weight"),
    ],
)
def test_what_is_not_a_number_does_not_become_one(name: str, tensor: str) -> None:
    tensors = dict(RandomWeights(PARTS[name]))
    tensors[tensor][3] = np.nan
    for kernels in KERNELS:
        program = build_native(PARTS[name], GivenWeights(tensors), kernels=kernels, dtype="bfloat16").program
        assert isinstance(program, NativeProgram)
        assert (program.step(Driver(program, 256, 16).plan({"a": tokens_of(PARTS[name])[:20]}), GREEDY).tokens == -1).all()


def test_a_profile_names_the_parts_of_a_mixture() -> None:
    spec = PARTS["experts and a gated shared one"]
    program = build_native(spec, RandomWeights(spec)).program
    assert isinstance(program, NativeProgram)
    with program.record() as spans:
        Driver(program, 32, 16).run("a", tokens_of(spec))
    assert {"mlp_norm", "router", "route", "gather", "gate_up", "down", "combine"} <= {span.name for span in spans}
