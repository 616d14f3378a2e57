"""Checks whether the native kernels can compute a decoder; the torch back end computes all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cloister.backends.availability import INSTALL_TORCH, has_torch
from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
)
from cloister.types.errors import ConfigError

MOST_DELTA_DIM: Final = 256  # cpp/kernels.hpp


def check_computable(spec: DecoderSpec, kv_dtype: str) -> None:
    """Refuses a decoder that the kernels do not compute, before any weight is read.

    Raises:
        ConfigError: it names what is missing, and what to choose.
    """
    missing = list_missing(spec)
    if missing:
        remedy = "choose the torch back end (--backend torch)" if has_torch() else f"install torch, which does: {INSTALL_TORCH}"
        raise ConfigError(
            f"the native back end does not compute {', '.join(missing)}, which the family {spec.family!r} needs; {remedy}",
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
    if spec.streams is not None and not all(map(_streams, spec.layers)):
        missing.add("several residual streams with latent attention, experts, a state, scaled inputs or parallel blocks")
    return sorted(missing)


def _missing_of(layer: LayerSpec) -> Iterator[str]:
    attention = layer.attention
    if layer.state is not None and layer.state.kernel_size < 2:
        yield "convolutions of one position"
    if isinstance(layer.state, GatedDeltaNetSpec) and layer.state.key_head_dim > MOST_DELTA_DIM:
        yield f"gated delta nets with keys of more than {MOST_DELTA_DIM} numbers"
    if isinstance(attention, LatentAttentionSpec) and attention.index is not None:
        yield "sparse attention with an index"
    if isinstance(layer.mlp, MoeSpec) and layer.mlp.expert.sparsity:
        yield "sparse gates of experts"


def _streams(layer: LayerSpec) -> bool:
    """Whether the kernels compute the layer where there are several residual streams."""
    attention = layer.attention
    is_plain = isinstance(attention, AttentionSpec) and attention.input_scale == 1
    return is_plain and isinstance(layer.mlp, MlpSpec) and layer.pre_norm and layer.state is None and not layer.parallel
