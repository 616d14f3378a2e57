"""Images of a conversation: data URLs to tiles, and their places among the tokens of the prompt.

What a user sent is checked before it is decoded, and no error repeats any of it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cloister.models.image_processing import ImageProcessor, has_pillow, open_image_processor
from cloister.policy.policy import Policy, Use
from cloister.server.errors import invalid
from cloister.server.image_child import FORMATS, HEAD, MAX_IMAGE_PIXELS, NO_FAULT, TOO_LARGE, UNKNOWN_FORMAT
from cloister.server.pdf.reading import INHERITED
from cloister.text import Tokenizer
from cloister.types.errors import InvalidRequestError
from cloister.types.images import ImageTile

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES: Final = 20 * 2**20
"""Longest file of one image."""
SIDE_BY_SIDE: Final = 2
"""Images that are decoded at once."""
DEADLINE_S: Final = 25.0
"""Time until an image is decoded."""
_DATA_URL: Final = re.compile(r"data:image/[a-zA-Z0-9.+-]{1,40};base64,")
_decoding = threading.BoundedSemaphore(SIDE_BY_SIDE)


@dataclass(frozen=True, slots=True)
class CutImage:
    """An image as the model takes it.

    Attributes:
        grid: the rows and columns of it (`ImageProcessor.grid`).
        tiles: RGB bytes of each.
    """

    grid: tuple[int, int]
    tiles: list[bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the images of requests to one model.

    Attributes:
        processor: cuts them.
        token_id: of the placeholder, which the chat template writes once for each image.
        max_images: of one request.
    """

    processor: ImageProcessor
    token_id: int
    tokenizer: Tokenizer
    policy: Policy
    max_images: int

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer, policy: Policy, max_images: int) -> ImageReader | None:
        """Returns the reader of a model directory; None for a model that takes no images.

        Raises:
            ModelError: the model's image processor is missing, or asks for what is not computed here.
        """
        opened = open_image_processor(path)
        return None if opened is None else cls(*opened, tokenizer, policy, max_images)

    @property
    def is_allowed(self) -> bool:
        """Whether the profile and the settings let requests have images."""
        return self.max_images > 0 and self.policy.allows("image-inputs")

    def read(self, urls: Sequence[str]) -> list[CutImage]:
        """Decodes and cuts the images of one request, in its order.

        Args:
            urls: data URLs, as the client sent them.

        Raises:
            PolicyError: the profile refuses images.
            InvalidRequestError: there are too many, or one cannot be used; the message says why.
        """
        self.policy.check({"image-inputs": Use(bool(urls), "the request")})
        if len(urls) > self.max_images:
            most = f"a request may have {self.max_images}" if self.max_images else "this server takes none"
            raise invalid(f"`messages` has too many images: {most}.", "messages", "too_many_images")
        if not has_pillow():
            raise invalid(
                "This server decodes no images: its operator can install 'cloister[vision]'.", "messages", "no_image_decoder"
            )
        return [self._cut(url, number) for number, url in enumerate(urls, 1)]

    def place(self, token_ids: Sequence[int], images: Sequence[CutImage]) -> tuple[list[int], tuple[ImageTile, ...]]:
        """Puts the tokens of each image where the template wrote its placeholder, and says where its tiles are.

        Raises:
            InvalidRequestError: the template wrote another number of placeholders.
        """
        if list(token_ids).count(self.token_id) != len(images):
            raise invalid("The model's chat template has no place for these images.", "messages", "invalid_image")
        placed: list[int] = []
        tiles: list[ImageTile] = []
        rest = iter(images)
        for token_id in token_ids:
            if token_id != self.token_id:
                placed.append(token_id)
                continue
            image = next(rest)
            pixels = iter(image.tiles)
            for piece in self.tokenizer.encode(self.processor.marks(image.grid)):
                if piece == self.token_id:
                    tiles.append(self._tile(next(pixels), len(placed), image.grid))
                    placed += [self.token_id] * tiles[-1].num_tokens
                else:
                    placed.append(piece)
        return placed, tuple(tiles)

    def _tile(self, pixels: bytes, offset: int, image_grid: tuple[int, int]) -> ImageTile:
        grid = self.processor.token_grid(image_grid)
        shape = b"" if grid is None else b"%d %d " % grid
        return ImageTile(
            offset=offset,
            num_tokens=self.processor.num_tokens(image_grid),
            digest=hashlib.sha256(shape + pixels).digest(),
            pixels=pixels,
            bidirectional=self.processor.bidirectional,
            grid=grid,
        )

    def _cut(self, url: str, number: int) -> CutImage:
        data = _decode_url(url, number)
        with _decoding:
            image = decode_image(data, number)
            if max(image.size) > self.processor.max_ratio * min(image.size):
                raise _refusal(number, f"has sides of a ratio of more than {self.processor.max_ratio:g}; crop it")
            return CutImage(self.processor.grid(*image.size), self.processor.cut(image))


def _decode_url(url: str, number: int) -> bytes:
    found = _DATA_URL.match(url)
    if found is None:
        raise _refusal(number, "is no data URL of an image in base64; this server fetches no images from elsewhere")
    if (len(url) - found.end()) * 3 // 4 > MAX_IMAGE_BYTES:
        raise _refusal(number, f"has more than {MAX_IMAGE_BYTES >> 20} MiB; send a smaller one")
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise _refusal(number, "is not valid base64") from None


def decode_image(data: bytes, number: int) -> Image:
    """Decodes each image file in a separate process: the decoder never handles untrusted bytes in the server.

    Args:
        number: of the image among those of the request, from 1, for errors.

    Raises:
        InvalidRequestError: it is of another format, too large by its header, or damaged.
    """
    from PIL import Image  # of an extra

    try:
        answer = subprocess.run(
            (sys.executable, "-P", "-m", "cloister.server.image_child", str(os.getpid())),
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in INHERITED if name in os.environ},
            timeout=DEADLINE_S,
        ).stdout
    except subprocess.TimeoutExpired:
        raise _refusal(number, "takes too long to decode; send a smaller one") from None
    if len(answer) < HEAD.size:  # a limit ended the process
        raise _refusal(number, "takes too much time or memory to decode; send a smaller one")
    fault, width, height = HEAD.unpack_from(answer)
    if fault == TOO_LARGE:
        raise _refusal(number, f"has more than {MAX_IMAGE_PIXELS / 1e6:.1f} million pixels; send a smaller one")
    if fault == UNKNOWN_FORMAT:
        raise _refusal(number, f"is none of {', '.join(FORMATS)}, or its header is damaged")
    is_whole = 0 < width * height <= MAX_IMAGE_PIXELS and len(answer) == HEAD.size + 3 * width * height
    if fault != NO_FAULT or not is_whole:
        raise _refusal(number, "is damaged or cut off")
    return Image.frombytes("RGB", (width, height), answer[HEAD.size :])


def _refusal(number: int, why: str) -> InvalidRequestError:
    return invalid(f"Image {number} of `messages` {why}.", "messages", "invalid_image")
