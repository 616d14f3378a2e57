"""Keys turned pair by pair: scores stay what they were, and 4 bits hold them better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.spec import DecoderSpec
from cloister.quant.base import FloatArray
from cloister.quant.folding import FloatTensors, key_factors
from cloister.quant.forward import LayerForward
from cloister.quant.key_turns import turn_keys
from cloister.quant.kv import round_kv
from cloister.quant.smooth_attention import smoothing_factors
from tests.driving import RandomWeights, make_spec

SPEC = make_spec(hidden=64, intermediate=128, heads=(4, 2), head_dim=16)
_LAYER = SPEC.layers[0]
BIASED = replace(SPEC, layers=(replace(_LAYER, attention=replace(_LAYER.attention, qkv_bias=True)),))
ROWS = np.random.default_rng(4).standard_normal((300, 64), dtype=np.float32)


def tensors_of(spec: DecoderSpec) -> FloatTensors:
    """The first layer's; biases, where it has them, are a great share of keys, as in models that have them."""
    weights = RandomWeights(spec)
    prefix = "layers.0."
    found = {n.removeprefix(prefix): np.asarray(t, np.float32) for n, t in weights if n.startswith(prefix)}
    return {name: 20 * tensor if name.endswith("bias") else tensor for name, tensor in found.items()}


def heads_of(spec: DecoderSpec, tensors: FloatTensors) -> tuple[FloatArray, FloatArray]:
    seen = dict(LayerForward(spec.layers[0], tensors, spec.norm_eps).steps(ROWS))
    return seen["keys"], seen["queries"]


def scores(keys: FloatArray, queries: FloatArray) -> FloatArray:
    """[num_kv_heads, tokens of queries in all heads of a group, tokens of keys]."""
    grouped = queries.reshape(len(queries), keys.shape[1], -1, keys.shape[2])
    found: FloatArray = np.einsum("qhgd,khd->hgqk", grouped, keys)
    return found


def score_error(spec: DecoderSpec, tensors: FloatTensors) -> float:
    keys, queries = heads_of(spec, tensors)
    return float(np.square(scores(round_kv(keys, "int4") - keys, queries)).mean())


@pytest.mark.parametrize("spec", [SPEC, BIASED], ids=["plain", "biased"])
def test_turned_keys_leave_every_score_as_it_was(spec: DecoderSpec) -> None:
    tensors = tensors_of(spec)
    turned = turn_keys(tensors, spec.layers[0], *heads_of(spec, tensors))
    before, after = (scores(*heads_of(spec, some)) for some in (tensors, turned))
    assert np.abs(after - before).max() < 1e-5 * np.abs(before).max()
    assert not np.allclose(turned["k.weight"], tensors["k.weight"], rtol=0.1)
    assert set(turned) == set(tensors)


def test_turning_rounds_finer_than_smoothing_where_keys_have_an_offset() -> None:
    tensors, layer = tensors_of(BIASED), BIASED.layers[0]
    keys, queries = heads_of(BIASED, tensors)
    factors = key_factors(smoothing_factors(np.sqrt(np.square(keys).mean(0)), layer), layer)
    smoothed = {name: tensor * factors[name] if name in factors else tensor for name, tensor in tensors.items()}
    assert score_error(BIASED, turn_keys(tensors, layer, keys, queries)) < 0.85 * score_error(BIASED, smoothed)
