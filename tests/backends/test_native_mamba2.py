"""Mamba 2 on the native kernels against the torch back end: the fields of its spec, and matrices in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.native import _native
from cloister.backends.spec import Mamba2Spec
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import RandomWeights, build
from tests.native import MAMBA, MAMBA_LAYERS

PLAIN = Mamba2Spec(num_heads=6, head_dim=20, num_groups=2, d_state=24, kernel_size=4)
VARIANTS: Mapping[str, Mamba2Spec] = {
    "plain": PLAIN,
    "one group, wide states": replace(PLAIN, num_groups=1, d_state=72),
    "as many groups as heads, odd sizes": replace(PLAIN, num_groups=6, head_dim=7, d_state=5),
    "no bias of the convolution, of another size": replace(PLAIN, conv_bias=False, kernel_size=2),
    "biases": replace(PLAIN, projection_bias=True, output_bias=True),
    "norm before the gate": replace(PLAIN, norm="before_gate"),
    "no norm": replace(PLAIN, norm=None),
    "time steps limited": replace(PLAIN, time_step_limit=(0.4, 0.9)),
}
TOKENS = np.random.default_rng(3).integers(0, MAMBA_LAYERS.vocab_size, 40).tolist()


@pytest.mark.parametrize("kernels", _native.kernel_names())
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_torch(name: str, kernels: str) -> None:
    layers = (replace(MAMBA, state=VARIANTS[name]), *MAMBA_LAYERS.layers[1:])
    spec = replace(MAMBA_LAYERS, layers=layers)
    weights = RandomWeights(spec)
    expected = build(spec, weights, backend="torch").run("a", TOKENS)
    found = build(spec, weights, backend="native", kernels=kernels).run("a", TOKENS, 7)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_matrices_in_few_bits_give_about_the_logits_of_torch(name: str) -> None:
    spec = replace(
        MAMBA_LAYERS, layers=(replace(MAMBA, state=replace(PLAIN, num_heads=8, head_dim=16)), *MAMBA_LAYERS.layers[1:])
    )
    weights = QuantizedWeights(RandomWeights(spec), FORMATS.get(name)(FormatOptions()))
    expected = build(spec, weights, backend="torch").run("a", TOKENS)
    found = build(spec, weights, backend="native").run("a", TOKENS)
    exact = build(spec, RandomWeights(spec), backend="native").run("a", TOKENS)
    assert np.abs(found - expected).max() <= 0.3 * np.abs(found - exact).max()
