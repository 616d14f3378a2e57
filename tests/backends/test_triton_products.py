"""Matrix products in every number format, against products with the reference dequantisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends.tensors import GroupedTensor, ProgressiveTensor
from tests.device import DEVICE, HAS_TRITON, needs_triton
from tests.thinning import cover

if HAS_TRITON:
    from benchmarks.gpu.float8 import float8_matmul, pack_float8
    from cloister.backends.torch.triton.elementwise import round_rows
    from cloister.backends.torch.triton.grouped import grouped_matmul, pack
    from cloister.backends.torch.triton.matmul import TileConfig, matmul

pytestmark = needs_triton
CPU_OR_GPU = torch.device(DEVICE)


def tile(rows: int = 16, columns: int = 32) -> Any:
    return TileConfig(rows, columns, 4, 2)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error_of(product: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Largest error, in units of the products' spread."""
    expected = inputs.double().cpu() @ weight.double().t() + (0 if bias is None else bias.double())
    return float((product.double().cpu() - expected).abs().max() / expected.std())


def grouped(bits: int, group: int, *, outputs: int = 40, inputs: int = 192, seed: int = 0, **settings: Any) -> GroupedTensor:
    """Random codes; `zeros`, `offsets` and `order` say whether there are any."""
    rng = np.random.default_rng(seed)
    shape = (outputs, inputs // group)
    return GroupedTensor(
        codes=rng.integers(0, 2**bits, (outputs, inputs), dtype=np.uint8),
        scales=rng.uniform(0.5, 1.5, shape).astype(np.float32),
        zeros=rng.integers(0, 2**bits, shape, dtype=np.uint8) if settings.get("zeros") else None,
        offsets=rng.standard_normal(shape, dtype=np.float32) if settings.get("offsets") else None,
        bits=bits,
        group_size=group,
        activations=settings.get("activations", "bfloat16"),
        order=rng.permutation(inputs).astype(np.int32) if settings.get("order") else None,
    )


@pytest.mark.parametrize("shape", [(1, 64, 32), (3, 100, 50), (33, 130, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_product_of_any_shape(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_inputs, num_outputs = shape
    inputs, weight = randn(num_rows, num_inputs).to(dtype), randn(num_outputs, num_inputs, seed=1).to(dtype)
    bias = randn(num_outputs, seed=2)
    out = matmul(inputs.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), torch.float32, tile())
    assert error_of(out, inputs, weight, bias) < 1e-5


@pytest.mark.parametrize(("group", "bits"), cover([16, 32, 64, 192], [4, 8]))
def test_groups_of_any_size(bits: int, group: int) -> None:
    tensor, inputs = grouped(bits, group), randn(5, 192)
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), None, torch.float32, tile())
    assert error_of(out, inputs, torch.from_numpy(tensor.dequantize())) < 1e-5


@pytest.mark.parametrize(("parts", "bits"), cover([{"zeros": True}, {"offsets": True}, {"order": True}], [4, 8]), ids=str)
def test_zeros_offsets_and_orders(bits: int, parts: dict[str, bool]) -> None:
    tensor, inputs, bias = grouped(bits, 32, **parts), randn(18, 192), randn(40, seed=3)
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), bias.to(DEVICE), torch.float32, tile())
    assert error_of(out, inputs, torch.from_numpy(tensor.dequantize()), bias) < 1e-5


@pytest.mark.parametrize("activations", ["bfloat16", "int8"])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_scale_per_output_over_any_number_of_inputs(bits: int, activations: str) -> None:
    tensor, inputs = grouped(bits, 100, inputs=100, zeros=True, activations=activations), randn(3, 100)
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), None, torch.float32, tile())
    meets = inputs if activations == "bfloat16" else rounded(inputs)
    assert error_of(out, meets, torch.from_numpy(tensor.dequantize())) < 1e-5


def test_an_odd_number_of_blocks_in_4_bits() -> None:
    tensor, inputs = grouped(4, 64, zeros=True, offsets=True), randn(2, 192)
    assert tensor.shape[1] // 64 == 3
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), None, torch.float32, tile())
    assert error_of(out, inputs, torch.from_numpy(tensor.dequantize())) < 1e-5


def test_codes_meet_bfloat16_without_being_rounded() -> None:
    tensor, inputs = grouped(8, 32, zeros=True), randn(3, 192).bfloat16()
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), None, torch.float32, tile())
    assert error_of(out, inputs, torch.from_numpy(tensor.dequantize())) < 1e-5


def rounded(inputs: torch.Tensor) -> torch.Tensor:
    codes, scales = round_rows(inputs.to(DEVICE), torch.int8)
    return (codes.double() * scales[:, None].double()).cpu()


@pytest.mark.parametrize(
    ("form", "parts"),
    cover([(4, 16), (4, 32), (4, 64), (8, 16), (8, 192)], [{}, {"zeros": True, "offsets": True}]),
    ids=str,
)
def test_inputs_rounded_to_int8(form: tuple[int, int], parts: dict[str, bool]) -> None:
    bits, group = form
    tensor, inputs = grouped(bits, group, activations="int8", **parts), randn(5, 192)
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), None, torch.float32, tile())
    assert error_of(out, rounded(inputs), torch.from_numpy(tensor.dequantize())) < 1e-5


def test_one_scale_and_no_zero_in_8_bits_lose_nothing_before_the_scale() -> None:
    tensor, inputs = grouped(8, 192, activations="int8"), randn(5, 192)
    codes, factors = round_rows(inputs.to(DEVICE), torch.int8)
    sums = codes.cpu().long() @ (torch.from_numpy(tensor.codes).long() - 128).t()
    expected = sums.float() * torch.from_numpy(tensor.scales).t() * factors.cpu()[:, None]
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), None, torch.float32, tile())
    assert torch.equal(out.cpu(), expected)


def test_scales_that_cannot_be_written_are_copied() -> None:
    """As those of a checkpoint that is mapped; torch warns of such an array, which fails a test."""
    tensor = grouped(8, 192)
    tensor.scales.flags.writeable = False
    packed = pack(tensor, torch.device("cpu"))
    assert packed.scales.data_ptr() != tensor.scales.ctypes.data
    assert packed.scales.flatten().tolist() == tensor.scales.flatten().tolist()


@pytest.mark.parametrize("group", [32, 64])
def test_two_levels_of_codes_stay_in_integers(group: int) -> None:
    rng = np.random.default_rng(0)
    tensor = ProgressiveTensor(
        codes=rng.integers(0, 16, (40, 192), dtype=np.uint8),
        channel_scales=rng.uniform(0.5, 1.5, 40).astype(np.float32),
        group_scales=rng.integers(1, 9, (40, 192 // group), dtype=np.uint8),
        zeros=rng.integers(0, 15, (40, 192 // group), dtype=np.uint8),
        group_size=group,
    )
    inputs = randn(5, 192)
    out = grouped_matmul(inputs.to(DEVICE), pack(tensor, CPU_OR_GPU), None, torch.float32, tile())
    assert error_of(out, rounded(inputs), torch.from_numpy(tensor.dequantize())) < 1e-6


def test_fp8_products_lose_only_what_rounding_loses() -> None:
    inputs, weight = randn(5, 100), randn(40, 100, seed=1)
    matrix = pack_float8(weight.to(DEVICE))
    kept = (matrix.codes.float() * matrix.scales[:, None]).cpu()
    codes, scales = round_rows(inputs.to(DEVICE), torch.float8_e4m3fn)
    out = float8_matmul(inputs.to(DEVICE), matrix, None, torch.float32, tile())
    assert error_of(out, (codes.float() * scales[:, None]).cpu(), kept) < 1e-2
    assert error_of(out, inputs, weight) < 0.3


def products() -> list[Any]:
    """(name, weight as packed, its product) of every format."""
    weight = randn(40, 192, seed=1).to(DEVICE)
    four, eight = grouped(4, 32, zeros=True), grouped(8, 192, activations="int8")
    return [
        lambda rows, at: matmul(rows, weight, None, torch.float32, at),
        lambda rows, at: grouped_matmul(rows, pack(four, CPU_OR_GPU), None, torch.float32, at),
        lambda rows, at: grouped_matmul(rows, pack(eight, CPU_OR_GPU), None, torch.float32, at),
        lambda rows, at: float8_matmul(rows, pack_float8(weight), None, torch.float32, at),
    ]


@pytest.mark.parametrize("format_number", range(4), ids=["plain", "W4A16", "W8A8", "FP8"])
def test_company_changes_no_bit_of_a_row(format_number: int) -> None:
    rows = randn(37, 192).to(DEVICE)
    product = products()[format_number]
    together = product(rows, tile())
    assert torch.equal(product(rows[5:6], tile()), together[5:6])
    assert torch.equal(product(rows[20:37], tile()), together[20:37])
