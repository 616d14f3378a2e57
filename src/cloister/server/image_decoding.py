"""Decodes each image file in a process of its own: the decoder never handles untrusted bytes in the server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import anyio.to_thread

from cloister.server.errors import invalid
from cloister.server.image_child import FORMATS, HEAD, MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE, NO_FAULT, TOO_LARGE, UNKNOWN_FORMAT
from cloister.server.pdf.reading import INHERITED
from cloister.types.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
DEADLINE_S: Final = 25.0
"""Time until an image is decoded."""


class Decoding(Protocol):
    """A process that decodes a file."""

    def run(self, data: bytes) -> bytes:
        """Returns the answer of the process (`image_child.HEAD`, pixels); empty if it was ended.

        Raises:
            TimeoutError: it took longer than `DEADLINE_S`.
        """
        ...

    def stop(self) -> None:
        """Ends the process if it still works on the file. Called from another thread than `run`, before or after `run`
        began.
        """
        ...


async def decode_image(
    data: bytes, number: int, take: Callable[[Image], T], open_decoding: Callable[[], Decoding] | None = None
) -> T:
    """Decodes an image file and returns the result of `take`, called in the same thread. Ends the process when cancelled.

    Args:
        number: of the image among those of the request, from 1, for errors.
        open_decoding: begins to decode; default: a process of its own.

    Raises:
        InvalidRequestError: it is of another format, too large by its header, or damaged.
    """
    decoder = (open_decoding or DecodingProcess)()
    try:
        return await anyio.to_thread.run_sync(
            partial(_decode, decoder, data, number, take), abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )
    finally:
        decoder.stop()


class DecodingProcess:
    """The process of one file; `stop` ends it from another thread than `run`, before or after `run` began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self, data: bytes) -> bytes:
        """Returns the answer of the process; empty if it was ended.

        Raises:
            TimeoutError: it took longer than `DEADLINE_S`.
        """
        with self._lock:
            if self._is_stopped:
                return b""
            # started in the thread that waits for it: the kernel ends it with the thread that started it
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "cloister.server.image_child", str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
            )
        with self._process as process:
            try:
                return process.communicate(data, timeout=DEADLINE_S)[0]
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
            finally:
                process.kill()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()


def _decode(decoder: Decoding, data: bytes, number: int, take: Callable[[Image], T]) -> T:
    from PIL import Image  # of an extra

    try:
        answer = decoder.run(data)
    except TimeoutError:
        raise refusal(number, "takes too long to decode; send a smaller one") from None
    if len(answer) < HEAD.size:  # a limit ended the process
        raise refusal(number, "takes too much time or memory to decode; send a smaller one")
    fault, width, height = HEAD.unpack_from(answer)
    if fault == TOO_LARGE:
        most = f"{MAX_IMAGE_PIXELS / 1e6:.1f} million pixels, or {MAX_IMAGE_SIDE:,} on a side"
        raise refusal(number, f"has more than {most}; send a smaller one")
    if fault == UNKNOWN_FORMAT:
        raise refusal(number, f"is none of {', '.join(FORMATS)}, or its header is damaged")
    is_sized = 0 < width * height <= MAX_IMAGE_PIXELS and max(width, height) <= MAX_IMAGE_SIDE
    is_whole = is_sized and len(answer) == HEAD.size + 3 * width * height
    if fault != NO_FAULT or not is_whole:
        raise refusal(number, "is damaged or cut off")
    return take(Image.frombytes("RGB", (width, height), answer[HEAD.size :]))


def refusal(number: int, why: str) -> InvalidRequestError:
    """Returns the error about one image of a request, without any of its content."""
    return invalid(f"Image {number} of `messages` {why}.", "messages", "invalid_image")
