"""What of a spec the native kernels compute; the torch back end computes all of it."""

from __future__ import annotations

from collections.abc import Iterator

from cloister.backends.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, MoeSpec
from cloister.types.errors import ConfigError


def check_computable(spec: DecoderSpec) -> None:
    """Refuses a decoder that the kernels do not compute, before any weight is read.

    Raises:
        ConfigError: it names what is missing, and what to choose.
    """
    missing = list_missing(spec)
    if missing:
        raise ConfigError(
            f"the native back end does not compute {' and '.join(missing)}, which the family {spec.family!r} needs; choose the "
            "torch back end (--backend torch)",
            param="backend",
        )


def list_missing(spec: DecoderSpec) -> list[str]:
    """Returns the names of what the kernels do not compute; empty where they compute all of a decoder."""
    return sorted({name for layer in set(spec.layers) for name in _missing_of(layer)})


def _missing_of(layer: LayerSpec) -> Iterator[str]:
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, LatentAttentionSpec):
        yield "latent attention"
    elif attention.rope is not None and attention.rope.interleaved:
        yield "interleaved rotation"
    if isinstance(attention, AttentionSpec):
        yield from _missing_of_heads(attention)
    if isinstance(mlp, MoeSpec) and _chooses_otherwise(mlp):
        yield "sigmoid, grouped or scaled routing of experts"
    if isinstance(mlp, MoeSpec) and (mlp.router_bias or mlp.expert.bias):
        yield "biases of experts"
    if isinstance(mlp, MoeSpec) and mlp.weigh_inputs:
        yield "experts with weighted inputs"
    if (mlp.expert if isinstance(mlp, MoeSpec) else mlp).clipped is not None:
        yield "clipped SwiGLU"


def _missing_of_heads(attention: AttentionSpec) -> Iterator[str]:
    if attention.sinks:
        yield "attention sinks"
    if attention.chunked:
        yield "attention in chunks"
    if attention.query_growth is not None:
        yield "queries that grow with their position"
    if attention.qk_norm and not attention.qk_norm_weighted:
        yield "norms of q and k without weights"


def _chooses_otherwise(mlp: MoeSpec) -> bool:
    return mlp.scoring != "softmax" or mlp.correction_bias or mlp.num_groups > 1 or mlp.routed_scale != 1.0
