"""A vision tower in torch, built from a spec and its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.base import Weights
from cloister.backends.torch.layers import rms_norm
from cloister.backends.torch.qwen_vision import QwenTower, qwen_tower_bytes
from cloister.backends.torch.reading import WeightReader
from cloister.backends.torch.schedule import Team
from cloister.backends.torch.vision_parts import TOWER_ACTIVATIONS, TowerLayerNorm, TowerProduct, VisionTower
from cloister.backends.vision import AnyVisionSpec, QwenVisionSpec, VisionSpec
from cloister.types.images import ImageTile


class _Layer:
    """A block of the encoder: every patch attends to all patches of its image."""

    def __init__(self, spec: VisionSpec, reader: WeightReader, number: int) -> None:
        prefix = f"vision.layers.{number}"
        self._num_heads, self._activation = spec.num_heads, TOWER_ACTIVATIONS[spec.activation]
        self._attention_norm = TowerLayerNorm(reader, f"{prefix}.attention_norm", spec.norm_eps)
        self._mlp_norm = TowerLayerNorm(reader, f"{prefix}.mlp_norm", spec.norm_eps)
        self._q, self._k, self._v, self._o, self._up, self._down = (
            TowerProduct(reader, f"{prefix}.{name}") for name in ("q", "k", "v", "o", "up", "down")
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the residual stream [num_patches, hidden] behind the block."""
        normed = self._attention_norm(hidden)
        q, k, v = (self._heads(product(normed)) for product in (self._q, self._k, self._v))
        mixed = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(hidden.shape)
        hidden = hidden + self._o(mixed)
        return hidden + self._down(self._activation(self._up(self._mlp_norm(hidden))))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), self._num_heads, -1).transpose(0, 1).unsqueeze(0)


class SiglipTower(VisionTower):
    """SigLIP on square images of one size (`backends.vision.VisionSpec`)."""

    def __init__(self, spec: VisionSpec, reader: WeightReader) -> None:
        super().__init__(spec)
        self._spec = spec
        self._patch = TowerProduct(reader, "vision.patch")
        places = torch.arange(spec.patches_per_side**2) if spec.projection == "mean" else _position_ids(spec.patches_per_side)
        self._positions = reader.vector("vision.positions.weight").index_select(0, places)
        self._layers = [_Layer(spec, reader, number) for number in range(spec.num_layers)]
        self._norm = TowerLayerNorm(reader, "vision.norm", spec.norm_eps)
        self._pool_norm = reader.vector("vision.pool_norm.weight") if spec.projection == "mean" else None
        self._projector = TowerProduct(reader, "vision.projector", bias=False)

    def embed(self, image: ImageTile, check: Callable[[], None]) -> Tensor:
        """Returns embeddings [num_tokens, decoder's hidden] of RGB bytes [image_size, image_size, 3]."""
        hidden = self._patch(self._cut_patches(image.pixels)) + self._positions
        for layer in self._layers:
            check()
            hidden = layer(hidden)
        hidden = self._norm(hidden)
        if self._pool_norm is None:
            return self._projector(self._shuffle(hidden).flatten(1))
        return self._projector(rms_norm(self._shuffle(hidden).mean(1), self._pool_norm, self._spec.norm_eps))

    def _cut_patches(self, pixels: bytes) -> Tensor:
        """Returns the normalised pixels of each patch, row by row, [num_patches, 3 * patch_size ** 2]."""
        size, side, count = self._spec.image_size, self._spec.patch_size, self._spec.patches_per_side
        normed = self.normalise(pixels, size, size)[:, : count * side, : count * side].reshape(3, count, side, count, side)
        return normed.permute(1, 3, 0, 2, 4).reshape(count * count, 3 * side * side)

    def _shuffle(self, hidden: Tensor) -> Tensor:
        """Returns squares of `merge` x `merge` patches, row by row, [num_tokens, merge ** 2, hidden]."""
        count, merge = self._spec.patches_per_side, self._spec.merge
        rows = hidden.view(count // merge, merge, count // merge, merge, -1)
        return rows.permute(0, 2, 1, 3, 4).reshape(self._spec.num_tokens, merge**2, -1)


def open_tower(spec: AnyVisionSpec, reader: WeightReader) -> VisionTower:
    """Builds the tower that a spec describes."""
    return QwenTower(spec, reader) if isinstance(spec, QwenVisionSpec) else SiglipTower(spec, reader)


def tower_bytes(spec: AnyVisionSpec) -> int:
    """Returns what a thread takes at the widest place of the tower: all patches of one image, in float32."""
    if isinstance(spec, QwenVisionSpec):
        return qwen_tower_bytes(spec)
    widest = max(8 * spec.hidden_size + 2 * spec.intermediate_size, 6 * 3 * spec.patch_size**2)
    return 4 * spec.patches_per_side**2 * widest


def load_tower(spec: AnyVisionSpec, weights: Weights, *, num_threads: int, dtype: str) -> VisionTower:
    """Loads a tower for a program of another back end.

    Args:
        weights: of the whole model.
        num_threads: that read the weights.
        dtype: "float32" or "bfloat16".
    """
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return open_tower(spec, WeightReader(weights, types[dtype], torch.device("cpu"), Team(num_threads)))


def _position_ids(count: int) -> Tensor:
    """Returns the row of the learned positions for each patch of a full image.

    transformers finds it by float32 fractions of the side, which fall into the bucket before where they are rounded down.
    """
    buckets: Any = torch.arange(1 / count, 1.0, 1 / count)
    fractions = torch.clamp(torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count)), max=1.0 - 1e-6)
    places = torch.bucketize(fractions, buckets, right=True)
    return (places[:, None] * count + places[None, :]).flatten()
