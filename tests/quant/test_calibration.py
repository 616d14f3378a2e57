"""Calibration methods: each does better than rounding where its paper says so, and none changes what it must not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from cloister.backends.tensors import GroupedTensor, ProgressiveTensor, dequantized, rotate_blocks
from cloister.quant import FORMATS, FormatOptions, HeldWeights
from cloister.quant.calibration import CALIBRATORS, calibrate
from cloister.quant.calibration.base import InputStatistics
from cloister.quant.calibration.gptq import choose_codes, damped, feedback, fit_inputs
from cloister.quant.quality import measure
from tests.driving import RandomWeights, make_spec

SPEC = make_spec(hidden=64, intermediate=128, heads=(4, 2), head_dim=16)
WINDOWS = np.random.default_rng(1).integers(0, 320, (12, 64)).astype(np.int32)


class Outliers(RandomWeights):
    """Weights whose inputs have a few great channels, as those of large models do."""

    def __init__(self) -> None:
        super().__init__(SPEC)
        for name in self.names():
            if name.endswith("norm.weight") and name.startswith("layers"):
                self.read(name)[:4] *= 30
            if name.split(".")[-2] in ("q", "k", "v", "gate", "up"):
                self.read(name)[:, :4] /= 30


def calibrated(weights: RandomWeights, format_name: str, method: str) -> HeldWeights:
    number_format = FORMATS.get(format_name)(FormatOptions())
    return HeldWeights(dict(calibrate(SPEC, weights, WINDOWS, number_format, CALIBRATORS.get(method))))


def hidden_error(weights: RandomWeights, found: HeldWeights) -> float:
    """How far losses on fresh text are from those of the float model, root mean square."""
    fresh = np.random.default_rng(2).integers(0, 320, (4, 64)).astype(np.int32)
    error = measure(SPEC, found, fresh).losses - measure(SPEC, weights, fresh).losses
    return float(np.sqrt(np.square(error).mean()))


@pytest.mark.parametrize("method", CALIBRATORS.names())
@pytest.mark.parametrize("format_name", FORMATS.names())
def test_every_method_writes_every_format(format_name: str, method: str) -> None:
    weights = RandomWeights(SPEC)
    found = calibrated(weights, format_name, method)
    assert set(found.names()) == set(weights.names())
    for name, tensor in found:
        assert found.shape(name) == weights.shape(name)
        assert isinstance(tensor, GroupedTensor | ProgressiveTensor) == (len(tensor.shape) == 2)
        if isinstance(tensor, ProgressiveTensor):
            levels = (tensor.codes.astype(int) - tensor.zeros.repeat(tensor.group_size, 1)) * tensor.group_scales.repeat(
                tensor.group_size, 1
            )
            assert np.abs(levels).max() <= 127
    assert hidden_error(weights, found) < 1.5


def test_smoothquant_spares_inputs_with_outliers() -> None:
    weights = Outliers()
    plain, smoothed = (hidden_error(weights, calibrated(weights, "int8", method)) for method in ("rtn", "smoothquant"))
    assert smoothed < 0.7 * plain


def test_awq_spares_weights_that_meet_outliers() -> None:
    weights = Outliers()
    plain, aware = (hidden_error(weights, calibrated(weights, "int4", method)) for method in ("rtn", "awq"))
    assert aware < 0.8 * plain


def correlated(num_tokens: int, width: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(7)
    basis = rng.standard_normal((width // 4, width), dtype=np.float32)
    few = rng.standard_normal((num_tokens, width // 4), dtype=np.float32) @ basis
    return few + 0.3 * rng.standard_normal((num_tokens, width), dtype=np.float32)


@pytest.mark.parametrize("format_name", FORMATS.names())
def test_gptq_halves_the_error_on_correlated_inputs(format_name: str) -> None:
    rows, fresh = np.split(correlated(4000, 128), 2)
    weight = np.random.default_rng(8).standard_normal((96, 128), dtype=np.float32)
    start = FORMATS.get(format_name)(FormatOptions()).quantize(weight)
    turned = rotate_blocks(rows, start.rotation)
    gram = damped(turned.T @ turned, 0.01)
    order = np.argsort(-np.diagonal(gram))
    turned_weight = rotate_blocks(weight, start.rotation)
    found = choose_codes(turned_weight, start, feedback(gram[np.ix_(order, order)]), order)
    before, after = (np.square(fresh @ (dequantized(tensor) - weight).T).mean() for tensor in (start, found))
    assert after < 0.5 * before


def test_an_input_that_no_token_used_does_not_stop_gptq() -> None:
    rows = correlated(500, 64)
    rows[:, 5] = 0
    factor = feedback(damped(rows.T @ rows, 0.01))
    assert np.all(np.isfinite(factor))
    start = FORMATS.get("int4")(FormatOptions()).quantize(np.ones((4, 64), np.float32))
    assert np.all(np.isfinite(choose_codes(np.ones((4, 64), np.float32), start, factor, np.arange(64)).dequantize()))


def test_a_fit_makes_up_for_inputs_that_were_rounded() -> None:
    rng = np.random.default_rng(9)
    true_rows = correlated(4000, 64)
    rows = true_rows + rng.standard_normal(true_rows.shape, dtype=np.float32)
    statistics = InputStatistics.of(64)
    statistics.add(rows[:3000], true_rows[:3000])
    fresh, target = rows[3000:], true_rows[3000:]
    assert np.square(fresh @ fit_inputs(statistics).T - target).mean() < 0.9 * np.square(fresh - target).mean()


def test_a_fit_to_inputs_that_are_as_they_were_changes_nothing() -> None:
    statistics = InputStatistics.of(64)
    statistics.add(correlated(500, 64), correlated(500, 64))
    assert np.allclose(fit_inputs(statistics), np.eye(64), atol=1e-4)
