"""Which decoders text can be run through in numpy, for calibration and for measuring quality."""

from __future__ import annotations

from cloister.backends.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.types.errors import ConfigError

_FACED = (
    "text runs through decoders of Llama's or Gemma's shape only; here choose a method that uses no text (--method rtn) and "
    "measure nothing (--measure 0)"
)


def check_forward(spec: DecoderSpec) -> None:
    """Refuses a decoder that `forward.LayerForward` does not compute.

    Raises:
        ConfigError: it says what to choose instead.
    """
    if spec.norm != "rms" or spec.norm_bias or spec.position_embeddings or spec.head_bias:
        raise ConfigError(f"{_FACED}: {spec.family!r} has ends or norms of its own", param="method")
    for layer in set(spec.layers):
        feed_forward_of(layer)
        rope_of(layer)
        attention = layer.attention
        if layer.parallel or not layer.pre_norm or attention.qk_norm_over != "head":
            raise ConfigError(f"{_FACED}: {spec.family!r} has blocks of its own", param="method")


def feed_forward_of(layer: LayerSpec) -> MlpSpec:
    """Returns a layer's feed-forward, which must be one with a gate (ConfigError otherwise)."""
    if not isinstance(layer.mlp, MlpSpec) or not layer.mlp.gated:
        raise ConfigError(f"{_FACED}: its feed-forwards are experts, or have no gate", param="method")
    return layer.mlp


def rope_of(layer: LayerSpec) -> RopeSpec:
    """Returns what a layer turns by, which must be all of a head (ConfigError otherwise)."""
    rope = layer.attention.rope
    if rope is None or 2 * len(rope.inv_freq) != layer.attention.head_dim:
        raise ConfigError(f"{_FACED}: its heads are not turned, or not whole", param="method")
    return rope
