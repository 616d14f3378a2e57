"""What vision towers in torch have in common: their products and norms, and how an image is encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.base import FloatArray
from cloister.backends.torch.layers import ACTIVATIONS
from cloister.backends.torch.reading import WeightReader
from cloister.backends.torch.schedule import use_one_thread_per_operation
from cloister.backends.vision import AnyVisionSpec
from cloister.types.images import ImageTile

TOWER_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    **ACTIVATIONS,
    "quick_gelu": lambda rows: rows * torch.sigmoid(1.702 * rows),
}


class TowerProduct:
    """y = x W^T + b, in the weight's own type; the sum is given in float32."""

    def __init__(self, reader: WeightReader, name: str, *, bias: bool = True) -> None:
        self._weight = reader.matrix(name).flatten(1)
        self._bias = reader.vector(f"{name}.bias").to(self._weight.dtype) if bias else None

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows.to(self._weight.dtype), self._weight, self._bias).float()


class TowerLayerNorm:
    """A layer norm (Ba et al. 2016) with weight and bias, in float32."""

    def __init__(self, reader: WeightReader, name: str, eps: float) -> None:
        self._weight, self._bias, self._eps = reader.vector(f"{name}.weight"), reader.vector(f"{name}.bias"), eps

    def __call__(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, self._weight.shape, self._weight, self._bias, self._eps)


class VisionTower(ABC):
    """Encodes images, each in the thread that asks for it: an image's bits do not depend on its company."""

    def __init__(self, spec: AnyVisionSpec) -> None:
        self._levels = torch.from_numpy(_levels(spec))

    @torch.no_grad()
    def encode(self, image: ImageTile, check: Callable[[], None]) -> FloatArray:
        """Returns what stands at the positions of an image (`backends.base.Program.encode_image`)."""
        use_one_thread_per_operation()
        found: FloatArray = self.embed(image, check).numpy()
        return found

    @abstractmethod
    def embed(self, image: ImageTile, check: Callable[[], None]) -> Tensor:
        """Returns what stands at the positions of an image, [num_tokens, ...].

        Args:
            check: called before each layer; what it raises ends the encoding.
        """

    def normalise(self, pixels: bytes, height: int, width: int) -> Tensor:
        """Returns RGB bytes [height, width, 3] as numbers [3, height, width]."""
        image = torch.from_numpy(np.frombuffer(pixels, np.uint8).reshape(height, width, 3).transpose(2, 0, 1).astype(np.int64))
        return torch.stack([levels[channel] for levels, channel in zip(self._levels, image, strict=True)])


def _levels(spec: AnyVisionSpec) -> npt.NDArray[np.float32]:
    """Returns what each byte of each channel becomes, [3, 256], rounded step by step as transformers does."""
    scaled = (np.arange(256, dtype=np.float64) * spec.rescale).astype(np.float32)
    levels = [(scaled - np.float32(mean)) / np.float32(std) for mean, std in zip(spec.mean, spec.std, strict=True)]
    return np.stack(levels)
