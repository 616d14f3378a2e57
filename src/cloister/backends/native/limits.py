"""What of a spec the native kernels compute; the torch back end computes all of it."""

from __future__ import annotations

from collections.abc import Iterator

from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MoeSpec,
    ShortConvSpec,
)
from cloister.types.errors import ConfigError


def check_computable(spec: DecoderSpec, kv_dtype: str) -> None:
    """Refuses a decoder that the kernels do not compute, before any weight is read.

    Raises:
        ConfigError: it names what is missing, and what to choose.
    """
    missing = list_missing(spec)
    if missing:
        raise ConfigError(
            f"the native back end does not compute {', '.join(missing)}, which the family {spec.family!r} needs; choose the "
            "torch back end (--backend torch)",
            param="backend",
        )
    is_latent = any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers)
    if is_latent and kv_dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"the native back end keeps the latents of the family {spec.family!r} in float32 or bfloat16, not in {kv_dtype}; "
            "leave out --kv-dtype",
            param="kv_dtype",
        )


def list_missing(spec: DecoderSpec) -> list[str]:
    """Returns the names of what the kernels do not compute; empty where they compute all of a decoder."""
    missing = {name for layer in set(spec.layers) for name in _missing_of(layer)}
    if isinstance(spec, EncoderSpec):
        missing.add("attention in both directions")
    if spec.vision is not None:
        missing.add("a vision tower")
    return sorted(missing)


def _missing_of(layer: LayerSpec) -> Iterator[str]:
    attention, mlp = layer.attention, layer.mlp
    if layer.state is not None and (attention is not None or not isinstance(layer.state, ShortConvSpec | Mamba2Spec)):
        yield "layers with a state other than that of a short convolution or Mamba 2"
    if isinstance(layer.state, ShortConvSpec | Mamba2Spec) and layer.state.kernel_size < 2:
        yield "convolutions of one position"
    if isinstance(layer.state, Mamba2Spec) and (layer.state.is_scaled or layer.state.activation != "silu"):
        yield "layers with a state of Mamba 2 with scales or another activation than SiLU"
    if layer.state is not None and mlp is None:
        yield "layers with a state and no feed-forward"
    elif not layer.mixes or mlp is None:
        yield "layers without attention or a feed-forward"
    if isinstance(attention, AttentionSpec) and (
        attention.gated or (attention.input_scale, attention.output_scale) != (1.0, 1.0)
    ):
        yield "gated or scaled attention"
    feed_forward = mlp.expert if isinstance(mlp, MoeSpec) else mlp
    if feed_forward is not None and (feed_forward.is_scaled or feed_forward.activation == "relu2"):
        yield "scaled feed-forwards or squared ReLU"
    if isinstance(attention, AttentionSpec) and attention.rope is not None and attention.rope.axes:
        yield "rotation by time, row and column"
