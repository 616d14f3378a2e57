"""The kernels that take each row on its own, against the torch oracle: norms, rotation, gates, rounding, the largest logit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends.spec import RopeSpec
from cloister.backends.torch.layers import ACTIVATIONS, RopeTable, rms_norm, rotate
from tests.device import DEVICE, HAS_TRITON, needs_triton

if HAS_TRITON:
    from cloister.backends.torch.triton.attention import Heads
    from cloister.backends.torch.triton.elementwise import add_and_norm, find_largest, gate, rotate_and_write, round_rows

pytestmark = needs_triton


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("width", [1, 24, 64, 100, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_what_comes_before_it(width: int, dtype: torch.dtype) -> None:
    hidden, added, weight = randn(3, width), randn(3, width, seed=1).to(dtype), randn(width, seed=2)
    expected_sum = hidden + added.float()
    expected = rms_norm(expected_sum, weight, 1e-5)
    out = torch.empty(3, width, dtype=dtype, device=DEVICE)
    add_and_norm(hidden, added, weight, out, 1e-5)
    assert torch.equal(hidden, expected_sum)
    assert torch.allclose(out.float(), expected, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=1e-2)


def test_the_first_norm_adds_nothing() -> None:
    hidden, weight, out = randn(2, 64), randn(64, seed=2), torch.empty(2, 64, device=DEVICE)
    before = hidden.clone()
    add_and_norm(hidden, None, weight, out, 1e-5)
    assert torch.equal(hidden, before)
    assert torch.allclose(out, rms_norm(before, weight, 1e-5), atol=1e-6)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 24)])
def test_rotation_equals_the_oracles_and_fills_the_cache(has_norm: bool, shape: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = shape
    positions = torch.tensor([0, 7, 300], dtype=torch.int32, device=DEVICE)
    targets = torch.tensor([5, -1, 0], dtype=torch.int32, device=DEVICE)
    projected = randn(3, (num_heads + 2 * num_kv_heads) * head_dim)
    norms = randn(2, head_dim, seed=3)
    frequencies = tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    angles = RopeTable(RopeSpec(frequencies, 1.25), torch.device(DEVICE)).at(torch.arange(301, device=DEVICE), 301)
    slots = torch.full((6, 2 * num_kv_heads * head_dim), 9.0, device=DEVICE)
    queries = torch.empty(3, num_heads, head_dim, device=DEVICE)
    rotate_and_write(
        projected, positions, targets, angles.squeeze(2).transpose(0, 1).contiguous(), norms if has_norm else None, queries,
        slots, heads=Heads(num_heads, num_kv_heads, head_dim, 0), scale=0.3, eps=1e-5,
    )  # fmt: skip
    q, k, v = projected.view(3, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if has_norm:
        q, k = rms_norm(q, norms[0], 1e-5), rms_norm(k, norms[1], 1e-5)
    turned_q, turned_k = torch.empty_like(q), torch.empty_like(k)
    rotate(q, angles[:, positions.long()], turned_q)
    rotate(k, angles[:, positions.long()], turned_k)
    assert torch.allclose(queries, turned_q * 0.3 * math.log2(math.e), atol=1e-5)
    kept = torch.stack([turned_k, v], 1).view(3, -1)
    assert torch.allclose(slots[[5, 0]], kept[[0, 2]], atol=1e-5)
    assert (slots[1:5] == 9).all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates_equal_the_oracles(activation: str) -> None:
    gate_up = randn(3, 2 * 1100) * 4
    out = torch.empty(3, 1100, device=DEVICE)
    gate(gate_up, out, activation)
    left, right = gate_up.chunk(2, dim=-1)
    assert torch.allclose(out, ACTIVATIONS[activation](left.clone()) * right, atol=1e-5)


@pytest.mark.parametrize("width", [16, 100, 1024])
def test_int8_rounding_has_the_bits_that_the_oracle_defines(width: int) -> None:
    rows = randn(4, width)
    rows[1] = 0
    codes, scales = round_rows(rows, torch.int8)
    values = rows.cpu().numpy()
    peaks = np.abs(values).max(1, keepdims=True)
    factors = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
    assert np.array_equal(codes.cpu().numpy(), np.rint(values * factors))
    assert np.array_equal(scales.cpu().numpy(), (peaks / np.float32(127))[:, 0])


def test_fp8_rounding_keeps_the_largest_number_and_an_eighth_of_any_other() -> None:
    rows = randn(4, 100)
    codes, scales = round_rows(rows, torch.float8_e4m3fn)
    again = codes.float() * scales[:, None]
    large = rows.abs() > rows.abs().amax(1, keepdim=True) / 100
    assert ((again - rows).abs() <= rows.abs() / 8)[large].all()
    assert torch.allclose(again.abs().amax(1), rows.abs().amax(1), rtol=1e-6)


@pytest.mark.parametrize("vocab", [5, 320, 9000])
def test_the_largest_logit_is_numpys(vocab: int) -> None:
    logits = (randn(6, vocab) * 3).round()  # many are equal
    assert find_largest(logits).tolist() == logits.cpu().numpy().argmax(1).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_largest_logit(value: float) -> None:
    logits: Any = randn(3, 300)
    logits[1, 299] = value
    found = find_largest(logits).tolist()
    assert found[1] == -1
    assert -1 not in (found[0], found[2])
