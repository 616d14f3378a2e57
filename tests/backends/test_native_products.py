"""The native products, one at a time: a model without layers is one product, and every instruction set must make it exactly.

Rows of whole numbers with a peak of 127 keep their int8 codes whatever the norm before them multiplies them with, and rows of
signs keep their length: so only the order of float32 sums is left to differ, and bounds can be near float32's own rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cloister.backends.base import GREEDY, LOGITS, FloatArray
from cloister.backends.native import _native
from cloister.backends.native.packing import PackedKind, Packer
from cloister.backends.tensors import E2M1_CODES, Activations, GroupedTensor, ProgressiveTensor, Tensor
from tests.native import KERNELS, GivenWeights, build_native, exact_product, in_turns, multiply, relative_error, without_layers

VOCAB = 50
NUM_ROWS = (1, 2, 4, 5, 16, 17, 47)
"""Rows that vector kernels take one by one and some at a time, and tiles half full, full and in pairs."""


def whole_rows(hidden: int, vocab: int = VOCAB) -> FloatArray:
    rows = np.random.default_rng(1).integers(-127, 128, (vocab, hidden)).astype(np.float32)
    rows[:, 0] = 127
    return rows


def grouped(
    hidden: int,
    group_size: int,
    bits: int,
    *,
    zeros: bool = False,
    offsets: bool = False,
    wide: bool = False,
    vocab: int = VOCAB,
) -> GroupedTensor:
    rng = np.random.default_rng(2)
    shape = vocab, hidden // group_size
    scales = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return GroupedTensor(
        codes=rng.integers(0, 2**bits, (vocab, hidden)).astype(np.uint8),
        scales=scales if wide else scales.astype(np.float16).astype(np.float32),
        zeros=rng.integers(0, 2**bits, shape).astype(np.uint8) if zeros else None,
        offsets=rng.standard_normal(shape, dtype=np.float32) if offsets else None,
        bits=bits,
        group_size=group_size,
        activations="int8",
    )


def progressive(hidden: int, group_size: int) -> ProgressiveTensor:
    rng = np.random.default_rng(3)
    shape = VOCAB, hidden // group_size
    group_scales = rng.integers(1, 9, shape).astype(np.uint8)  # 15 times 8 stays in int8
    channel_scales = rng.uniform(0.5, 1.5, VOCAB).astype(np.float32)
    codes = rng.integers(0, 16, (VOCAB, hidden)).astype(np.uint8)
    return ProgressiveTensor(codes, channel_scales, group_scales, rng.integers(0, 16, shape).astype(np.uint8), group_size)


def mxfp4(hidden: int, *, vocab: int = VOCAB) -> GroupedTensor:
    rng = np.random.default_rng(4)
    codes = E2M1_CODES[rng.integers(0, 16, (vocab, hidden))]
    scales = np.ldexp(np.float32(1), rng.integers(-4, 3, (vocab, hidden // 32)))
    return GroupedTensor(codes, scales, None, None, 8, 32, "int8", is_mxfp4=True)


def nvfp4(hidden: int, *, vocab: int = VOCAB, factor: float = 0.25) -> GroupedTensor:
    rng = np.random.default_rng(4)
    codes = E2M1_CODES[rng.integers(0, 16, (vocab, hidden))]
    stored = rng.integers(0, 127, (vocab, hidden // 16)).astype(np.uint8)
    stored[rng.random(stored.shape) < 0.1] |= 128  # a scale may be negative
    scales = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2
    factors = np.full(vocab, factor, np.float32)
    return GroupedTensor(codes, scales, None, None, 8, 16, "bfloat16", output_scales=factors, is_nvfp4=True)


INTEGERS: dict[str, Tensor] = {
    "MXFP4": mxfp4(256),
    "MXFP4 of no whole chunk, many outputs": mxfp4(160, vocab=331),
    "8 bits by row": grouped(256, 256, 8),
    "8 bits by row of no whole chunk": grouped(100, 100, 8),
    "8 bits by row with zeros": grouped(256, 256, 8, zeros=True),
    "8 bits in groups of 32": grouped(96, 32, 8),
    "8 bits in groups of 64 with zeros": grouped(192, 64, 8, zeros=True),
    "8 bits in groups of 32 with offsets": grouped(256, 32, 8, offsets=True),
    "4 bits in groups of 32": grouped(256, 32, 4),
    "4 bits in groups of 32 of no whole chunk": grouped(160, 32, 4),
    "4 bits in groups of 64 with zeros": grouped(320, 64, 4, zeros=True),
    "4 bits in groups of 96": grouped(288, 96, 4, zeros=True),
    "4 bits in groups of 128 with zeros and offsets": grouped(256, 128, 4, zeros=True, offsets=True),
    "4 bits by row": grouped(256, 256, 4, zeros=True),
    "4 bits with float32 scales": grouped(256, 32, 4, wide=True),
    "4 bits for many outputs": grouped(64, 32, 4, zeros=True, vocab=331),
    "QoQ in groups of 32": progressive(96, 32),
    "QoQ in groups of 64": progressive(192, 64),
    "QoQ in groups of 128": progressive(256, 128),
    "QoQ by row": progressive(160, 160),
}


@pytest.mark.parametrize(("name", "kernels"), in_turns(INTEGERS))
def test_an_integer_product_is_exact_but_for_the_order_of_sums(name: str, kernels: str) -> None:
    head = INTEGERS[name]
    vocab, hidden = head.shape
    rows, norm = whole_rows(hidden, vocab), np.ones(hidden, np.float32)
    exact = exact_product(head, rows, norm)
    for num_rows in NUM_ROWS:
        found = multiply(head, rows, norm, num_rows=num_rows, kernels=kernels)
        assert relative_error(found, exact[:num_rows]) < 2e-6, f"{num_rows} rows"


ROUNDED: dict[str, Tensor] = {
    "MXFP4, as its inputs": replace(mxfp4(352), activations="int8_group"),
    "8 bits in groups of 32, as their inputs": replace(grouped(352, 32, 8), activations="int8_group"),
    "4 bits in groups of 32 with offsets, as their inputs": replace(
        grouped(576, 32, 4, offsets=True), activations="int8_group"
    ),
    "4 bits in groups of 64 with zeros, as their inputs": replace(grouped(576, 64, 4, zeros=True), activations="int8_group"),
    "4 bits in groups of 128, as their inputs": replace(grouped(1280, 128, 4), activations="int8_group"),
    "8 bits by row, rotated": replace(grouped(576, 576, 8), rotation=64),
    "8 bits by row, rotated in blocks of 128": replace(grouped(640, 640, 8), rotation=128),
    "8 bits by row, rotated in blocks of 16": replace(grouped(688, 688, 8), rotation=16),
    "4 bits in groups of 32, rotated": replace(grouped(1024, 32, 4), rotation=128),
    "QoQ, rotated": replace(progressive(640, 128), rotation=128),
}


@pytest.mark.parametrize(("name", "kernels"), in_turns(ROUNDED))
def test_inputs_that_stand_out_are_rounded_as_the_reference_rounds_them(name: str, kernels: str) -> None:
    head = ROUNDED[name]
    vocab, hidden = head.shape
    rng = np.random.default_rng(8)
    rows, norm = rng.standard_normal((vocab, hidden), dtype=np.float32), np.ones(hidden, np.float32)
    rows[:, rng.choice(hidden, 3, replace=False)] *= 50
    exact = exact_product(head, rows, norm)
    for num_rows in NUM_ROWS:
        found = multiply(head, rows, norm, num_rows=num_rows, kernels=kernels)
        assert relative_error(found, exact[:num_rows]) < 2e-4, f"{num_rows} rows"  # a code that is level may round otherwise


@pytest.mark.parametrize("rotation", [16, 64, 128])
def test_an_embedding_in_rotated_codes_is_looked_up_as_it_was(rotation: int) -> None:
    embedding = replace(grouped(384, 384, 8, vocab=384), rotation=rotation)
    norm, head = np.ones(384, np.float32), np.eye(384, dtype=np.float32)
    wide = embedding.dequantize().astype(np.float64)
    for kernels in KERNELS:
        weights = GivenWeights({"embed.weight": embedding, "norm.weight": norm, "head.weight": head})
        found = build_native(without_layers(384, 384), weights, num_blocks=32, kernels=kernels).run("a", list(range(384)))
        assert relative_error(found, wide / np.sqrt(np.square(wide).mean(1, keepdims=True))) < 2e-6


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("hidden", [16, 40, 256, 1000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_of_numbers_is_exact_but_for_the_order_of_sums(dtype: str, hidden: int, kernels: str) -> None:
    rng = np.random.default_rng(4)
    kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    head = rng.standard_normal((VOCAB, hidden), dtype=np.float32).astype(kind)
    rows = rng.choice([-1, 1], (VOCAB, hidden)).astype(np.float32)
    norm = rng.standard_normal(hidden, dtype=np.float32).astype(kind).astype(np.float32)
    exact = exact_product(head, rows, norm)
    for num_rows in NUM_ROWS:
        found = multiply(head, rows, norm, num_rows=num_rows, dtype=dtype, kernels=kernels)
        assert relative_error(found, exact[:num_rows]) < 2e-6, f"{num_rows} rows"


NO_KERNELS: dict[str, GroupedTensor] = {
    "inputs in another order": replace(
        grouped(256, 32, 4, zeros=True), order=np.random.default_rng(5).permutation(256).astype(np.int32)
    ),
    "8 bits that meet bfloat16": replace(grouped(256, 64, 8), activations="bfloat16"),
    "4 bits by row of no whole half": grouped(100, 100, 4),
    "4 bits by row of no whole half with zeros": grouped(80, 80, 4, zeros=True),
    "8 bits by row of no whole half with offsets": grouped(80, 80, 8, offsets=True),
    "groups of 16": grouped(96, 16, 4, offsets=True),
}


@pytest.mark.parametrize(("name", "kernels"), in_turns(NO_KERNELS))
def test_codes_without_a_kernel_are_dequantised_to_bfloat16(name: str, kernels: str) -> None:
    head = NO_KERNELS[name]
    rounded = head.dequantize().astype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(6)
    rows, norm = rng.choice([-1, 1], head.shape).astype(np.float32), np.ones(head.shape[1], np.float32)
    found = multiply(head, rows, norm, num_rows=VOCAB, dtype="bfloat16", kernels=kernels)
    assert relative_error(found, exact_product(rounded, rows, norm)) < 2e-6


WIDE: dict[str, GroupedTensor] = {
    name: replace(tensor, activations="bfloat16")
    for name, tensor in {
        "MXFP4": mxfp4(256),
        "MXFP4 of no whole panel": mxfp4(160, vocab=331),
        "NVFP4": nvfp4(256),
        "NVFP4 of no whole chunk and no whole panel": nvfp4(176, vocab=331),
        "groups of 32": grouped(256, 32, 4),
        "groups of 32 with zeros": grouped(160, 32, 4, zeros=True),
        "groups of 64 of no whole panel": grouped(192, 64, 4, zeros=True, vocab=331),
        "groups of 128 with zeros and offsets": grouped(256, 128, 4, zeros=True, offsets=True),
        "by row with float32 scales": grouped(96, 96, 4, wide=True),
    }.items()
}


@pytest.mark.parametrize(("name", "kernels"), in_turns(WIDE))
def test_four_bits_that_meet_bfloat16_have_the_bits_of_their_dequantisation(name: str, kernels: str) -> None:
    head = WIDE[name]
    rounded = head.dequantize().astype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(8)
    rows, norm = rng.standard_normal(head.shape, np.float32), np.ones(head.shape[1], np.float32)
    for num_rows in NUM_ROWS:
        found = multiply(head, rows, norm, num_rows=num_rows, dtype="bfloat16", kernels=kernels)
        as_numbers = multiply(rounded, rows, norm, num_rows=num_rows, dtype="bfloat16", kernels=kernels)
        assert np.array_equal(found, as_numbers), f"{num_rows} rows"


@pytest.mark.parametrize("kernels", KERNELS)
def test_nvfp4_is_scaled_exactly_and_its_factors_come_last(kernels: str) -> None:
    head = nvfp4(176, vocab=70)
    factors = np.random.default_rng(5).uniform(1e-6, 1e6, 70).astype(np.float32)
    head = replace(head, output_scales=factors)
    rows, norm = np.random.default_rng(6).choice([-1, 1], head.shape).astype(np.float32), np.ones(176, np.float32)
    exact = exact_product(head, rows, norm)
    for num_rows in NUM_ROWS:
        found = multiply(head, rows, norm, num_rows=num_rows, dtype="bfloat16", kernels=kernels)
        assert relative_error(found / factors, exact[:num_rows] / factors) < 2e-6, f"{num_rows} rows"
        unscaled = multiply(nvfp4(176, vocab=70, factor=1), rows, norm, num_rows=num_rows, dtype="bfloat16", kernels=kernels)
        assert np.array_equal(found, unscaled * factors), f"{num_rows} rows"


def test_nvfp4_stays_four_bits_with_a_byte_for_16_of_them() -> None:
    packed = Packer(_native.Pool(1), PackedKind.BF16).join([nvfp4(512, vocab=64)], [None])
    assert packed.num_bytes == 64 * 512 * 9 / 16 + 64 * 4


def test_joined_matrices_in_nvfp4_keep_their_factors() -> None:
    parts = [nvfp4(64, vocab=20, factor=factor) for factor in (0.5, 8)]
    packed = Packer(_native.Pool(1), PackedKind.BF16).join(parts, [None, None])
    assert packed.parts["output_scales"][:40].tolist() == [0.5] * 20 + [8] * 20


def test_two_threads_pack_what_one_packs_where_a_matrix_starts_within_a_tile() -> None:
    parts = [nvfp4(16384, vocab=rows) for rows in (8, 32)]
    alone = Packer(_native.Pool(1), PackedKind.BF16).join(parts, [None, None]).parts["codes"]
    for _ in range(10):
        together = Packer(_native.Pool(2), PackedKind.BF16).join(parts, [None, None]).parts["codes"]
        assert np.array_equal(together, alone)


def test_four_bits_that_meet_bfloat16_stay_four_bits() -> None:
    tensor = replace(grouped(512, 128, 4, zeros=True, vocab=64), activations="bfloat16")
    packed = Packer(_native.Pool(1), PackedKind.BF16).join([tensor], [None])
    assert packed.num_bytes < tensor.codes.size * 4.5 / 8


@pytest.mark.parametrize("activations", ["bfloat16", "int8", "int8_group"])
def test_mxfp4_stays_four_bits_with_a_byte_for_32_of_them(activations: Activations) -> None:
    tensor = replace(mxfp4(512, vocab=64), activations=activations)
    packed = Packer(_native.Pool(1), PackedKind.BF16).join([tensor], [None])
    assert packed.num_bytes == tensor.codes.size * 17 / 32


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activations", ["bfloat16", "int8_group"])
def test_the_greatest_and_smallest_scales_of_mxfp4_are_exact(activations: Activations, kernels: str) -> None:
    exponents = np.array([-128, -127, -126, -100, 0, 100, 120])
    num_groups = len(exponents)
    codes = np.full((num_groups, 32 * num_groups), 128, np.uint8)
    codes[:, ::32] = 128 + 12
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32)[None].repeat(num_groups, 0)
    head = GroupedTensor(codes, scales, None, None, 8, 32, activations, is_mxfp4=True)
    rows = np.zeros(codes.shape, np.float32)
    rows[np.arange(num_groups), 32 * np.arange(num_groups)] = 1  # each row meets one group
    found = multiply(
        head, rows, np.full(codes.shape[1], codes.shape[1] ** -0.5), num_rows=num_groups, dtype="bfloat16", kernels=kernels
    )
    assert np.allclose(np.log2(found[:, 0]), np.log2(12) + exponents, atol=0.02)
    assert (found == found[:, :1]).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", [*INTEGERS, "NVFP4", "float16", "bfloat16", "float32"])
def test_an_embedding_is_read_as_it_was_written(name: str, kernels: str) -> None:
    rng = np.random.default_rng(7)
    plain = rng.standard_normal((VOCAB, 70)).astype(name) if name == "float16" else rng.standard_normal((VOCAB, 70), np.float32)
    embedding: Tensor = (
        nvfp4(176) if name == "NVFP4" else INTEGERS.get(name, plain.astype(ml_dtypes.bfloat16) if name == "bfloat16" else plain)
    )
    vocab, hidden = embedding.shape
    head, norm = rng.standard_normal((vocab, hidden), np.float32), np.ones(hidden, np.float32)
    weights = GivenWeights({"embed.weight": embedding, "norm.weight": norm, "head.weight": head})
    found = build_native(without_layers(vocab, hidden), weights, kernels=kernels, num_blocks=30).run("a", list(range(vocab)))
    rows = embedding if isinstance(embedding, np.ndarray) else embedding.dequantize()
    assert relative_error(found, exact_product(head, rows.astype(np.float32), norm)) < 1e-6


@pytest.mark.parametrize("kernels", KERNELS)
def test_half_precision_weights_keep_every_number_of_theirs(kernels: str) -> None:
    head = np.array([0.0, -0.0, 2**-24, -(2**-15), 2**-14, 1 / 3, 65504.0, -1.5], np.float16).reshape(-1, 1).repeat(16, 1)
    rows, norm = np.ones((8, 16), np.float32), np.eye(16, dtype=np.float32)[3]
    assert multiply(head, rows, norm, num_rows=1, kernels=kernels)[0].tolist() == head[:, 3].astype(np.float32).tolist()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("vocab", [7, 16, 45, 300])
def test_the_best_token_is_that_of_argmax_and_the_first_among_equals(vocab: int, kernels: str) -> None:
    rng = np.random.default_rng(vocab)
    head = rng.integers(-2, 3, (vocab, 16)).astype(np.float32)
    head[rng.integers(0, vocab, vocab // 2)] = head[rng.integers(0, vocab)]  # equal rows give equal logits
    weights = GivenWeights(
        {
            "embed.weight": rng.choice([-1, 1], (vocab, 16)).astype(np.float32),
            "head.weight": head,
            "norm.weight": np.ones(16, np.float32),
        }
    )
    driver = build_native(without_layers(vocab, 16), weights, kernels=kernels, num_blocks=30)
    batch = driver.plan({"a": list(range(vocab))})
    logits = driver.program.step(batch, LOGITS).logits
    assert (np.sort(logits, 1)[:, -1] == np.sort(logits, 1)[:, -2]).any()
    assert driver.program.step(batch, GREEDY).tokens.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 20, 36])
def test_a_row_with_a_number_that_is_not_finite_has_no_best_token(place: int, wrong: float, kernels: str) -> None:
    head = np.ones((37, 16), np.float32)
    head[place] = wrong
    weights = GivenWeights(
        {"embed.weight": np.ones((37, 16), np.float32), "head.weight": head, "norm.weight": np.ones(16, np.float32)}
    )
    driver = build_native(without_layers(37, 16), weights, kernels=kernels)
    assert driver.program.step(driver.plan({"a": [1, 2]}), GREEDY).tokens.tolist() == [-1, -1]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("hidden", [256, 100])
def test_a_row_that_is_not_finite_does_not_become_so_by_rounding(hidden: int, wrong: float, kernels: str) -> None:
    norm = np.ones(hidden, np.float32)
    norm[5] = wrong  # and so one number of every row
    found = multiply(grouped(hidden, hidden, 8), whole_rows(hidden), norm, num_rows=5, kernels=kernels)
    assert not np.isfinite(found).any()


GIVEN: dict[str, Any] = {
    "kind": 2, "outputs": 40, "inputs": 96, "group": 32, "zero_point": 128,
    "group_inputs": False, "rotation": 0, "codes": np.zeros(2 * 2 * 2048, np.uint8),
    "channel_scales": None, "scales": np.zeros(64 * 3 * 2, np.uint8), "scale_bytes": 2, "zeros": np.zeros(64 * 3, np.uint8),
    "output_scales": None, "e2m1": False, "offsets": None, "group_scales": None, "bias": np.zeros(64, np.float32),
}  # fmt: skip


NVFP4: dict[str, Any] = {
    "kind": 5, "group": 16, "zero_point": 12, "e2m1": True, "codes": np.zeros(2 * 3 * 512, np.uint8),
    "scales": np.zeros(64 * 6, np.uint8), "scale_bytes": 1, "output_scales": np.zeros(64, np.float32), "zeros": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"codes": np.zeros(2 * 2 * 2048 - 1, np.uint8)}, "shorter"),
        ({"bias": np.zeros(40, np.float32)}, "shorter"),
        ({"bias": np.zeros(64)}, "shorter"),  # the kernels would point into a copy that is gone
        ({"bias": np.zeros(128, np.float32)[::2]}, "shorter"),
        ({"scales": np.zeros(64 * 3, np.uint8)}, "shorter"),
        ({"scale_bytes": 4}, "shorter"),
        ({"scale_bytes": 3}, "no such scales"),
        ({"e2m1": True}, "no such floats"),
        ({"output_scales": np.zeros(64, np.float32)}, "no such scales"),
        ({**NVFP4, "output_scales": np.zeros(40, np.float32)}, "shorter"),
        ({**NVFP4, "scales": np.zeros(64 * 3, np.uint8)}, "shorter"),
        ({**NVFP4, "kind": 3}, "groups"),
        ({"zeros": np.zeros(64, np.uint8)}, "shorter"),
        ({"scales": None}, "without their scales"),
        ({"kind": 4}, "without their scales"),
        ({"kind": 6}, "no such kind"),
        ({"outputs": 0}, "no such kind or shape"),
        ({"group": 48}, "groups"),
        ({"inputs": 80}, "groups"),
        ({"rotation": 64}, "cannot be rotated"),
        ({"rotation": 128}, "cannot be rotated"),
        ({"rotation": 32}, "cannot be rotated"),
    ],
)
def test_kernels_refuse_arrays_that_do_not_have_the_size_of_their_shape(wrong: dict[str, object], why: str) -> None:
    _native.Matrix(**GIVEN)
    _native.Matrix(**{**GIVEN, **NVFP4})
    with pytest.raises(ValueError, match=why):
        _native.Matrix(**{**GIVEN, **wrong})


def test_kernels_refuse_copies_of_what_they_keep() -> None:
    with pytest.raises(TypeError):
        _native.Matrix(**{**GIVEN, "codes": np.zeros(4 * 2 * 2048, np.uint8)[::2]})
