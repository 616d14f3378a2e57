"""Checks whether the CUDA kernels can compute a decoder and its number formats; the reference on a CPU computes all of them."""

from __future__ import annotations

from collections.abc import Iterator

from cloister.backends.base import Weights
from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.backends.tensors import GroupedTensor
from cloister.types.errors import ConfigError


def check_computable(spec: DecoderSpec) -> None:
    """Refuses a decoder that the kernels do not compute.

    Raises:
        ConfigError: it names what is missing.
    """
    missing = sorted({*_missing(spec), *(name for layer in set(spec.layers) for name in _missing_of(layer))})
    if missing:
        raise ConfigError(
            f"the CUDA program does not compute {', '.join(missing)}, which the family {spec.family!r} needs; choose the "
            "device cpu",
            param="device",
        )


def check_numbers(weights: Weights) -> None:
    """Refuses weights in a number format that no kernel multiplies, before any is read (ConfigError)."""
    for name in weights.names():
        form = weights.form(name)
        if isinstance(form, GroupedTensor) and form.is_nvfp4:
            raise ConfigError(
                f"the CUDA program has no product of weights in NVFP4, as {name!r} is; choose the device cpu", param="device"
            )


def feed_forward_of(layer: LayerSpec) -> MlpSpec:
    """Returns the feed-forward of a layer that was checked."""
    if not isinstance(layer.mlp, MlpSpec):
        raise ConfigError("the CUDA program does not compute experts; choose the device cpu", param="device")
    return layer.mlp


def rope_of(layer: LayerSpec) -> RopeSpec:
    """Returns the rotary embedding of a layer that was checked."""
    rope = layer.grouped_attention.rope
    if rope is None:
        raise ConfigError("the CUDA program does not compute layers without rotation; choose the device cpu", param="device")
    return rope


def _missing(spec: DecoderSpec) -> Iterator[str]:
    if isinstance(spec, EncoderSpec):
        yield "encoders"
    if spec.norm != "rms" or spec.norm_bias:
        yield "layer norms"
    if spec.position_embeddings:
        yield "learned positions"
    if (spec.embedding_scale, spec.logit_scale) != (1.0, 1.0):
        yield "scaled embeddings and logits"
    if spec.logit_softcap is not None:
        yield "soft caps"
    if spec.head_bias:
        yield "a bias of the head"
    if spec.vision is not None:
        yield "a vision tower"
    if spec.streams is not None:
        yield "several residual streams"
    if spec.merges_hidden:
        yield "modules that predict further tokens"


def _missing_of(layer: LayerSpec) -> Iterator[str]:
    attention, mlp = layer.attention, layer.mlp
    if not layer.pre_norm or layer.post_norm:
        yield "norms after attention and feed-forward"
    if layer.parallel or layer.residual_scale != 1.0:
        yield "parallel or scaled residuals"
    if layer.state is not None or attention is None:
        yield "layers with a state, or without attention"
    elif isinstance(attention, LatentAttentionSpec):
        yield "latent attention"
    else:
        yield from _missing_of_attention(attention)
    if mlp is None:
        yield "layers without a feed-forward"
    elif not isinstance(mlp, MlpSpec):
        yield "experts"
    elif not mlp.gated or mlp.activation in ("relu", "relu2"):
        yield "feed-forwards without a gate"
    elif mlp.is_scaled:
        yield "scaled feed-forwards"
    elif mlp.clipped is not None:
        yield "clipped SwiGLU"
    elif mlp.sparsity:
        yield "sparse gates"


def _missing_of_attention(attention: AttentionSpec) -> Iterator[str]:
    if attention.rope is None or 2 * len(attention.rope.inv_freq) != attention.head_dim:
        yield "partly turned heads"
    elif attention.rope.interleaved:
        yield "interleaved rotation"
    elif attention.rope.axes:
        yield "rotation by time, row and column"
    if attention.gated or (attention.input_scale, attention.output_scale) != (1.0, 1.0):
        yield "gated or scaled attention"
    if attention.softcap is not None:
        yield "soft caps"
    if attention.qk_norm and attention.qk_norm_over != "head":
        yield "norms over whole projections of q and k"
    if attention.sinks:
        yield "attention sinks"
    if attention.v_norm or attention.shared_kv is not None:
        yield "normalised values, or KV of an earlier layer"
    if attention.chunked or attention.query_growth is not None or not attention.qk_norm_weighted:
        yield "attention in chunks, or of queries that grow or are normalised without weights"
