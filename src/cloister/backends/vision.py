"""A vision tower as data: what makes embeddings of the images in a prompt.

Canonical weight names (L is the layer number from 0): `vision.patch.weight [hidden, 3, patch, patch]`, `vision.patch.bias`,
`vision.positions.weight [num_patches, hidden]`, `vision.layers.L.attention_norm`, `.q`, `.k`, `.v`, `.o`, `.mlp_norm`, `.up
[intermediate, hidden]`, `.down`, `vision.norm`, each with `.weight` and `.bias`, and `vision.projector.weight [decoder's
hidden, hidden * merge ** 2]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """SigLIP (Zhai et al. 2023) on square images, and a projection of pixel-shuffled patches (Idefics3, arXiv:2408.12637).

    Attributes:
        image_size: side of an image in pixels.
        patch_size: side of a patch in pixels.
        merge: side of the square of patches that become one token (pixel shuffle, Shi et al. 2016).
        rescale: multiplies the bytes of an image, before mean and deviation of each channel.
        mean, std: what the image is normalised by, one for each of red, green and blue.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    merge: int
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu_tanh"
    norm_eps: float = 1e-6
    rescale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Positions that one image takes in a prompt."""
        return (self.patches_per_side // self.merge) ** 2

    @property
    def image_bytes(self) -> int:
        """Bytes of an image, [image_size, image_size, 3]."""
        return 3 * self.image_size**2


def tower_bytes(spec: VisionSpec) -> int:
    """Returns what a thread takes at the widest place of the tower: all patches of one image, in float32."""
    widest = max(8 * spec.hidden_size + 2 * spec.intermediate_size, 6 * 3 * spec.patch_size**2)
    return 4 * spec.patches_per_side**2 * widest


def tower_weights_bytes(spec: VisionSpec, decoder_hidden: int, itemsize: int) -> int:
    """Returns what the weights of a tower take in numbers of `itemsize` bytes."""
    return itemsize * sum(math.prod(shape) for _, shape in vision_shapes(spec, decoder_hidden))


def vision_shapes(spec: VisionSpec, decoder_hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (canonical name, shape) of every tensor of a tower."""
    hidden, inner, side = spec.hidden_size, spec.intermediate_size, spec.patch_size
    yield "vision.patch.weight", (hidden, 3, side, side)
    yield "vision.patch.bias", (hidden,)
    yield "vision.positions.weight", (spec.patches_per_side**2, hidden)
    for number in range(spec.num_layers):
        prefix = f"vision.layers.{number}"
        for name in ("attention_norm", "mlp_norm"):
            yield f"{prefix}.{name}.weight", (hidden,)
            yield f"{prefix}.{name}.bias", (hidden,)
        for name, num_outputs, num_inputs in (
            *((name, hidden, hidden) for name in "qkvo"),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            yield f"{prefix}.{name}.weight", (num_outputs, num_inputs)
            yield f"{prefix}.{name}.bias", (num_outputs,)
    yield "vision.norm.weight", (hidden,)
    yield "vision.norm.bias", (hidden,)
    yield "vision.projector.weight", (decoder_hidden, hidden * spec.merge**2)
