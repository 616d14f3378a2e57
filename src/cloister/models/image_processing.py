"""Converts an image to the inputs of a vision tower, by the model's processor config, as transformers does.

Resizing and cutting are done here, on bytes; the tower normalises them (`VisionSpec.mean`, `std`). Pillow is imported when the
first image comes: the package starts without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cloister.backends.spec import DecoderSpec
from cloister.backends.vision import QwenVisionSpec, VisionSpec
from cloister.models.config import ConfigFields, read_json
from cloister.models.decoder import choose_family
from cloister.models.qwen_images import read_qwen_processor
from cloister.types.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_MOST_SIDE: Final = 4096
"""Longest side that transformers resizes to, whatever the config says."""
_LANCZOS: Final = 1
_BILINEAR: Final = 2
_FAKE, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
_START, _SOFT = "<start_of_image>", "<image_soft_token>"


class ImageProcessor(Protocol):
    """How one model takes images."""

    @property
    def max_ratio(self) -> float:
        """What the longer side of an image may be of the shorter one."""
        ...

    @property
    def bidirectional(self) -> bool:
        """Whether the positions of a tile see each other in the decoder (`ImageTile.bidirectional`)."""
        ...

    def expand(self, prompt: str) -> str:
        """Returns a rendered prompt with what the model's processor writes in it before it is tokenized."""
        ...

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns that an image of this size becomes; what they count, an implementation says."""
        ...

    def cut(self, image: Image) -> list[bytes]:
        """Returns the tiles of an image of the mode RGB, in the order of the prompt: RGB bytes [height, width, 3] each."""
        ...

    def marks(self, grid: tuple[int, int]) -> str:
        """Returns the text of an image in the prompt, in place of the template's placeholder; one placeholder for each tile."""
        ...

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Returns how many positions a tile takes."""
        ...

    def token_grid(self, grid: tuple[int, int]) -> tuple[int, int] | None:
        """Returns the rows and columns of a tile's positions where tiles differ in size (`ImageTile.grid`), else None."""
        ...


@dataclass(frozen=True, slots=True)
class TileProcessor:
    """How images are cut into the tiles of one model (Idefics3, SmolVLM).

    Attributes:
        tile_tokens: positions of a tile.
        tile_size: side of a tile in pixels: the size that the tower takes.
        longest_edge: what an image's longer side is resized to before it is cut.
        splits: an image becomes rows and columns of tiles, and one of the whole; else only the latter.
        resizes: images are resized to `longest_edge` first.
        resample: number of Pillow's filter.
    """

    tile_tokens: int
    tile_size: int
    longest_edge: int
    splits: bool = True
    resizes: bool = True
    resample: int = _LANCZOS
    max_ratio: float = math.inf
    bidirectional: bool = False

    def expand(self, prompt: str) -> str:
        """Returns the prompt: `marks` has all there is, and no text at its ends that could join what stands beside it."""
        return prompt

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns (rows, columns) of tiles beside the one of the whole image; (0, 0) where that is the only one."""
        if not self.splits:
            return 0, 0
        columns, rows = (side // self.tile_size for side in self._sizes(width, height)[-1])
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)

    def cut(self, image: Image) -> list[bytes]:
        """Returns the tiles of an image in the order of the prompt, each RGB bytes [tile_size, tile_size, 3].

        Args:
            image: of the mode RGB.
        """
        for size in self._sizes(*image.size):
            image = image.resize(size, self.resample)
        side = self.tile_size
        whole = image.resize((side, side), self.resample)
        if image.size == (side, side) or not self.splits:
            return [whole.tobytes()]
        corners = [(left, top) for top in range(0, image.height, side) for left in range(0, image.width, side)]
        tiles = [image.crop((left, top, left + side, top + side)).tobytes() for left, top in corners]
        return [*tiles, whole.tobytes()]

    def marks(self, grid: tuple[int, int]) -> str:
        """Returns the text around the tiles of an image, with one placeholder for each, as transformers writes it."""
        rows, columns = grid
        lines = [
            "".join(f"{_FAKE}<row_{row}_col_{column}>{_IMAGE}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        before = "\n" if rows else ""
        return f"{''.join(lines)}{before}{_FAKE}{_GLOBAL}{_IMAGE}{_FAKE}"

    def num_tokens(self, _grid: tuple[int, int]) -> int:
        """Returns the positions of a tile: all have one size."""
        return self.tile_tokens

    def token_grid(self, _grid: tuple[int, int]) -> None:
        """Returns None: all tiles have one size."""

    def _sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Returns the sizes (width, height) that an image is resized to, one after another."""
        sizes = []
        if self.resizes:
            width, height = _fit(width, height, self.longest_edge)
            sizes.append((width, height))
        if self.splits:
            width, height = _round_up(width, height, self.tile_size)
            sizes.append((width, height))
        return sizes


@dataclass(frozen=True, slots=True)
class SquareProcessor:
    """Resizes an image to the square that the tower takes, whatever its shape (Gemma 3).

    Attributes:
        size: side of the square in pixels.
        tile_tokens: positions of an image.
        resample: number of Pillow's filter.
    """

    size: int
    tile_tokens: int
    resample: int = _BILINEAR
    max_ratio: float = math.inf
    bidirectional: bool = True

    def expand(self, prompt: str) -> str:
        """Returns the prompt with an empty line around each image, as transformers has it."""
        return prompt.replace(_START, f"\n\n{_START}{_SOFT}<end_of_image>\n\n")

    def grid(self, _width: int, _height: int) -> tuple[int, int]:
        """Returns (1, 1): an image is one tile."""
        return 1, 1

    def cut(self, image: Image) -> list[bytes]:
        """Returns the resized image, RGB bytes [size, size, 3].

        Args:
            image: of the mode RGB.
        """
        return [image.resize((self.size, self.size), self.resample).tobytes()]

    def marks(self, _grid: tuple[int, int]) -> str:
        """Returns the placeholder: `expand` has written what stands around it."""
        return _SOFT

    def num_tokens(self, _grid: tuple[int, int]) -> int:
        """Returns the positions of an image."""
        return self.tile_tokens

    def token_grid(self, _grid: tuple[int, int]) -> None:
        """Returns None: all images have one size."""


def _fit(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns a size whose longer side is `longest` (transformers: `get_resize_output_image_size` of SmolVLM)."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MOST_SIDE:
        width, height = _MOST_SIDE, int(_MOST_SIDE / ratio)
    elif height > width and height > _MOST_SIDE:
        width, height = int(_MOST_SIDE * ratio), _MOST_SIDE
    return max(width, 1), max(height, 1)


def _round_up(width: int, height: int, side: int) -> tuple[int, int]:
    """Returns multiples of `side` (transformers: `resize_for_vision_encoder`)."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return max(width, side), max(height, side)


def open_image_processor(path: Path) -> tuple[ImageProcessor, int] | None:
    """Returns how a model takes images, and the id of the token that stands for one.

    None where it takes no images.

    Raises:
        ModelError: the processor's config is missing, or asks for what is not computed here.
    """
    if not (path / "config.json").is_file():
        return None
    config = read_json(path / "config.json")
    family = choose_family(config)
    if family is None or family.vision is None:
        return None
    vision = family.vision(config).spec
    if vision is None:
        return None
    fields = read_processor(path)
    if fields.take_any("do_convert_rgb") is False or fields.take_any("do_rescale") is False:
        raise ModelError("the image processor's config switches off what the tower needs; restore its own", param="do_rescale")
    outer = ConfigFields(config)
    if isinstance(vision, QwenVisionSpec):
        return read_qwen_processor(fields, vision), outer.take("image_token_id", int, 151655)
    if vision.projection == "mean":
        return _read_square_processor(fields, vision), outer.take("image_token_index", int, 262144)
    return _read_tile_processor(fields, vision), outer.take("image_token_id", int, 128257)


def _read_tile_processor(fields: ConfigFields, vision: VisionSpec) -> TileProcessor:
    tile_size = _edge(fields, "max_image_size", 364)
    if tile_size != vision.image_size:
        raise ModelError(
            "max_image_size of the image processor must be image_size of vision_config: other tiles are not computed here",
            param="max_image_size",
        )
    return TileProcessor(
        tile_tokens=vision.num_tokens,
        tile_size=tile_size,
        longest_edge=_edge(fields, "size", 4 * 364),
        splits=fields.take("do_image_splitting", bool, True),
        resizes=fields.take("do_resize", bool, True),
        resample=fields.take("resample", int, _LANCZOS),
    )


def _read_square_processor(fields: ConfigFields, vision: VisionSpec) -> SquareProcessor:
    fields.require("do_resize", True)
    fields.require("do_pan_and_scan", False)
    side = vision.image_size
    if fields.take_any("size") not in (None, {"height": side, "width": side}):
        raise ModelError(
            "size of the image processor must be image_size of vision_config: others are not computed here", param="size"
        )
    fields.require("image_seq_length", vision.num_tokens)
    return SquareProcessor(side, vision.num_tokens, fields.take("resample", int, _BILINEAR))


def read_processor(path: Path) -> ConfigFields:
    """Returns the fields of a model's image processor.

    Raises:
        ModelError: the model has none.
    """
    first, second = (path / name for name in PROCESSOR_FILES)
    if first.exists():
        return ConfigFields(read_json(first), first.name)
    fields: Any = read_json(second).get("image_processor") if second.exists() else None
    if not isinstance(fields, dict):
        raise ModelError(f"{path} has no {first.name}, which says how images are resized; download the model again")
    return ConfigFields(fields, second.name)


def normalised_as_configured(spec: DecoderSpec, path: Path) -> DecoderSpec:
    """Returns a spec whose tower normalises images as the model's image processor does; itself where there is no tower."""
    if spec.vision is None:
        return spec
    fields = read_processor(path)
    vision = spec.vision
    if fields.take("do_normalize", bool, True):
        mean, std = _channels(fields, "image_mean", vision.mean), _channels(fields, "image_std", vision.std)
    else:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    rescale = fields.take("rescale_factor", float, 1 / 255)
    if isinstance(vision, QwenVisionSpec):
        vision = replace(vision, max_pixels=read_qwen_processor(fields, vision).max_pixels)
    return replace(spec, vision=replace(vision, rescale=rescale, mean=mean, std=std))


def processor_files(path: Path) -> Sequence[Path]:
    """Returns the file that says how a model's images are prepared, where there is one."""
    return [file for name in PROCESSOR_FILES if (file := path / name).exists()][:1]


def _channels(fields: ConfigFields, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    given = fields.take_any(name)
    values = list(default) if given is None else given
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(value, int | float) for value in values):
        raise ModelError(f"{name} in {fields.source} must be three numbers", param=name)
    if name == "image_std" and not all(values):
        raise ModelError(f"{name} in {fields.source} must not be 0", param=name)
    red, green, blue = map(float, values)
    return red, green, blue


def _edge(fields: ConfigFields, name: str, default: int) -> int:
    given = fields.take_any(name)
    if given is None:
        return default
    edge = given.get("longest_edge") if isinstance(given, dict) else None
    if type(edge) is not int or not 0 < edge <= _MOST_SIDE:
        raise ModelError(f"{name} in {fields.source} must be an object with a longest_edge of 1 to {_MOST_SIDE}", param=name)
    return edge
