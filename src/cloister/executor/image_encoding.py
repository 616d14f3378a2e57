"""Encodes images beside the steps, each in a thread of its own that yields to them: nobody waits for another's image."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from cloister.backends.base import FloatArray
from cloister.types.errors import EngineError
from cloister.types.images import ImageTile
from cloister.types.logs import describe
from cloister.types.step import EncodedImage

ENCODING_FAILED: Final = "the engine failed while it encoded an image of this request; send it again"
NICENESS: Final = 10
"""Of the threads that encode: beside a step on the same core they get a tenth of it, and all of an idle core."""

_logger = logging.getLogger(__name__)


class Encode(Protocol):
    """Encodes one image in the calling thread (`backends.base.Program.encode_image`)."""

    def __call__(self, image: ImageTile, check: Callable[[], None]) -> FloatArray: ...


class EncodingCancelledError(Exception):
    """Nobody wants the image any more."""


class _Job:
    """An image that waits, is encoded, or was.

    Attributes:
        embeddings: what stands at its positions, once it is encoded.
        is_cancelled: nobody wants it any more. It ends before its tower's next layer.
    """

    __slots__ = ("embeddings", "image", "is_cancelled", "key")

    def __init__(self, key: tuple[int, int], image: ImageTile) -> None:
        self.key = key
        self.image = image
        self.embeddings: FloatArray | None = None
        self.is_cancelled = False

    def check(self) -> None:
        """Raises `EncodingCancelledError` if nobody wants the image any more."""
        if self.is_cancelled:
            raise EncodingCancelledError


class ImageEncoding:
    """Encodes images in threads, `num_threads` at once, in the order in which they were asked for.

    A thread lives for one image, so that what libraries keep for a thread goes with it.

    Attributes:
        num_running: images that are being encoded.
        done: those that were done and not taken yet.
    """

    def __init__(self, encode: Encode, num_threads: int) -> None:
        self._encode = encode
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, int], _Job] = {}
        self._queue: deque[_Job] = deque()
        self.done: list[EncodedImage] = []
        self.num_running = 0
        self._wake: Callable[[], None] = lambda: None

    @property
    def is_busy(self) -> bool:
        """Whether an image waits or is encoded, or the end of one was not taken yet."""
        with self._lock:
            return bool(self._queue or self.num_running or self.done)

    def on_done(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, in any thread, whenever `take` has something new."""
        self._wake = wake

    def start(self, seq_id: int, image: ImageTile) -> None:
        """Has an image of a sequence encoded."""
        job = _Job((seq_id, image.offset), image)
        with self._lock:
            self._jobs[job.key] = job
            self._queue.append(job)
        self._fill()

    def report(self, done: EncodedImage) -> None:
        """Reports an image as done that needs no encoding, because its sequence cannot run."""
        with self._lock:
            self.done.append(done)

    def cancel(self, seq_id: int) -> None:
        """Forgets the images of a sequence. One that is being encoded ends before the next layer."""
        with self._lock:
            for key in [key for key in self._jobs if key[0] == seq_id]:
                job = self._jobs.pop(key)
                job.is_cancelled = True
                _overwrite(job)
            self._queue = deque(job for job in self._queue if not job.is_cancelled)
            self.done = [done for done in self.done if done.seq_id != seq_id]

    def take(self) -> list[EncodedImage]:
        """Returns the images that were done since the last call."""
        with self._lock:
            done, self.done = self.done, []
        return done

    def collect(self, seq_id: int, offset: int) -> FloatArray:
        """Removes and returns the embeddings of an image.

        Raises:
            EngineError: it is not encoded: the step plan reaches it too early.
        """
        with self._lock:
            job = self._jobs.get((seq_id, offset))
            if job is None or job.embeddings is None:
                raise EngineError(f"the step plan reaches an image of sequence {seq_id} that is not encoded")
            del self._jobs[job.key]
        return job.embeddings

    def _fill(self) -> None:
        """Starts threads for images that wait."""
        while True:
            with self._lock:
                if not self._queue or self.num_running >= self._num_threads:
                    return
                job = self._queue.popleft()
                self.num_running += 1
            threading.Thread(target=self._run, args=(job,), name="cloister-image", daemon=True).start()

    def _run(self, job: _Job) -> None:
        _yield_to_steps()
        embeddings, error = None, ""
        try:
            job.check()
            embeddings = self._encode(job.image, job.check)
        except EncodingCancelledError:
            pass
        except Exception as failure:  # the other images and all steps go on
            _logger.error("an image could not be encoded: %s", describe(failure))
            error = ENCODING_FAILED
        with self._lock:
            self.num_running -= 1
            job.embeddings = embeddings
            if job.is_cancelled:
                _overwrite(job)
            else:
                self.done.append(EncodedImage(*job.key, error))
        self._fill()
        self._wake()


def _overwrite(job: _Job) -> None:
    if job.embeddings is not None:
        job.embeddings.fill(0)
        job.embeddings = None


def _yield_to_steps() -> None:
    """Lets the scheduler of the system prefer the threads of steps."""
    with suppress(OSError, AttributeError):  # elsewhere than on Linux a thread has no niceness of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
