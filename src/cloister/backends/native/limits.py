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
    missing = sorted({name for layer in set(spec.layers) for name in _missing_of(layer)})
    if missing:
        raise ConfigError(
            f"the native back end does not compute {' and '.join(missing)}, which the family {spec.family!r} needs; choose the "
            "torch back end (--backend torch)",
            param="backend",
        )


def _missing_of(layer: LayerSpec) -> Iterator[str]:
    attention, mlp = layer.attention, layer.mlp
    if attention is None or mlp is None or layer.state is not None:
        yield "layers with a state, or without attention or a feed-forward"
    elif isinstance(attention, LatentAttentionSpec):
        yield "latent attention"
    elif attention.gated or (attention.input_scale, attention.output_scale) != (1.0, 1.0):
        yield "gated or scaled attention"
    elif attention.rope is not None and attention.rope.interleaved:
        yield "interleaved rotation"
    if isinstance(attention, AttentionSpec) and attention.sinks:
        yield "attention sinks"
    if isinstance(mlp, MoeSpec) and _chooses_otherwise(mlp):
        yield "sigmoid, grouped or scaled routing of experts"
    if isinstance(mlp, MoeSpec) and (mlp.router_bias or mlp.expert.bias):
        yield "biases of experts"
    feed_forward = mlp.expert if isinstance(mlp, MoeSpec) else mlp
    if feed_forward is not None and feed_forward.clipped is not None:
        yield "clipped SwiGLU"
    if feed_forward is not None and (feed_forward.is_scaled or feed_forward.activation == "relu2"):
        yield "scaled feed-forwards or squared ReLU"


def _chooses_otherwise(mlp: MoeSpec) -> bool:
    return mlp.scoring != "softmax" or mlp.correction_bias or mlp.num_groups > 1 or mlp.routed_scale != 1.0
