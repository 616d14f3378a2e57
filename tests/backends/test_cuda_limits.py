"""What the CUDA program does not compute it refuses by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.spec import DecoderSpec, MlpSpec, MoeSpec, RopeSpec
from cloister.backends.tensors import GroupedTensor
from cloister.backends.torch.cuda.limits import check_computable, check_numbers
from cloister.quant import HeldWeights
from cloister.types.errors import ConfigError
from tests.driving import make_spec

PLAIN = make_spec(hidden=64, intermediate=80, heads=(4, 2), head_dim=16, window=9, qk_norm=True)
LAYER = PLAIN.layers[0]


def with_layer(**changes: object) -> DecoderSpec:
    return replace(PLAIN, layers=(LAYER, replace(LAYER, **changes)))  # type: ignore[arg-type]


def with_attention(**changes: object) -> DecoderSpec:
    return with_layer(attention=replace(LAYER.attention, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (replace(PLAIN, norm="layer"), "layer norms"),
        (replace(PLAIN, norm_bias=True), "layer norms"),
        (replace(PLAIN, position_embeddings=True), "learned positions"),
        (replace(PLAIN, embedding_scale=2.0), "scaled embeddings and logits"),
        (replace(PLAIN, logit_scale=2.0), "scaled embeddings and logits"),
        (replace(PLAIN, logit_softcap=30.0), "soft caps"),
        (replace(PLAIN, head_bias=True), "a bias of the head"),
        (with_layer(post_norm=True), "norms after attention and feed-forward"),
        (with_layer(pre_norm=False), "norms after attention and feed-forward"),
        (with_layer(parallel=True), "parallel or scaled residuals"),
        (with_layer(residual_scale=0.5), "parallel or scaled residuals"),
        (with_layer(mlp=MoeSpec(4, 2, MlpSpec(80))), "experts"),
        (with_layer(mlp=MlpSpec(80, gated=False)), "feed-forwards without a gate"),
        (with_layer(mlp=MlpSpec(80, "relu")), "feed-forwards without a gate"),
        (with_attention(rope=None), "partly turned heads"),
        (with_attention(rope=RopeSpec((1.0, 0.5))), "partly turned heads"),
        (with_attention(softcap=50.0), "soft caps"),
        (with_attention(qk_norm_over="projection"), "norms over whole projections of q and k"),
    ],
)
def test_a_spec_that_the_kernels_do_not_compute_is_refused_by_name(spec: DecoderSpec, missing: str) -> None:
    check_computable(PLAIN)
    with pytest.raises(ConfigError, match=f"does not compute {missing}, .* choose the device cpu"):
        check_computable(spec)


def test_weights_in_nvfp4_are_refused_before_they_are_read() -> None:
    plain = np.zeros((8, 32), np.float32)
    factors = np.ones(8, np.float32)
    scales = np.ones((8, 2), np.float32)
    few = GroupedTensor(
        np.full((8, 32), 128, np.uint8), scales, None, None, 8, 16, "bfloat16", output_scales=factors, is_nvfp4=True
    )
    check_numbers(HeldWeights({"layers.0.up.weight": plain}))
    with pytest.raises(ConfigError, match=r"no product of weights in NVFP4, as 'layers.1.up.weight' is; choose the device cpu"):
        check_numbers(HeldWeights({"layers.0.up.weight": plain, "layers.1.up.weight": few}))
