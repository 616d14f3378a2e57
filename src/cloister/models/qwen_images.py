"""Image processing of Qwen2-VL and later Qwen models: images keep their shape and are resized to whole tokens within limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cloister.backends.vision import MAX_SIDE_RATIO, QwenVisionSpec
from cloister.models.config import ConfigFields
from cloister.types.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

_BICUBIC: Final = 3
_MOST_PIXELS: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class QwenImageProcessor:
    """Resizes an image, and gives it to the tower as one tile (transformers: `Qwen2VLImageProcessor`).

    Attributes:
        token_size: side of a token in pixels.
        min_pixels, max_pixels: of a resized image, about.
        resample: number of Pillow's filter.
        max_ratio: of the longer side to the shorter one.
    """

    token_size: int
    min_pixels: int
    max_pixels: int
    resample: int = _BICUBIC
    max_ratio: float = MAX_SIDE_RATIO
    bidirectional: bool = False

    def expand(self, prompt: str) -> str:
        """Returns the prompt: the template writes what stands around an image."""
        return prompt

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of tokens (transformers: `smart_resize`)."""
        size = self.token_size
        rows, columns = round(height / size), round(width / size)
        if rows * columns * size * size > self.max_pixels:
            beta = math.sqrt(height * width / self.max_pixels)
            return max(1, math.floor(height / beta / size)), max(1, math.floor(width / beta / size))
        if rows * columns * size * size < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * beta / size), math.ceil(width * beta / size)
        return rows, columns

    def cut(self, image: Image) -> list[bytes]:
        """Returns the resized image, RGB bytes [rows * token_size, columns * token_size, 3].

        Args:
            image: of the mode RGB.
        """
        rows, columns = self.grid(*image.size)
        return [image.resize((columns * self.token_size, rows * self.token_size), self.resample).tobytes()]

    def marks(self, _grid: tuple[int, int]) -> str:
        """Returns the placeholder."""
        return "<|image_pad|>"

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Returns the positions of an image."""
        return grid[0] * grid[1]

    def token_grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows and columns of an image's tokens."""
        return grid


def read_qwen_processor(fields: ConfigFields, vision: QwenVisionSpec) -> QwenImageProcessor:
    """Reads the fields of an image processor.

    Raises:
        ModelError: they ask for another size of patches than the tower has, or for what is not computed here.
    """
    for name, size in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.merge),
    ):
        if fields.take(name, int, size) != size:
            raise ModelError(f"{name} of the image processor must be that of vision_config: {size}", param=name)
    fields.require("do_resize", True)
    bounds = fields.take_any("size") or {}
    if not isinstance(bounds, dict):
        raise ModelError(f"size in {fields.source} must be an object", param="size")
    given = ConfigFields(bounds, f"size in {fields.source}")
    shortest, longest = given.take_size("shortest_edge", 56 * 56), given.take_size("longest_edge", 28 * 28 * 1280)
    least, most = fields.take("min_pixels", int, None), fields.take("max_pixels", int, None)
    least, most = shortest if least is None else least, longest if most is None else most
    if not 0 < least <= most <= _MOST_PIXELS:
        raise ModelError(
            f"min_pixels and max_pixels in {fields.source} must be ascending, from 1 to {_MOST_PIXELS}", param="max_pixels"
        )
    return QwenImageProcessor(vision.token_size, least, most, fields.take("resample", int, _BICUBIC))
