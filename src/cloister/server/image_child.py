"""The process that decodes one image file: standard input to standard output, no files, no output on standard error."""

from __future__ import annotations

import io
import logging
import struct
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cloister.server.confinement import bound_resources, confine

if TYPE_CHECKING:
    from PIL.Image import Image

HEAD: Final = struct.Struct(">BII")
"""Head of an answer: number of the fault, width, height; the pixels follow, RGB, [height, width, 3]."""
NO_FAULT, UNKNOWN_FORMAT, TOO_LARGE, DAMAGED = range(4)
MAX_IMAGE_PIXELS: Final = 2**25
"""Most pixels of one image, by the file's header: 33.5 million take 600 MB while transparency is taken out."""
MAX_IMAGE_SIDE: Final = 2**16 - 1
"""Longest side in pixels, as JPEG and GIF allow: a filter that shrinks a side takes 48 bytes for each of its pixels."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
CPU_S: Final = 20
MEMORY_BYTES: Final = 1 << 30
"""Address space of the process."""


class Fault(Exception):
    """Why a file cannot be used.

    Attributes:
        number: one of `UNKNOWN_FORMAT`, `TOO_LARGE`, `DAMAGED`.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def decode(data: bytes) -> Image:
    """Returns an image file as RGB, upright, transparency over white, the first of several frames.

    Raises:
        Fault: it is of another format, too large by its header, or damaged.
    """
    from PIL import Image, ImageOps  # of an extra

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise Fault(TOO_LARGE) from None
        except Exception:  # readers of formats may fail in any way, and their messages may hold content
            raise Fault(UNKNOWN_FORMAT) from None
    if image.width * image.height > MAX_IMAGE_PIXELS or max(image.size) > MAX_IMAGE_SIDE:
        raise Fault(TOO_LARGE)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
        return image.convert("RGB")
    except Exception:
        raise Fault(DAMAGED) from None


def main() -> None:
    """Decodes one file; the only argument is the process that started this one."""
    logging.disable()  # warnings of a reader may hold content
    bound_resources(CPU_S, MEMORY_BYTES)
    load_readers()
    confine(int(sys.argv[1]))  # a sealed node has another process for it (`private.workers.image_decoder`)
    for piece in answer_file(sys.stdin.buffer.read()):
        sys.stdout.buffer.write(piece)


def answer_file(data: bytes) -> Iterator[bytes]:
    """Yields the answer of the process to a file: a head, and the pixels if there is no fault."""
    try:
        image = decode(data)
    except Fault as fault:
        yield HEAD.pack(fault.number, 0, 0)
    else:
        yield HEAD.pack(NO_FAULT, *image.size)
        yield image.tobytes()


def load_readers() -> None:
    """Imports the modules that a file may need, because a confined process cannot."""
    from PIL import (  # noqa: F401
        GifImagePlugin,
        Image,
        ImageOps,
        JpegImagePlugin,
        MpoImagePlugin,
        PngImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    Image.preinit()


if __name__ == "__main__":
    main()
