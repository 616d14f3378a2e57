"""A vision tower as data: what makes embeddings of the images in a prompt.

Canonical weight names (L is the layer number from 0): `vision.patch.weight [hidden, 3, patch, patch]`, `vision.patch.bias`,
`vision.positions.weight [num_patches, hidden]`, `vision.layers.L.attention_norm`, `.q`, `.k`, `.v`, `.o`, `.mlp_norm`, `.up
[intermediate, hidden]`, `.down`, `vision.norm`, each with `.weight` and `.bias`, and `vision.projector.weight [decoder's
hidden, hidden * merge ** 2]`. Where squares of patches are averaged, it is [decoder's hidden, hidden], behind
`vision.pool_norm.weight [hidden]`.

Qwen's towers differ: `vision.patch.weight [hidden, 3, temporal_patch, patch, patch]`, `vision.layers.L.gate` where there is a
gate, and no `vision.norm` and projector, but mergers: `vision.merger.norm`, `vision.merger.up [inner, inner]` and
`vision.merger.down [decoder's hidden, inner]`, where inner is hidden * merge ** 2, and the same of each `vision.deepstack.N`.
Norms have a bias only if they are layer norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from cloister.types.images import ImageTile

WRONG_POSITIONS: Final = "the positions of the images do not fit the prompt"
WRONG_SIZE: Final = "an image is not of the size that the model takes"
MAX_SIDE_RATIO: Final = 200
"""Of the sides of an image that Qwen's processor takes."""


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """SigLIP (Zhai et al. 2023) on square images, and a projection of squares of patches (Idefics3, arXiv:2408.12637; Gemma 3,
    arXiv:2503.19786).

    Attributes:
        image_size: side of an image in pixels.
        patch_size: side of a patch in pixels.
        merge: side of the square of patches that become one token.
        projection: "shuffle" puts the patches of a square beside each other (pixel shuffle, Shi et al. 2016); "mean" averages
            them, and norms the mean (RMSNorm).
        bidirectional: the positions of an image see each other in the decoder.
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
    projection: Literal["shuffle", "mean"] = "shuffle"
    bidirectional: bool = False
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

    def find_misfit(self, image: ImageTile) -> str | None:
        """Returns why an image is none that the tower takes, or None."""
        if image.num_tokens != self.num_tokens or image.grid is not None or image.bidirectional is not self.bidirectional:
            return WRONG_POSITIONS
        return None if len(image.pixels) == self.image_bytes else WRONG_SIZE

    def make_blank(self) -> ImageTile:
        """Returns a black image that the tower takes."""
        pixels = bytes(self.image_bytes)
        return ImageTile(offset=0, num_tokens=self.num_tokens, digest=b"", pixels=pixels, bidirectional=self.bidirectional)


@dataclass(frozen=True, slots=True)
class QwenVisionSpec:
    """The towers of Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631).

    Images are of any size in whole tokens. A token is a square of `merge` x `merge` patches; the first half of a head's
    frequencies turns by the row of a patch, the second by its column.

    Attributes:
        patch_size: side of a patch in pixels.
        temporal_patch_size: frames of a patch; an image is so many equal frames.
        merge: side of the square of patches that become one token.
        gated: feed-forwards are down(act(gate(x)) * up(x)), else down(act(up(x))).
        norm: of layers and of the merger.
        patch_bias: the projection of patches carries a bias.
        window: side, in tokens, of the squares in which layers but `full_layers` attend; None: all layers see the whole image.
        grid_size: side of a square of learned positions, interpolated to an image's patches; None where there are none.
        deepstack: layers whose outputs become embeddings too, added behind the decoder's first layers (arXiv:2406.04334).
        max_pixels: of one image, as the image processor says.
        rescale, mean, std: as in `VisionSpec`.
    """

    patch_size: int
    temporal_patch_size: int
    merge: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"] = "silu"
    gated: bool = False
    norm: Literal["rms", "layer"] = "layer"
    patch_bias: bool = False
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    grid_size: int | None = None
    deepstack: tuple[int, ...] = ()
    max_pixels: int = 28 * 28 * 1280
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rescale: float = 1 / 255
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def most_pixels(self) -> int:
        """Of one image: a thin one, of one token's height, may have more than `max_pixels`."""
        return max(self.max_pixels, MAX_SIDE_RATIO * self.token_size**2)

    @property
    def token_size(self) -> int:
        """Side of a token in pixels."""
        return self.patch_size * self.merge

    def find_misfit(self, image: ImageTile) -> str | None:
        """Returns why an image is none that the tower takes, or None."""
        rows, columns = image.grid or (0, 0)
        if min(rows, columns) < 1 or rows * columns != image.num_tokens or image.bidirectional:
            return WRONG_POSITIONS
        num_pixels = image.num_tokens * self.token_size**2
        return None if len(image.pixels) == 3 * num_pixels and num_pixels <= self.most_pixels else WRONG_SIZE

    def make_blank(self) -> ImageTile:
        """Returns a black image that the tower takes, of one token."""
        return ImageTile(offset=0, num_tokens=1, digest=b"", pixels=bytes(3 * self.token_size**2), grid=(1, 1))


AnyVisionSpec: TypeAlias = VisionSpec | QwenVisionSpec
Shapes: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]


def tower_weights_bytes(spec: AnyVisionSpec, decoder_hidden: int, itemsize: int) -> int:
    """Returns what the weights of a tower take in numbers of `itemsize` bytes."""
    return itemsize * sum(math.prod(shape) for _, shape in vision_shapes(spec, decoder_hidden))


def vision_shapes(spec: AnyVisionSpec, decoder_hidden: int) -> Shapes:
    """Yields (canonical name, shape) of every tensor of a tower."""
    return _qwen_shapes(spec, decoder_hidden) if isinstance(spec, QwenVisionSpec) else _siglip_shapes(spec, decoder_hidden)


def _siglip_shapes(spec: VisionSpec, decoder_hidden: int) -> Shapes:
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
    if spec.projection == "mean":
        yield "vision.pool_norm.weight", (hidden,)
    yield "vision.projector.weight", (decoder_hidden, hidden if spec.projection == "mean" else hidden * spec.merge**2)


def _qwen_shapes(spec: QwenVisionSpec, decoder_hidden: int) -> Shapes:
    hidden, inner, merged = spec.hidden_size, spec.intermediate_size, spec.hidden_size * spec.merge**2
    yield "vision.patch.weight", (hidden, 3, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    if spec.patch_bias:
        yield "vision.patch.bias", (hidden,)
    if spec.grid_size is not None:
        yield "vision.positions.weight", (spec.grid_size**2, hidden)
    gate = (("gate", inner, hidden),) if spec.gated else ()
    products = (*((name, hidden, hidden) for name in "qkvo"), *gate, ("up", inner, hidden), ("down", hidden, inner))
    for number in range(spec.num_layers):
        prefix = f"vision.layers.{number}"
        for name in ("attention_norm", "mlp_norm"):
            yield from _norm_shapes(f"{prefix}.{name}", hidden, spec.norm)
        for name, num_outputs, num_inputs in products:
            yield f"{prefix}.{name}.weight", (num_outputs, num_inputs)
            yield f"{prefix}.{name}.bias", (num_outputs,)
    mergers = [("merger", hidden), *((f"deepstack.{number}", merged) for number in range(len(spec.deepstack)))]
    for name, normed in mergers:
        yield from _norm_shapes(f"vision.{name}.norm", normed, spec.norm)
        for product, num_outputs in (("up", merged), ("down", decoder_hidden)):
            yield f"vision.{name}.{product}.weight", (num_outputs, merged)
            yield f"vision.{name}.{product}.bias", (num_outputs,)


def _norm_shapes(name: str, size: int, kind: Literal["rms", "layer"]) -> Shapes:
    yield f"{name}.weight", (size,)
    if kind == "layer":
        yield f"{name}.bias", (size,)
