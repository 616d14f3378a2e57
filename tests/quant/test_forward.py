"""The numpy decoder against the oracle, and transformations that must change nothing it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloister.backends.spec import DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec
from cloister.backends.tensors import rotate_blocks
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights, choose_kv_dtype, quantize_on_read
from cloister.quant.base import FloatArray
from cloister.quant.calibration import CALIBRATORS, calibrate
from cloister.quant.folding import AFTER_NORMS, INSIDE, FloatTensors, Folding, fold, key_factors, share_among_groups
from cloister.quant.forward import LayerForward, round_keys, round_values
from cloister.quant.quality import layer_tensors, measure
from cloister.quant.smooth_attention import SmoothedKeys, estimate_key_sizes, smoothing_factors
from cloister.types.errors import ConfigError
from tests.driving import RandomWeights, build, make_spec

PLAIN = make_spec(hidden=64, intermediate=96, heads=(4, 2), head_dim=16)
NORMED = make_spec(hidden=64, intermediate=96, heads=(4, 2), head_dim=32, window=9, qk_norm=True)
TOKENS = np.random.default_rng(1).integers(0, 320, (1, 60)).astype(np.int32)


def biased(spec: DecoderSpec) -> DecoderSpec:
    layer = spec.layers[0]
    attention = replace(layer.attention, qkv_bias=True, output_bias=True)
    return replace(spec, layers=(LayerSpec(attention, replace(layer.mlp, bias=True, activation="gelu_tanh")),) * 2)


def floats(spec: DecoderSpec, seed: int = 0) -> FloatTensors:
    return {name: np.asarray(tensor) for name, tensor in layer_tensors(RandomWeights(spec, seed), 0).items()}


def outputs(layer: LayerSpec, tensors: FloatTensors) -> FloatArray:
    return LayerForward(layer, tensors, 1e-5)(np.random.default_rng(2).standard_normal((40, 64), dtype=np.float32))


def like_gemma(spec: DecoderSpec) -> DecoderSpec:
    """With norms after each part, soft caps, scales of its own, and layers that turn differently."""
    first = spec.layers[0]
    rope = first.attention.rope
    assert rope is not None
    turned = replace(first.attention, rope=RopeSpec(tuple(angle / 3 for angle in rope.inv_freq)), softcap=5.0, window=9)
    layers = (replace(first, attention=turned, post_norm=True), replace(first, post_norm=True, residual_scale=0.7))
    return replace(spec, layers=layers, embedding_scale=2.0, logit_scale=0.5, logit_softcap=4.0)


@pytest.mark.parametrize(
    "spec",
    [PLAIN, NORMED, biased(PLAIN), like_gemma(NORMED)],
    ids=["plain", "normed, window", "biases, gelu", "as Gemma 2 and 3, Granite"],
)
@pytest.mark.parametrize("name", ["none", "int8"])
def test_losses_are_those_of_the_oracle(spec: DecoderSpec, name: str) -> None:
    plain = RandomWeights(spec)
    weights: Any = plain if name == "none" else QuantizedWeights(plain, FORMATS.get(name)(FormatOptions()))
    logits = build(spec, weights).run("a", TOKENS[0].tolist()).astype(np.float64)
    expected = np.log(np.exp(logits).sum(1))[:-1] - logits[np.arange(59), TOKENS[0, 1:]]
    outcome = measure(spec, weights, TOKENS)
    assert np.abs(outcome.losses[0] - expected).max() < 0.1
    assert abs(outcome.perplexity / np.exp(expected.mean()) - 1) < 0.01


@pytest.mark.parametrize("spec", [PLAIN, biased(PLAIN)], ids=["plain", "biases"])
@pytest.mark.parametrize("folding", [*AFTER_NORMS, *INSIDE], ids=lambda folding: folding.inputs)
def test_folding_changes_no_output(spec: DecoderSpec, folding: Folding) -> None:
    layer, tensors = spec.layers[0], floats(spec)
    width = tensors[f"{folding.consumers[0]}.weight"].shape[1]
    factors = np.exp(np.random.default_rng(3).standard_normal(width, dtype=np.float32))
    if folding.source == "v":
        factors = share_among_groups(factors, layer.attention)
    folded = fold(tensors, folding, factors, layer.attention)
    assert not np.allclose(folded[f"{folding.consumers[0]}.weight"], tensors[f"{folding.consumers[0]}.weight"])
    assert np.abs(outputs(layer, folded) - outputs(layer, tensors)).max() < 0.05


@pytest.mark.parametrize("spec", [PLAIN, NORMED, biased(PLAIN)], ids=["plain", "normed", "biases"])
def test_smoothed_keys_change_no_answer(spec: DecoderSpec) -> None:
    plain = RandomWeights(spec)
    smoothed = SmoothedKeys(spec, plain)
    assert any(not np.array_equal(tensor, plain.read(name)) for name, tensor in smoothed)
    tokens = TOKENS[0].tolist()
    assert np.allclose(build(spec, smoothed).run("a", tokens), build(spec, plain).run("a", tokens), atol=1e-3)


def remake(spec: DecoderSpec, turned: int | None = None, **attention: Any) -> DecoderSpec:
    """`spec` with other attention, whose heads are turned in their first `turned` numbers, or 0 for none."""
    first = spec.layers[0]
    rope = first.attention.rope
    assert rope is not None
    if turned is not None:
        rope = RopeSpec(rope.inv_freq[: turned // 2]) if turned else None
    layer = replace(first, attention=replace(first.attention, rope=rope, **attention))
    return replace(spec, layers=(layer,) * len(spec.layers))


@pytest.mark.parametrize(
    "spec",
    [remake(PLAIN, turned=4), remake(PLAIN, turned=0), remake(PLAIN, qk_norm=True, qk_norm_over="projection")],
    ids=["partly turned", "not turned", "norms over projections"],
)
def test_smoothed_keys_change_no_answer_of_other_families(spec: DecoderSpec) -> None:
    test_smoothed_keys_change_no_answer(spec)


@pytest.mark.parametrize(
    "spec",
    [
        remake(PLAIN, turned=4),
        remake(PLAIN, qk_norm=True, qk_norm_over="projection"),
        replace(PLAIN, norm="layer"),
        replace(PLAIN, position_embeddings=True),
        replace(PLAIN, layers=(replace(PLAIN.layers[0], pre_norm=False, post_norm=True),)),
        replace(PLAIN, layers=(replace(PLAIN.layers[0], mlp=MlpSpec(96, gated=False)),)),
        replace(PLAIN, layers=(replace(PLAIN.layers[0], mlp=MoeSpec(4, 2, MlpSpec(96))),)),
    ],
)
def test_text_is_run_through_no_decoder_that_would_be_computed_wrongly(spec: DecoderSpec) -> None:
    windows = np.zeros((1, 8), np.int32)
    with pytest.raises(ConfigError, match="--method rtn"):
        measure(spec, RandomWeights(spec), windows)
    calibration = calibrate(spec, RandomWeights(spec), windows, FORMATS.get("int8")(FormatOptions()), CALIBRATORS.get("gptq"))
    with pytest.raises(ConfigError, match="--method rtn"):
        list(calibration)


def test_experts_are_written_in_few_bits_and_their_router_is_not() -> None:
    spec = replace(PLAIN, layers=(replace(PLAIN.layers[0], mlp=MoeSpec(4, 2, MlpSpec(96), shared=MlpSpec(32))),))
    found = QuantizedWeights(RandomWeights(spec), FORMATS.get("int8")(FormatOptions()))
    written = {name for name in found.names() if not isinstance(found.read(name), np.ndarray)}
    assert {"layers.0.experts.3.down.weight", "layers.0.shared.up.weight"} <= written
    assert "layers.0.router.weight" not in written


def test_smoothing_helps_keys_with_outliers() -> None:
    layer, tensors = PLAIN.layers[0], floats(PLAIN)
    tensors["k.weight"] = tensors["k.weight"].copy()
    tensors["k.weight"][[3, 20]] *= 20
    rows = np.random.default_rng(4).standard_normal((200, 64), dtype=np.float32)
    keys = ((rows * tensors["attention_norm.weight"]) @ tensors["k.weight"].T).reshape(200, 2, 16)
    factors = smoothing_factors(estimate_key_sizes(tensors, layer), layer)
    assert np.array_equal(factors[:, :8], factors[:, 8:])
    steps, smoothed_steps = np.abs(keys).max(-1, keepdims=True), np.abs(keys / factors).max(-1, keepdims=True) * factors
    assert np.square(smoothed_steps).mean() < 0.5 * np.square(steps).mean()


def test_queries_take_what_keys_give() -> None:
    layer, tensors = PLAIN.layers[0], floats(PLAIN)
    factors = smoothing_factors(estimate_key_sizes(tensors, layer), layer)
    changed = {n: t * key_factors(factors, layer).get(n, np.float32(1)) for n, t in tensors.items()}
    assert not np.allclose(changed["q.weight"], tensors["q.weight"])
    assert np.abs(outputs(layer, changed) - outputs(layer, tensors)).max() < 0.05


def test_qoq_smooths_keys_on_read_and_int4_does_not() -> None:
    plain = RandomWeights(PLAIN)
    for name, smooth in (("qoq", True), ("int4", False)):
        number_format = FORMATS.get(name)(FormatOptions())
        found = quantize_on_read(PLAIN, plain, number_format).read("layers.0.k.weight")
        same = np.array_equal(found.dequantize(), number_format.quantize(plain.read("layers.0.k.weight")).dequantize())
        assert same != smooth


@pytest.mark.parametrize(("head_dim", "rotation"), [(32, 16), (64, 64), (128, 64)])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_keys_and_values_come_back_within_half_a_step(kv_dtype: Any, head_dim: int, rotation: int) -> None:
    """As the native cache has them (attention.hpp): a group of dimensions never reaches beyond its rotation."""
    heads = np.random.default_rng(5).standard_normal((50, 2, head_dim), dtype=np.float32)
    rotated = rotate_blocks(heads, rotation).reshape(100, -1, min(head_dim, 64))
    for rounded, bits in ((round_keys, 8), (round_values, 4 if kv_dtype == "int4" else 8)):
        step = np.ptp(rotated, axis=-1) / 15 if bits == 4 else np.abs(rotated).max(-1) / 127
        error = np.abs(rotate_blocks(rounded(heads, kv_dtype), rotation).reshape(rotated.shape) - rotated)
        assert np.all(error.max(-1) <= 0.5001 * step)
        assert error.max() > 0.45 * step.min()
        assert not rounded(np.zeros((3, 2, head_dim), np.float32), kv_dtype).any()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_dimension_that_stands_out_costs_the_others_nothing_much(kv_dtype: Any) -> None:
    heads = np.random.default_rng(6).standard_normal((50, 1, 64), dtype=np.float32)
    heads[..., 7] *= 40
    for rounded in (round_keys, round_values):
        error = np.delete(rounded(heads, kv_dtype) - heads, 7, axis=-1)
        plain = np.abs(heads).max(-1, keepdims=True) / 127
        assert np.square(error).mean() < (0.5 if kv_dtype == "int8" else 30) * np.square(plain).mean() / 12


@pytest.mark.parametrize(("name", "head_dim", "kv_dtype"), [("qoq", 64, "int4"), ("qoq", 32, "int8"), ("int4", 32, "bfloat16")])
def test_short_heads_keep_keys_and_values_in_8_bits_where_a_format_wants_4(name: str, head_dim: int, kv_dtype: str) -> None:
    spec = make_spec(hidden=64, intermediate=96, heads=(4, 2), head_dim=head_dim)
    assert choose_kv_dtype(FORMATS.get(name)(FormatOptions()), spec) == kv_dtype


def test_latents_are_kept_in_numbers_beside_any_format() -> None:
    plain = make_spec(hidden=64, intermediate=96, heads=(4, 2), head_dim=64)
    attention = LatentAttentionSpec(4, None, 48, 16, 16, 16, 0.2, plain.layers[0].attention.rope)
    spec = replace(plain, layers=(replace(plain.layers[0], attention=attention),))
    assert choose_kv_dtype(FORMATS.get("qoq")(FormatOptions()), spec) == "bfloat16"
