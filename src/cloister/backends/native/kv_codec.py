"""The codec of `backends.kv_codec`, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cloister.backends.kv_codec import make_frequencies
from cloister.backends.kv_planes import KVPlane, plane_array
from cloister.backends.native import _native

ByteArray = npt.NDArray[np.uint8]


class BlockCodec:
    """Codes blocks of one layout. Any number of threads may use it at once.

    Args:
        planes: all numbers of a block.
        num_bytes: of a block.

    Raises:
        ValueError: the planes are not those bytes.
    """

    def __init__(self, planes: Sequence[KVPlane], num_bytes: int) -> None:
        self.num_bytes, self.planes = num_bytes, tuple(planes)
        self._codec = _native.KVCodec(make_frequencies(), plane_array(self.planes), num_bytes)

    def encode(self, content: bytes | memoryview, step: float, out: ByteArray) -> int:
        """Writes the stream of a block; returns its bytes, or 0 where `out` has no room for it.

        Args:
            step: what numbers are rounded to, as a part of how far those of their plane lie from their channels' means (root
                mean square); 0: they come back as they are.
        """
        return self._codec.encode(np.frombuffer(content, np.uint8), np.full(len(self.planes), step, np.float32), out)

    def decode(self, stream: memoryview, content: memoryview) -> bool:
        """Fills a block from its stream; returns whether it was one. If not, the block has any numbers."""
        return self._codec.decode(np.frombuffer(stream, np.uint8), np.frombuffer(content, np.uint8))
