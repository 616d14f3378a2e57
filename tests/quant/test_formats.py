"""Number formats on matrices: error bounds, exactness where it is promised, and what each leaves alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.backends.tensors import E2M1_CODES, GroupedTensor, ProgressiveTensor, rotate_blocks, round_inputs, rounding_of
from cloister.quant import FORMATS, FormatOptions, NumberFormat, QuantizedWeights
from cloister.quant.integers import quantize_groups
from cloister.quant.nvfp4 import round_to_e2m1
from cloister.types.errors import ConfigError
from tests.driving import RandomWeights, make_spec
from tests.thinning import examples

Matrix = npt.NDArray[np.float32]


def make(name: str, **options: Any) -> NumberFormat:
    return FORMATS.get(name)(FormatOptions(**options))


def draw(num_out: int, num_in: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((num_out, num_in), dtype=np.float32) * np.float32(0.05)


def relative_error(weight: Matrix, number_format: NumberFormat) -> float:
    error = number_format.quantize(weight).dequantize() - weight
    return float(np.sqrt(np.square(error).mean() / np.square(weight).mean()))


def test_formats_are_filed_with_threat_profiles() -> None:
    assert [name for name, _ in FORMATS] == ["int8", "int4", "nvfp4", "qoq"]


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = draw(300, 128)
    found = make("int8").quantize(weight)
    assert isinstance(found, GroupedTensor)
    assert found.scales.shape == (300, 1)
    rotated = rotate_blocks(weight, found.rotation)
    assert found.rotation == 128
    assert np.all(np.abs(found.dequantize_rotated() - rotated) <= found.scales * 0.5001)
    assert np.allclose(np.abs(found.dequantize_rotated()).max(1), np.abs(rotated).max(1))
    assert int(found.codes.min()) >= 1


@pytest.mark.parametrize(
    ("name", "size", "bound"),
    [("int8", None, 0.01), ("int4", 32, 0.085), ("int4", 128, 0.10), ("nvfp4", None, 0.085), ("qoq", 128, 0.10)],
)
def test_normal_weights_lose_what_the_format_should(name: str, size: int | None, bound: float) -> None:
    """Bounds a little above what a uniform grid of as many levels over a group loses on normal numbers."""
    assert relative_error(draw(256, 512), make(name, group_size=size)) < bound


def test_smaller_groups_lose_less() -> None:
    weight = draw(64, 512)
    errors = [relative_error(weight, make("int4", group_size=size)) for size in (32, 64, 128)]
    assert errors == sorted(errors)


def test_the_search_beats_the_greatest_weight() -> None:
    weight = draw(64, 512)
    groups = weight.reshape(64, -1, 32)
    scales = np.abs(groups).max(2, keepdims=True) / 7
    plain = np.rint(groups / scales) * scales
    assert relative_error(weight, make("int4")) < 0.95 * np.sqrt(np.square(plain - groups).mean() / np.square(weight).mean())


@given(exponent=st.integers(-6, 3), seed=st.integers(0, 50))
@settings(max_examples=examples(20), deadline=None)
def test_int4_scales_are_numbers_of_float16(exponent: int, seed: int) -> None:
    found = make("int4").quantize(draw(8, 64, seed) * np.float32(10.0**exponent))
    assert np.array_equal(found.scales, found.scales.astype(np.float16).astype(np.float32))
    assert np.all(np.isfinite(found.scales))


@given(seed=st.integers(0, 1000), tail=st.floats(1.0, 60.0), shift=st.floats(-3, 3))
@settings(max_examples=examples(40), deadline=None)
def test_qoq_never_leaves_int8(seed: int, tail: float, shift: float) -> None:
    weight = draw(8, 256, seed)
    weight[:, :5] *= np.float32(tail)
    found = make("qoq").quantize(weight + np.float32(shift * 0.05))
    assert isinstance(found, ProgressiveTensor)
    levels = (found.codes.reshape(8, 2, 128).astype(int) - found.zeros[:, :, None]) * found.group_scales[:, :, None]
    assert np.abs(levels).max() <= 127
    assert 1 <= found.group_scales.min() <= found.group_scales.max() <= 16
    assert max(found.codes.max(), found.zeros.max()) <= 15


@pytest.mark.parametrize("name", FORMATS.names())
def test_zeros_come_back_as_zeros(name: str) -> None:
    weight = draw(4, 256)
    weight[1] = 0
    weight[2, :128] = 0  # what is rotated together
    found = make(name).quantize(weight).dequantize()
    assert not found[1].any()
    assert not found[2, :128].any()


@pytest.mark.parametrize("name", FORMATS.names())
def test_half_precision_weights_need_no_copy_of_their_own(name: str) -> None:
    weight = draw(40, 128).astype(ml_dtypes.bfloat16)
    from_half, from_float = make(name).quantize(weight), make(name).quantize(weight.astype(np.float32))
    assert np.array_equal(from_half.codes, from_float.codes)


@pytest.mark.parametrize("name", FORMATS.names())
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    weight = draw(3000, 256)
    whole, alone = make(name).quantize(weight), make(name).quantize(weight[2990:2995])
    assert np.array_equal(whole.dequantize()[2990:2995], alone.dequantize())


def test_what_matters_more_errs_less() -> None:
    weight, importance = draw(128, 128), np.ones(128, np.float32)
    importance[::4] = 100
    for name in ("int4", "nvfp4", "qoq"):
        plain = make(name, rotates=False).quantize(weight).dequantize() - weight
        weighed = make(name, rotates=False).quantize(weight, importance).dequantize() - weight
        assert np.square(weighed[:, ::4]).mean() < 0.98 * np.square(plain[:, ::4]).mean()


@pytest.mark.parametrize(
    ("name", "num_inputs", "bits", "group_size"),
    [
        ("int4", 688, 4, 16),
        ("int4", 100, 8, 100),
        ("qoq", 688, 4, 16),
        ("qoq", 100, 8, 100),
        ("int4", 48, 4, 16),
        ("nvfp4", 100, 8, 100),
    ],
)
def test_inputs_that_no_group_divides_get_a_finer_format(name: str, num_inputs: int, bits: int, group_size: int) -> None:
    found = make(name).quantize(draw(8, num_inputs))
    assert isinstance(found, GroupedTensor)
    assert (found.bits, found.group_size) == (bits, group_size)


def test_nvfp4_holds_numbers_that_its_checkpoints_have() -> None:
    weight = draw(40, 176) * np.geomspace(1e-6, 1, 40, dtype=np.float32)[:, None]
    found = make("nvfp4").quantize(weight)
    assert isinstance(found, GroupedTensor)
    assert set(np.unique(found.codes)) <= set(E2M1_CODES.tolist())
    assert np.array_equal(2 * found.scales, (2 * found.scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert found.output_scales is not None
    assert len(np.unique(found.output_scales)) == 1
    assert np.log2(found.output_scales[0]) == np.rint(np.log2(found.output_scales[0]))
    assert 224 < 2 * found.scales.max() <= 448
    assert found.rotation == 0


def test_the_scales_of_nvfp4_beat_those_that_only_fit_the_greatest_weight() -> None:
    weight = draw(64, 512)
    groups = weight.reshape(64, -1, 16)
    scales = np.abs(groups).max(2, keepdims=True) / 6
    numbers = np.array(sorted({int(code) - 128 for code in E2M1_CODES}), np.float32) / 2
    plain = numbers[np.abs((groups / scales)[..., None] - numbers).argmin(-1)] * scales
    fitted = np.sqrt(np.square(plain - groups).mean() / np.square(weight).mean())
    assert relative_error(weight, make("nvfp4")) < 0.95 * fitted


@pytest.mark.parametrize("scale", [0, 1e-30, 1e30])
def test_nvfp4_takes_matrices_of_any_magnitude(scale: float) -> None:
    weight = draw(8, 64) * np.float32(scale)
    found = make("nvfp4").quantize(weight).dequantize()
    assert np.abs(found - weight).max() <= 0.2 * np.abs(weight).max()
    assert np.isfinite(make("nvfp4").quantize(np.full((1, 16), 1e-44, np.float32)).dequantize()).all()


@given(values=st.lists(st.floats(-13, 13, width=32), min_size=1, max_size=30))
@settings(max_examples=examples(100), deadline=None)
def test_floats_of_four_bits_are_the_nearest(values: list[float]) -> None:
    numbers = np.array([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12], np.float32)
    given_values = np.array(values, np.float32)
    found = round_to_e2m1(given_values)
    assert np.isin(found, numbers).all()
    assert np.array_equal(np.abs(found - given_values), np.abs(given_values[:, None] - numbers).min(1))


def test_qoq_takes_the_widest_groups_that_fit() -> None:
    found = make("qoq").quantize(draw(8, 96))
    assert isinstance(found, ProgressiveTensor)
    assert found.group_size == 96


def test_activations_are_handed_on() -> None:
    assert make("int4", activations="bfloat16").quantize(draw(8, 64)).activations == "bfloat16"
    assert quantize_groups(draw(8, 64), 32, FormatOptions()).activations == "int8"


@pytest.mark.parametrize("name", ["int8", "int4", "qoq"])
def test_an_input_that_stands_out_is_rounded_with_little_loss(name: str) -> None:
    weight, rows = draw(64, 256), draw(40, 256)
    rows[:, 9] *= 100
    exact = rows @ weight.T
    errors = []
    for rotates in (False, True):
        tensor = make(name, rotates=rotates).quantize(weight)
        rounding = rounding_of(tensor)
        assert rounding is not None
        found = round_inputs(rows, rounding) @ tensor.dequantize_rotated().T
        same_inputs = rotate_blocks(rows, rounding.rotation) @ tensor.dequantize_rotated().T
        assert np.square(same_inputs - exact).mean() < 0.02 * np.square(exact).mean()
        errors.append(np.square(found - same_inputs).mean())
    assert errors[1] < 0.1 * errors[0]


def test_inputs_in_bfloat16_are_not_rotated() -> None:
    assert make("int4", activations="bfloat16").quantize(draw(8, 64)).rotation == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int4", {"group_size": 48}, "32, 64, 128, not 48"),
        ("int8", {"group_size": 32}, "none to choose"),
        ("qoq", {"activations": "bfloat16"}, "int8 activations only"),
        ("nvfp4", {"activations": "int8"}, "bfloat16 activations only"),
        ("nvfp4", {"group_size": 32}, "group sizes 16, not 32"),
    ],
)
def test_an_option_that_a_format_lacks_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


@pytest.mark.parametrize("name", FORMATS.names())
def test_weights_are_quantised_as_they_are_read(name: str) -> None:
    plain = RandomWeights(make_spec(hidden=64, intermediate=96, heads=(4, 2), head_dim=16, qk_norm=True))
    weights = QuantizedWeights(plain, make(name))
    assert list(weights.names()) == list(plain.names())
    for key, tensor in weights:
        matrix = len(weights.shape(key)) == 2
        assert isinstance(tensor, GroupedTensor | ProgressiveTensor) == matrix
        if not matrix:
            assert tensor is plain.read(key)
    for key in ("embed.weight", "head.weight"):
        tensor = weights.read(key)
        assert isinstance(tensor, GroupedTensor)
        assert (tensor.bits, tensor.group_size) == (8, 64)


def test_what_has_few_bits_already_is_left_alone() -> None:
    plain = RandomWeights(make_spec(hidden=64, intermediate=96, heads=(4, 2), head_dim=16))
    once = QuantizedWeights(plain, make("int4"))
    found = QuantizedWeights(once, make("int8")).read("layers.0.q.weight")
    assert isinstance(found, GroupedTensor)
    assert found.bits == 4
