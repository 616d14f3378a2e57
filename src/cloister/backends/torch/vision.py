"""A vision tower in torch, built from a spec and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.base import FloatArray, Weights
from cloister.backends.torch.layers import ACTIVATIONS
from cloister.backends.torch.reading import WeightReader
from cloister.backends.torch.schedule import Team, use_one_thread_per_operation
from cloister.backends.vision import VisionSpec


class _Product:
    """y = x W^T + b, in the weight's own type; the sum is given in float32."""

    def __init__(self, reader: WeightReader, name: str, *, bias: bool = True) -> None:
        self._weight = reader.matrix(name).flatten(1)
        self._bias = reader.vector(f"{name}.bias").to(self._weight.dtype) if bias else None

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows.to(self._weight.dtype), self._weight, self._bias).float()


class _LayerNorm:
    def __init__(self, reader: WeightReader, name: str, eps: float) -> None:
        self._weight, self._bias, self._eps = reader.vector(f"{name}.weight"), reader.vector(f"{name}.bias"), eps

    def __call__(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, self._weight.shape, self._weight, self._bias, self._eps)


class _Layer:
    """A block of the encoder: every patch attends to all patches of its image."""

    def __init__(self, spec: VisionSpec, reader: WeightReader, number: int) -> None:
        prefix = f"vision.layers.{number}"
        self._num_heads, self._activation = spec.num_heads, ACTIVATIONS[spec.activation]
        self._attention_norm = _LayerNorm(reader, f"{prefix}.attention_norm", spec.norm_eps)
        self._mlp_norm = _LayerNorm(reader, f"{prefix}.mlp_norm", spec.norm_eps)
        self._q, self._k, self._v, self._o, self._up, self._down = (
            _Product(reader, f"{prefix}.{name}") for name in ("q", "k", "v", "o", "up", "down")
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


class VisionTower:
    """Encodes images, one after another on each thread of the team: an image's bits do not depend on its company."""

    def __init__(self, spec: VisionSpec, reader: WeightReader, team: Team) -> None:
        self._spec, self._team = spec, team
        self._levels = torch.from_numpy(_levels(spec))
        self._patch = _Product(reader, "vision.patch")
        self._positions = reader.vector("vision.positions.weight").index_select(0, _position_ids(spec.patches_per_side))
        self._layers = [_Layer(spec, reader, number) for number in range(spec.num_layers)]
        self._norm = _LayerNorm(reader, "vision.norm", spec.norm_eps)
        self._projector = _Product(reader, "vision.projector", bias=False)

    @torch.no_grad()
    def encode(self, images: Sequence[bytes]) -> list[FloatArray]:
        """Returns embeddings [num_tokens, decoder's hidden] of each image, RGB bytes [image_size, image_size, 3]."""
        use_one_thread_per_operation()
        found: list[FloatArray] = [np.empty(0, np.float32)] * len(images)
        tasks = [partial(self._encode_into, found, number, image) for number, image in enumerate(images)]
        self._team.run(tasks, len(images) * self.operations)
        return found

    @property
    def operations(self) -> float:
        """Of one image, about."""
        spec = self._spec
        per_patch = spec.num_layers * (8 * spec.hidden_size**2 + 4 * spec.hidden_size * spec.intermediate_size)
        return float(spec.patches_per_side**2 * per_patch)

    def _encode_into(self, found: list[FloatArray], number: int, image: bytes) -> None:
        with torch.no_grad():  # of this thread
            hidden = self._patch(self._cut_patches(image)) + self._positions
            for layer in self._layers:
                hidden = layer(hidden)
            found[number] = self._projector(self._shuffle(self._norm(hidden))).numpy()

    def _cut_patches(self, image: bytes) -> Tensor:
        """Returns the normalised pixels of each patch, row by row, [num_patches, 3 * patch_size ** 2]."""
        size, side, count = self._spec.image_size, self._spec.patch_size, self._spec.patches_per_side
        pixels = torch.from_numpy(np.frombuffer(image, np.uint8).reshape(size, size, 3).transpose(2, 0, 1).astype(np.int64))
        normed = torch.stack([levels[channel] for levels, channel in zip(self._levels, pixels, strict=True)])
        normed = normed[:, : count * side, : count * side].reshape(3, count, side, count, side)
        return normed.permute(1, 3, 0, 2, 4).reshape(count * count, 3 * side * side)

    def _shuffle(self, hidden: Tensor) -> Tensor:
        """Returns squares of `merge` x `merge` patches as one row each, row by row."""
        count, merge = self._spec.patches_per_side, self._spec.merge
        rows = hidden.view(count // merge, merge, count // merge, merge, -1)
        return rows.permute(0, 2, 1, 3, 4).reshape(self._spec.num_tokens, -1)


def load_tower(spec: VisionSpec, weights: Weights, *, num_threads: int, dtype: str) -> VisionTower:
    """Loads a tower for a program of another back end.

    Args:
        weights: of the whole model.
        num_threads: of its own, which compute while the program does not.
        dtype: "float32" or "bfloat16".
    """
    team = Team(num_threads)
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return VisionTower(spec, WeightReader(weights, types[dtype], torch.device("cpu"), team), team)


def _levels(spec: VisionSpec) -> npt.NDArray[np.float32]:
    """Returns what each byte of each channel becomes, [3, 256], rounded step by step as transformers does."""
    scaled = (np.arange(256, dtype=np.float64) * spec.rescale).astype(np.float32)
    levels = [(scaled - np.float32(mean)) / np.float32(std) for mean, std in zip(spec.mean, spec.std, strict=True)]
    return np.stack(levels)


def _position_ids(count: int) -> Tensor:
    """Returns the row of the learned positions for each patch of a full image.

    transformers finds it by float32 fractions of the side, which fall into the bucket before where they are rounded down.
    """
    buckets: Any = torch.arange(1 / count, 1.0, 1 / count)
    fractions = torch.clamp(torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count)), max=1.0 - 1e-6)
    places = torch.bucketize(fractions, buckets, right=True)
    return (places[:, None] * count + places[None, :]).flatten()
