"""Images of a conversation: data URLs to tiles, and their places among the tokens of the prompt.

Everything a user sends is checked before it is decoded, and no error repeats any of it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cloister.models.config import names_tower
from cloister.policy.policy import Policy, Use
from cloister.policy.verdict import Profile
from cloister.server.errors import invalid
from cloister.server.image_decoding import Decoding, DecodingProcess, decode_image, refusal
from cloister.server.image_fetching import ImageFetcher
from cloister.server.reading_queue import ReadingQueue
from cloister.text import Tokenizer
from cloister.types.errors import InvalidRequestError
from cloister.types.images import MAX_REQUEST_PIXELS_BYTES, TOO_MANY_PIXELS, ImageTile, has_pillow

if TYPE_CHECKING:
    from PIL.Image import Image

    from cloister.models.image_processing import ImageProcessor

MAX_IMAGE_BYTES: Final = 20 * 2**20
"""Longest file of one image."""
SIDE_BY_SIDE: Final = 2
"""Requests whose images are decoded at once, one image after the other."""
NO_SIZE_CLASS: Final = (
    "Under `private` a request with images is sealed in a size class, small, medium or large, which hides them; choose one in "
    "the client (Session(size_class=...), cloister proxy --size-class)."
)
SIZE_CLASS_HOLDS: ContextVar[bool] = ContextVar("the sealed request is in a size class", default=False)
"""Set by a node for the request that it opened (`trust.shape.SIZE_CLASSES`)."""
_DATA_URL: Final = re.compile(r"data:image/[a-zA-Z0-9.+-]{1,40};base64,")


@dataclass(frozen=True, slots=True)
class CutImage:
    """An image as the model takes it.

    Attributes:
        grid: its rows and columns (`ImageProcessor.grid`).
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
        fetcher: fetches images from elsewhere; None if the settings do not allow it.
        open_decoding: begins to decode a file, in another process.
        slots: for requests whose images are decoded, shared fairly between tenants. Such requests wait here and not in the
            threads for text, which others need.
    """

    processor: ImageProcessor
    token_id: int
    tokenizer: Tokenizer
    policy: Policy
    max_images: int
    fetcher: ImageFetcher | None = None
    open_decoding: Callable[[], Decoding] = DecodingProcess
    slots: ReadingQueue = field(default_factory=lambda: ReadingQueue(SIDE_BY_SIDE), compare=False)

    @classmethod
    def open(
        cls,
        path: Path,
        tokenizer: Tokenizer,
        policy: Policy,
        max_images: int,
        fetcher: ImageFetcher | None = None,
        open_decoding: Callable[[], Decoding] = DecodingProcess,
    ) -> ImageReader | None:
        """Returns the reader of a model directory; None for a model that takes no images.

        Raises:
            ModelError: the model's image processor is missing, or needs steps that this package does not have.
        """
        if not names_tower(path):
            return None
        from cloister.models.image_processing import open_image_processor  # only now: it imports every family

        opened = open_image_processor(path)
        return None if opened is None else cls(*opened, tokenizer, policy, max_images, fetcher, open_decoding)

    @property
    def is_allowed(self) -> bool:
        """Whether the profile and the settings allow images in requests."""
        return self.max_images > 0 and self.policy.allows("image-inputs")

    def read(self, urls: Sequence[str]) -> list[CutImage]:
        """Returns the images of one request, in its order, as `ImagesPending.loaded` gives them.

        Args:
            urls: data URLs and, with a fetcher, https:// URLs, as the client sent them.

        Raises:
            PolicyError: the profile refuses images.
            InvalidRequestError: no size class covers them, there are too many, or one cannot be used; the message says why.
            ImagesPending: they are not decoded yet.
        """
        self.policy.check({"image-inputs": Use(bool(urls), "the request")})
        if self.policy.profile is Profile.PRIVATE and not SIZE_CLASS_HOLDS.get():
            raise invalid(NO_SIZE_CLASS, "messages", "no_size_class")
        if len(urls) > self.max_images:
            most = f"a request may have {self.max_images}" if self.max_images else "this server takes none"
            raise invalid(f"`messages` has too many images: {most}.", "messages", "too_many_images")
        if not has_pillow():
            raise invalid(
                "This server decodes no images: its operator can install 'cloister[vision]'.", "messages", "no_image_decoder"
            )
        match _loaded.get():
            case None:
                raise ImagesPending(self, urls)
            case InvalidRequestError() as error:
                raise error
            case images:
                return images

    async def load(self, urls: Sequence[str], tenant: str = "") -> list[CutImage]:
        """Fetches, decodes and cuts the images of one request.

        Args:
            tenant: shares the decoding fairly with others.

        Raises:
            InvalidRequestError: one cannot be used; the message says why.
            QueueFullError: too many requests of this tenant wait already.
        """
        remote = {number: url for number, url in enumerate(urls, 1) if url[:8].lower() == "https://"}
        files = {} if self.fetcher is None or not remote else await self.fetcher.fetch(remote)
        images: list[CutImage] = []
        turn = await self.slots.enter(tenant, 0)
        try:
            for number, url in enumerate(urls, 1):
                images.append(await self._cut(files.pop(number, url), number))
                if sum(len(tile) for image in images for tile in image.tiles) > MAX_REQUEST_PIXELS_BYTES:
                    raise invalid(TOO_MANY_PIXELS, "messages")
        finally:
            turn.end()
        return images

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

    async def _cut(self, source: str | bytes, number: int) -> CutImage:
        """Returns an image of a data URL, or of a file."""

        def cut(image: Image) -> CutImage:
            if max(image.size) > self.processor.max_ratio * min(image.size):
                raise refusal(number, f"has sides of a ratio of more than {self.processor.max_ratio:g}; crop it")
            return CutImage(self.processor.grid(*image.size), self.processor.cut(image))

        data = self._decode_url(source, number) if isinstance(source, str) else source
        return await decode_image(data, number, cut, self.open_decoding)

    def _decode_url(self, url: str, number: int) -> bytes:
        found = _DATA_URL.match(url)
        if found is None:
            elsewhere = "this server fetches no images from elsewhere" if self.fetcher is None else "others begin with https://"
            raise refusal(number, f"is not a data URL of an image in base64; {elsewhere}")
        if (len(url) - found.end()) * 3 // 4 > MAX_IMAGE_BYTES:
            raise refusal(number, f"has more than {MAX_IMAGE_BYTES >> 20} MiB; send a smaller one")
        try:
            return base64.b64decode(url[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise refusal(number, "is not valid base64") from None


class ImagesPending(Exception):
    """A prompt cannot be prepared before its images are decoded, which takes seconds and needs no text thread.

    The preparation ends here. Then the images are decoded, and the preparation starts again inside `loaded`.
    """

    def __init__(self, reader: ImageReader, urls: Sequence[str]) -> None:
        super().__init__()  # shows nothing that a user sent
        self._reader, self._urls = reader, urls

    async def load(self, tenant: str) -> LoadedImages:
        """Decodes the images, or returns why one cannot be used, which the preparation then raises with the name of its field.

        Raises:
            QueueFullError: too many requests of this tenant wait already.
        """
        try:
            return await self._reader.load(self._urls, tenant)
        except InvalidRequestError as error:
            return error

    @staticmethod
    @contextmanager
    def loaded(images: LoadedImages) -> Iterator[None]:
        """Gives images to preparations inside the context, in other threads too."""
        token = _loaded.set(images)
        try:
            yield
        finally:
            _loaded.reset(token)


LoadedImages = list[CutImage] | InvalidRequestError
_loaded: ContextVar[LoadedImages | None] = ContextVar("images of this request", default=None)
