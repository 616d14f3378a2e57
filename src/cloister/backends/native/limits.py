"""What of a spec the native kernels compute; the torch back end computes all of it."""

from __future__ import annotations

from cloister.backends.spec import DecoderSpec, LatentAttentionSpec
from cloister.types.errors import ConfigError


def check_computable(spec: DecoderSpec, kv_dtype: str) -> None:
    """Refuses a decoder that the kernels do not compute, before any weight is read.

    Raises:
        ConfigError: it names what is missing, and what to choose.
    """
    is_latent = any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers)
    if is_latent and kv_dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"the native back end keeps the latents of the family {spec.family!r} in float32 or bfloat16, not in {kv_dtype}; "
            "leave out --kv-dtype",
            param="kv_dtype",
        )
