"""The torch back end on weights in few bits: what the integer arithmetic of `backends.tensors` asks for, in any company."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.backends.base import Weights
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import GroupedTensor, InputRounding, ProgressiveTensor, Tensor, dequantized, rotate_blocks
from cloister.backends.torch.linear import JoinedLinear, RoundedLinear, round_rows
from cloister.backends.torch.reading import WeightReader
from cloister.backends.torch.schedule import Team
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.thinning import thin

SPEC = make_spec(hidden=128, intermediate=192, heads=(4, 2), head_dim=32)


class MixedWeights(QuantizedWeights):
    """int4 with int8 inputs but for v, which takes its inputs as they are."""

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if name.endswith(".v.weight") and isinstance(tensor, GroupedTensor):
            return GroupedTensor(tensor.codes, tensor.scales, None, None, tensor.bits, tensor.group_size, "bfloat16")
        return tensor


def quantized(name: str, spec: DecoderSpec = SPEC, **options: object) -> QuantizedWeights:
    return QuantizedWeights(RandomWeights(spec), FORMATS.get(name)(FormatOptions(**options)))  # type: ignore[arg-type]


def make(weights: Weights, spec: DecoderSpec, block_size: int, num_threads: int) -> Driver:
    return build(spec, weights, num_blocks=8192 // block_size, block_size=block_size, num_threads=num_threads)


def rows_of(count: int, width: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(count).standard_normal((count, width), dtype=np.float32)


def integer_product(rows: npt.NDArray[np.float32], tensor: GroupedTensor | ProgressiveTensor) -> npt.NDArray[np.float64]:
    """What an integer kernel computes, group by group in whole numbers, then scales in float64."""
    rows = rotate_blocks(rows, tensor.rotation)
    peaks = np.abs(rows).max(1, keepdims=True)
    levels = np.rint(rows * (np.float32(127) / peaks)).astype(np.int64)
    if isinstance(tensor, ProgressiveTensor):
        sums = levels @ tensor.integers().T.astype(np.int64)
        return sums * tensor.channel_scales.astype(np.float64) * (peaks / np.float32(127))
    codes = tensor.codes.astype(np.int64) - 2 ** (tensor.bits - 1)
    groups = codes.reshape(*tensor.scales.shape, tensor.group_size)
    sums = np.einsum("mgk,ngk->mng", levels.reshape(len(rows), -1, tensor.group_size), groups)
    return (sums * tensor.scales.astype(np.float64)).sum(2) * (peaks / np.float32(127))


@pytest.mark.parametrize("name", ["int8", "int4", "qoq"])
def test_a_product_is_that_of_whole_numbers_and_scales(name: str) -> None:
    weights = quantized(name)
    product = WeightReader(weights, torch.bfloat16, torch.device("cpu"), Team(1)).linear("layers.0.up", bias=False)
    assert isinstance(product, RoundedLinear)
    rows, tensor = rows_of(32, 128), weights.read("layers.0.up.weight")
    assert isinstance(tensor, GroupedTensor | ProgressiveTensor)
    exact = integer_product(rows, tensor)
    assert np.abs(product(torch.from_numpy(rows)).numpy() - exact).max() < 2e-6 * np.abs(exact).max()


def test_rows_round_half_to_even_and_zeros_stay_zeros() -> None:
    levels, scales = round_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.5], [0.0] * 5, [-254.0, 1.0, 3.0, 2.0, 0.0]]))
    assert levels.flatten(1).tolist() == [[127, 0, 2, -2, 126], [0] * 5, [-127, 0, 2, 1, 0]]
    assert scales.flatten().tolist() == [1, 0, 2]


def test_a_bias_is_added_after_the_scales() -> None:
    bias, rows = torch.arange(24.0), torch.from_numpy(rows_of(8, 32))
    weight = torch.from_numpy(rows_of(24, 32))
    plain, biased = (RoundedLinear(weight, offset, Team(1), InputRounding())(rows) for offset in (None, bias))
    assert torch.equal(plain + bias, biased)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_inputs_as_they_are_meet_the_dequantised_weight(name: str) -> None:
    weights = quantized(name, activations="bfloat16")
    plain = RandomWeights(SPEC)
    for key in plain.names():
        plain.read(key)[...] = dequantized(weights.read(key))
    tokens = list(range(40))
    assert build(SPEC, weights).run("a", tokens).tobytes() == build(SPEC, plain).run("a", tokens).tobytes()


def test_projections_of_one_input_may_take_it_in_different_forms() -> None:
    weights = MixedWeights(RandomWeights(SPEC), FORMATS.get("int4")(FormatOptions()))
    reader = WeightReader(weights, torch.float32, torch.device("cpu"), Team(1))
    names = [f"layers.0.{name}" for name in "qkv"]
    joined, rows = reader.linear(*names, bias=False), torch.from_numpy(rows_of(32, 128))
    assert isinstance(joined, JoinedLinear)
    apart = torch.cat([reader.linear(name, bias=False)(rows) for name in names], 1)
    assert torch.allclose(joined(rows), apart, atol=1e-5)


@pytest.mark.parametrize("name", thin(FORMATS.names(), ("int8", "qoq")))
def test_company_changes_no_bit(name: str) -> None:
    tokens = torch.randint(SPEC.vocab_size, (270,), generator=torch.Generator().manual_seed(1)).tolist()
    check = partial(make, quantized(name), SPEC)
    found = differing_arrangements(check, tokens, vocab=SPEC.vocab_size, chunks=(7, 90), block_sizes=(5,), companions=(3, 40))
    assert found == []


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.03), ("int4", 0.25), ("nvfp4", 0.25), ("qoq", 0.3)])
def test_logits_stay_near_those_of_the_model(name: str, bound: float) -> None:
    tokens = list(range(100))
    exact, rounded = build(SPEC, RandomWeights(SPEC)).run("a", tokens), build(SPEC, quantized(name)).run("a", tokens)
    error = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert 1e-4 < error < bound
