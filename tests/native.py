"""What tests of the native back end share: instruction sets of this machine, specs of awkward sizes, weights made by hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from _pytest.mark import ParameterSet

from cloister.backends.availability import why_no_kernels
from cloister.backends.base import FloatArray
from cloister.backends.spec import (
    ClippedSwiGLU,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    MoeSpec,
    QueryGrowth,
    RopeSpec,
    ShortConvSpec,
    StreamsSpec,
)
from cloister.backends.tensors import InputRounding, Tensor, dequantized, round_inputs, rounding_of
from cloister.cli.doctor import COMPILERS
from tests.driving import Driver, GivenWeights, build, make_spec

if why_no_kernels() is not None and not any(shutil.which(name) for name in COMPILERS):
    pytest.skip("there is no C++ compiler here", allow_module_level=True)

from cloister.backends.native import _native

KERNELS = tuple(_native.kernel_names())
NARROW = make_spec(hidden=256, intermediate=172, heads=(8, 2), head_dim=32)
WINDOWED = make_spec(hidden=96, intermediate=100, heads=(3, 1), head_dim=24, window=50, qk_norm=True)
MANY_HEADS = make_spec(hidden=100, intermediate=50, heads=(6, 6), head_dim=10)
SPECS = {"narrow": NARROW, "windowed": WINDOWED, "many heads": MANY_HEADS}


def in_turns(cases: Iterable[object], *, best: bool = True) -> list[ParameterSet]:
    """Each case with an instruction set: every second with the best one, the rest with the others in turns; more is slow.

    So every case and every instruction set is in `make test`, and `make test-slow` has the whole matrix.

    Args:
        cases: values of one parameter, or tuples of several; the instruction set comes behind them.
        best: whether the best instruction set is among them.
    """
    found, others = [], KERNELS[1:]
    for place, case in enumerate(cases):
        turn = place // 2 if best else place
        # one further in each round: else of cases with two types every set would meet the same one
        chosen = KERNELS[0] if not others or (best and place % 2 == 0) else others[(turn + turn // len(others)) % len(others)]
        values = case if isinstance(case, tuple) else (case,)
        names = KERNELS if best else others
        found += [pytest.param(*values, name, marks=() if name == chosen else pytest.mark.slow) for name in names]
    return found


def build_native(spec: DecoderSpec, weights: object, *, dtype: str = "float32", **options: object) -> Driver:
    """`build` for the native back end."""
    return build(spec, weights, backend="native", dtype=dtype, **options)  # type: ignore[arg-type]


def without_layers(vocab: int, hidden: int) -> DecoderSpec:
    """A model that is nothing but an embedding, a norm that adds no epsilon, and a head: one product."""
    return DecoderSpec("bare", vocab, hidden, (), 0.0, 4096)


def multiply(
    head: Tensor, rows: FloatArray, norm: FloatArray, *, num_rows: int, dtype: str = "float32", **options: object
) -> FloatArray:
    """Computes `rows / rms(rows) * norm @ head.T` for the first `num_rows`; head and rows are [vocab, hidden]."""
    weights = GivenWeights({"embed.weight": rows, "norm.weight": norm, "head.weight": head})
    program = build_native(without_layers(*head.shape), weights, dtype=dtype, num_blocks=8, **options)
    return program.run("a", list(range(num_rows)))


def exact_product(head: Tensor, rows: FloatArray, norm: FloatArray) -> npt.NDArray[np.float64]:
    """`multiply` in float64; inputs that share a scale by groups are rounded as the head asks for."""
    wide = rows.astype(np.float64)
    normed = wide / np.sqrt(np.square(wide).mean(1, keepdims=True)) * norm
    rounding = rounding_of(head)
    if rounding is not None and rounding != InputRounding() and not isinstance(head, np.ndarray):
        rounded = round_inputs(normed.astype(np.float32), rounding).astype(np.float64)
        met: npt.NDArray[np.float64] = rounded @ head.dequantize_rotated().astype(np.float64).T
        return met
    product: npt.NDArray[np.float64] = normed @ np.asarray(dequantized(head)).astype(np.float64).T
    return product


def relative_error(found: FloatArray, exact: npt.NDArray[np.floating]) -> float:
    """Length of the difference over the length of what is right."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def changed(spec: DecoderSpec, *, attention: Mapping[str, Any] = {}, layer: Mapping[str, Any] = {}, **rest: Any) -> DecoderSpec:
    """A spec with other fields: of its layers' attention, of its layers, and its own."""
    layers = tuple(replace(each, attention=replace(each.attention, **attention), **layer) for each in spec.layers)
    return replace(spec, layers=layers, **rest)


def with_rope(spec: DecoderSpec, size: int, *, interleaved: bool = False) -> RopeSpec:
    """A rotation of the first `size` values of a head."""
    rope = spec.layers[0].attention.rope
    assert rope is not None
    return RopeSpec(rope.inv_freq[: size // 2], interleaved=interleaved)


MIXTURE = MoeSpec(num_experts=8, num_chosen=3, expert=MlpSpec(44))
SMALL = make_spec(hidden=96, intermediate=116, heads=(4, 2), head_dim=24)
LAYER_NORMS: Mapping[str, Any] = {"norm": "layer", "norm_bias": True}
BIASES = {"qkv_bias": True, "output_bias": True}
LATENT = LatentAttentionSpec(
    6, 40, 48, 24, 16, 20, 40**-0.5, RopeSpec(tuple(float(10000.0 ** (-i / 8)) for i in range(8)), interleaved=True)
)
CONVOLUTION = LayerSpec(None, MlpSpec(116), state=ShortConvSpec(SMALL.hidden_size, kernel_size=4, bias=True))
SHORT_CONVOLUTIONS = replace(SMALL, layers=(CONVOLUTION, SMALL.layers[0], CONVOLUTION))
MAMBA = LayerSpec(None, MlpSpec(116), state=Mamba2Spec(num_heads=6, head_dim=20, num_groups=2, d_state=24, kernel_size=4))
MAMBA_LAYERS = replace(SMALL, layers=(MAMBA, SMALL.layers[0], MAMBA))
HEADS = SMALL.layers[0].grouped_attention
CLIPPED = MlpSpec(44, bias=True, clipped=ClippedSwiGLU(1.7, 0.8))
SIDE_BY_SIDE = replace(SMALL, layers=(replace(SMALL.layers[0], state=MAMBA.state),) * 2)
OF_ONE_PART = replace(
    SMALL,
    layers=(
        replace(MAMBA, mlp=None),
        LayerSpec(None, MlpSpec(116, "relu2", gated=False)),
        replace(SMALL.layers[0], mlp=None),
        LayerSpec(None, MoeSpec(8, 3, MlpSpec(44, "relu2", gated=False), shared=MlpSpec(70, "relu2", gated=False))),
    ),
)
GATED = replace(
    SMALL.layers[0], attention=replace(SMALL.layers[0].attention, gated=True, qk_norm=True, rope=with_rope(SMALL, 10))
)
DELTA_NET = LayerSpec(None, MlpSpec(116), state=GatedDeltaNetSpec(2, 4, 24, 20, kernel_size=4))
DELTA_NETS = replace(SMALL, layers=(DELTA_NET, GATED, DELTA_NET))
ODD = make_spec(hidden=100, intermediate=90, heads=(6, 2), head_dim=16)
NORMED = replace(ODD.layers[0].grouped_attention, qk_norm=True, v_norm=True)
STREAMS = replace(
    ODD,
    layers=tuple(
        LayerSpec(attention, MlpSpec(inner, "gelu_tanh", sparsity=sparsity), post_norm=True)
        for attention, inner, sparsity in (
            (replace(NORMED, window=50), 90, 0.9),
            (NORMED, 70, 0.0),
            (replace(NORMED, window=50, shared_kv=0), 50, 0.0),
            (replace(NORMED, shared_kv=1), 90, 0.5),
        )
    ),
    streams=StreamsSpec(3, 1, laurel_rank=20, input_size=12, input_vocab=300),
)
"""All that Gemma 3n asks for."""
PARTS: Mapping[str, DecoderSpec] = {
    "several residual streams, post norms": STREAMS,
    "five residual streams, the last active, not scaled, odd sizes, biases, softcaps": replace(
        MANY_HEADS,
        layers=tuple(
            LayerSpec(
                replace(MANY_HEADS.layers[0].grouped_attention, softcap=2.0, shared_kv=shared, sinks=shared is None, **BIASES),
                MlpSpec(37, bias=True, gate_scale=1.2, output_scale=0.8, sparsity=0.3),
                residual_scale=0.7,
            )
            for shared in (None, None, 0)
        ),
        streams=StreamsSpec(5, 4, laurel_rank=7, input_size=33, input_vocab=1, scaled=False),
        logit_softcap=6.0,
    ),
    "one residual stream, layer norms": replace(
        ODD, layers=STREAMS.layers[1:2] * 2, streams=StreamsSpec(1, 0, 16, 16, 320), norm="layer", tied_embeddings=True
    ),
    "normalised values, of a gated layer too": changed(SMALL, attention={"v_norm": True, "gated": True}),
    "KV of an earlier layer, gated": replace(
        SMALL,
        layers=(
            SMALL.layers[0],
            changed(SMALL, attention={"shared_kv": 0, "gated": True}).layers[0],
            changed(SMALL, attention={"shared_kv": 0, "qk_norm": True, "rope": None}).layers[0],
        ),
    ),
    "sparse gates, in parallel": changed(SMALL, layer={"mlp": MlpSpec(116, "gelu", sparsity=0.8), "parallel": True}),
    "sinks, experts and router with biases, clipped SwiGLU, a window in one layer": replace(
        SMALL,
        layers=tuple(
            LayerSpec(replace(HEADS, sinks=True, window=window, **BIASES), MoeSpec(7, 3, CLIPPED, router_bias=True))
            for window in (50, None)
        ),
    ),
    "sinks and softcap; clipped SwiGLU that all tokens pass": changed(
        SMALL, attention={"sinks": True, "softcap": 4.0}, layer={"mlp": CLIPPED}
    ),
    "chunks and norms without weights; growing queries; experts with weighted inputs": replace(
        SMALL,
        layers=tuple(
            LayerSpec(
                attention,
                MoeSpec(7, 3, MlpSpec(50), False, MlpSpec(60), scoring="sigmoid", router_bias=True, weigh_inputs=True),
            )
            for attention in (
                replace(
                    HEADS,
                    window=90,
                    chunked=True,
                    qk_norm=True,
                    qk_norm_weighted=False,
                    rope=with_rope(SMALL, 24, interleaved=True),
                ),
                replace(HEADS, rope=None, query_growth=QueryGrowth(0.4, 32, first=1)),
            )
        ),
    ),
    "a window as long as the chunks of another layer; norms of projections without weights": replace(
        SMALL,
        layers=tuple(
            LayerSpec(
                replace(HEADS, window=60, chunked=chunked, qk_norm=True, qk_norm_over="projection", qk_norm_weighted=False),
                replace(MIXTURE, shared=MlpSpec(70), shared_gate=True, router_bias=True),
            )
            for chunked in (True, False)
        ),
    ),
    "latent attention": replace(SMALL, layers=(LayerSpec(LATENT, MlpSpec(116)),) * 2),
    "latent attention, one projection of queries, biases, sizes of no vector": replace(
        SMALL,
        layers=(
            LayerSpec(
                replace(LATENT, q_lora_rank=None, kv_lora_rank=10, qk_nope_head_dim=5, v_head_dim=7, num_heads=3, **BIASES),
                MlpSpec(116),
            ),
        )
        * 2,
    ),
    "latent attention, in parallel, half-split rotation of a part, other norms": replace(
        SMALL,
        layers=(
            LayerSpec(
                replace(LATENT, rope=RopeSpec((1.0, 0.3, 0.01)), latent_norm_eps=0.1, num_heads=20, v_head_dim=64),
                MlpSpec(116),
                parallel=True,
            ),
            LayerSpec(replace(LATENT, rope=None, scale=0.4), MIXTURE),
        ),
    ),
    "partial rotation": changed(SMALL, attention={"rope": with_rope(SMALL, 10)}),
    "interleaved rotation, norms on q and k": changed(
        SMALL, attention={"rope": with_rope(SMALL, 24, interleaved=True), "qk_norm": True}
    ),
    "partial interleaved rotation, biases, q and k normed as projections": changed(
        SMALL,
        attention={
            "rope": with_rope(SMALL, 10, interleaved=True),
            "qk_norm": True,
            "qk_norm_over": "projection",
            **BIASES,
        },
    ),
    "no rotation": changed(SMALL, attention={"rope": None}),
    "gates": changed(SMALL, attention={"gated": True}),
    "gates, biases, interleaved rotation of a part, norms on q and k": changed(
        SMALL, attention={"gated": True, "rope": with_rope(SMALL, 10, interleaved=True), "qk_norm": True, **BIASES}
    ),
    "not gated, gelu": changed(SMALL, layer={"mlp": MlpSpec(116, "gelu", gated=False)}),
    "not gated, relu, biases": changed(SMALL, attention=BIASES, layer={"mlp": MlpSpec(116, "relu", bias=True, gated=False)}),
    "gated, relu": changed(SMALL, layer={"mlp": MlpSpec(116, "relu")}),
    "not gated, squared relu": changed(SMALL, layer={"mlp": MlpSpec(116, "relu2", gated=False)}),
    "scaled attention and feed-forward, biases": changed(
        SMALL,
        attention={"input_scale": 1.3, "output_scale": 0.6, **BIASES},
        layer={"mlp": MlpSpec(116, bias=True, gate_scale=1.4, output_scale=0.7)},
    ),
    "scaled attention and feed-forward, in parallel, post norms": changed(
        SMALL,
        attention={"input_scale": 0.7, "output_scale": 1.6},
        layer={"mlp": MlpSpec(116, "gelu", gate_scale=0.6, output_scale=1.3), "parallel": True, "post_norm": True},
    ),
    "scaled experts and a shared one": changed(
        SMALL,
        layer={
            "mlp": replace(
                MIXTURE,
                expert=MlpSpec(44, gate_scale=1.4, output_scale=0.7),
                shared=MlpSpec(70, gate_scale=0.6, output_scale=1.3),
            )
        },
    ),
    "layer norms": changed(SMALL, norm="layer"),
    "layer norms with biases": changed(SMALL, **LAYER_NORMS),
    "RMS norms with biases": changed(SMALL, norm_bias=True),
    "post norms": changed(SMALL, layer={"post_norm": True}),
    "post norms only": changed(SMALL, layer={"post_norm": True, "pre_norm": False}),
    "in parallel": changed(SMALL, layer={"parallel": True}),
    "in parallel, post norms, scaled": changed(SMALL, layer={"parallel": True, "post_norm": True, "residual_scale": 0.4}),
    "residual scale": changed(SMALL, layer={"residual_scale": 0.22}),
    "learned positions": changed(SMALL, attention={"rope": None}, position_embeddings=True, max_positions=400),
    "embedding scale": changed(SMALL, embedding_scale=9.75),
    "logit scale": changed(SMALL, logit_scale=0.125),
    "logit softcap": changed(SMALL, logit_scale=4.0, logit_softcap=6.0),
    "attention softcap": changed(SMALL, attention={"softcap": 1.5}),
    "q and k normed as projections": changed(SMALL, attention={"qk_norm": True, "qk_norm_over": "projection"}),
    "head bias": changed(SMALL, head_bias=True),
    "head bias, tied": changed(SMALL, head_bias=True, tied_embeddings=True),
    "experts": changed(SMALL, layer={"mlp": MIXTURE}),
    "experts, weights as they are": changed(SMALL, layer={"mlp": replace(MIXTURE, renormalize=False)}),
    "experts and a shared one": changed(SMALL, layer={"mlp": replace(MIXTURE, shared=MlpSpec(70))}),
    "experts and a gated shared one": changed(
        SMALL, layer={"mlp": replace(MIXTURE, shared=MlpSpec(70), shared_gate=True, renormalize=False)}
    ),
    "experts that are not gated": changed(SMALL, layer={"mlp": replace(MIXTURE, expert=MlpSpec(52, "relu", gated=False))}),
    "sigmoid experts": changed(SMALL, layer={"mlp": replace(MIXTURE, scoring="sigmoid")}),
    "sigmoid experts chosen with a bias, weights as they are, scaled": changed(
        SMALL, layer={"mlp": replace(MIXTURE, scoring="sigmoid", correction_bias=True, renormalize=False, routed_scale=1.75)}
    ),
    "softmax experts chosen with a bias": changed(SMALL, layer={"mlp": replace(MIXTURE, correction_bias=True)}),
    "softmax experts of the best groups, scaled": changed(
        SMALL,
        layer={"mlp": replace(MIXTURE, num_groups=4, num_chosen_groups=2, renormalize=False, routed_scale=16.0)},
    ),
    "21 sigmoid experts of the best groups of 7, chosen with a bias, and a shared one": changed(
        SMALL,
        layer={
            "mlp": MoeSpec(
                21,
                4,
                MlpSpec(44),
                shared=MlpSpec(70),
                scoring="sigmoid",
                correction_bias=True,
                num_groups=3,
                num_chosen_groups=2,
                num_group_scores=3,
                routed_scale=2.5,
            )
        },
    ),
    "33 experts, in parallel, post norms": changed(
        SMALL, layer={"mlp": replace(MIXTURE, num_experts=33, num_chosen=5), "parallel": True, "post_norm": True}
    ),
    "all at once, of odd sizes": changed(
        MANY_HEADS,
        attention={
            "rope": with_rope(MANY_HEADS, 6),
            "qk_norm": True,
            "qk_norm_over": "projection",
            "softcap": 2.0,
            "window": 70,
            "gated": True,
            **BIASES,
        },
        layer={
            "mlp": MoeSpec(
                5, 2, MlpSpec(23, "gelu_tanh"), shared=MlpSpec(37, "relu", bias=True, gated=False), shared_gate=True
            ),
            "post_norm": True,
            "residual_scale": 0.7,
        },
        position_embeddings=True,
        max_positions=400,
        embedding_scale=1.5,
        logit_scale=1.5,
        logit_softcap=9.0,
        head_bias=True,
        **LAYER_NORMS,
    ),
}
"""A decoder for each thing that a spec can ask for beside what `SPECS` have."""
