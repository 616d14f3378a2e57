"""Mamba 2 on the native kernels against the torch back end: the fields of its spec, other parts of layers, few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.spec import DecoderSpec, LayerSpec, Mamba2Spec
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import RandomWeights, build
from tests.native import CONVOLUTION, DELTA_NET, MAMBA, MAMBA_LAYERS, OF_ONE_PART, SIDE_BY_SIDE, in_turns

PLAIN = Mamba2Spec(num_heads=6, head_dim=20, num_groups=2, d_state=24, kernel_size=4)
VARIANTS: Mapping[str, Mamba2Spec] = {
    "plain": PLAIN,
    "one group, wide states": replace(PLAIN, num_groups=1, d_state=72),
    "heads and states of whole vectors": replace(PLAIN, num_heads=2, head_dim=64, d_state=128),
    "as many groups as heads, odd sizes": replace(PLAIN, num_groups=6, head_dim=7, d_state=5),
    "no bias of the convolution, of another size": replace(PLAIN, conv_bias=False, kernel_size=2),
    "biases": replace(PLAIN, projection_bias=True, output_bias=True),
    "norm before the gate": replace(PLAIN, norm="before_gate"),
    "no norm": replace(PLAIN, norm=None),
    "another activation": replace(PLAIN, activation="gelu"),
    "time steps limited": replace(PLAIN, time_step_limit=(0.4, 0.9)),
    "scaled, biases": replace(
        PLAIN,
        projection_bias=True,
        output_bias=True,
        input_scale=0.8,
        section_scales=(0.9, 1.2, 0.7, 1.3, 0.6),
        output_scale=1.4,
    ),
}
TOKENS = np.random.default_rng(3).integers(0, MAMBA_LAYERS.vocab_size, 40).tolist()


@pytest.mark.parametrize(("name", "kernels"), in_turns(VARIANTS))
def test_logits_are_those_of_torch_in_steps_of_any_size(name: str, kernels: str) -> None:
    layers = (replace(MAMBA, state=VARIANTS[name]), *MAMBA_LAYERS.layers[1:])
    check_logits(replace(MAMBA_LAYERS, layers=layers), kernels)


def check_logits(spec: DecoderSpec, kernels: str) -> None:
    weights = RandomWeights(spec)
    expected = build(spec, weights, backend="torch").run("a", TOKENS)
    driver = build(spec, weights, backend="native", kernels=kernels)
    found = driver.run("a", TOKENS)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    for chunk in (1, 7, 17):
        assert np.array_equal(driver.run(chunk, TOKENS, chunk), found)


BESIDE = SIDE_BY_SIDE.layers[0]
SCALED = replace(BESIDE.grouped_attention, input_scale=1.3, output_scale=0.6)
LAYERS: Mapping[str, DecoderSpec] = {
    "beside attention": SIDE_BY_SIDE,
    "beside attention, both scaled": replace(
        SIDE_BY_SIDE, layers=(replace(BESIDE, attention=SCALED, state=VARIANTS["scaled, biases"]), BESIDE)
    ),
    "beside attention, without norms, outputs normed and scaled": replace(
        SIDE_BY_SIDE,
        layers=(replace(BESIDE, attention=SCALED, pre_norm=False, post_norm=True, residual_scale=0.7),) * 2,
    ),
    "beside attention, a feed-forward in parallel": replace(SIDE_BY_SIDE, layers=(replace(BESIDE, parallel=True), BESIDE)),
    "a short convolution beside attention": replace(
        SIDE_BY_SIDE, layers=(replace(BESIDE, state=CONVOLUTION.state), replace(MAMBA, mlp=None))
    ),
    "a gated delta net beside attention": replace(SIDE_BY_SIDE, layers=(replace(BESIDE, state=DELTA_NET.state), MAMBA)),
    "layers of one part": OF_ONE_PART,
    "nothing but Mamba 2": replace(OF_ONE_PART, layers=OF_ONE_PART.layers[:1] * 3),
}


@pytest.mark.parametrize(("name", "kernels"), in_turns(LAYERS))
def test_layers_of_other_parts_give_the_logits_of_torch(name: str, kernels: str) -> None:
    check_logits(LAYERS[name], kernels)


WHOLE_GROUPS = replace(PLAIN, num_heads=8, head_dim=16)  # which few bits want
IN_FEW_BITS: Mapping[str, DecoderSpec] = {
    "Mamba 2": replace(MAMBA_LAYERS, layers=(replace(MAMBA, state=WHOLE_GROUPS), *MAMBA_LAYERS.layers[1:])),
    "beside attention": replace(SIDE_BY_SIDE, layers=(replace(BESIDE, attention=SCALED, state=WHOLE_GROUPS), BESIDE)),
    "layers of one part": replace(OF_ONE_PART, layers=(LayerSpec(None, None, state=WHOLE_GROUPS), *OF_ONE_PART.layers[1:])),
}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("layers", IN_FEW_BITS)
def test_matrices_in_few_bits_give_about_the_logits_of_torch(layers: str, name: str) -> None:
    spec = IN_FEW_BITS[layers]
    weights = QuantizedWeights(RandomWeights(spec), FORMATS.get(name)(FormatOptions()))
    expected = build(spec, weights, backend="torch").run("a", TOKENS)
    found = build(spec, weights, backend="native").run("a", TOKENS)
    exact = build(spec, RandomWeights(spec), backend="native").run("a", TOKENS)
    assert np.abs(found - expected).max() <= 0.3 * np.abs(found - exact).max()
