"""Compresses the blocks of an engine's tiers (decisions/0040), before they are sealed and after they were opened.

The cost of each level is measured on the first blocks that are offered, before anything is stored. Then a level is chosen for
as long as the engine runs, and slots get the size of its streams. A stream is preceded by its length and padded with zeros, so
all blocks of a group have the same length and the disk does not show how well one compresses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from cloister.backends.availability import why_no_kernels
from cloister.backends.kv_planes import KVPlane
from cloister.kv.codec_levels import CodecLevel, LevelCost, choose_level, list_levels
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.backends.native.kv_codec import BlockCodec

NUM_SAMPLES: Final = 4
"""Blocks of each group on which levels are measured. A group that has offered none when others have offered many more is stored
uncompressed."""
MANY_SAMPLES: Final = 64
MARGIN: Final = 1.08
"""How much longer another stream may be than the longest of these blocks. On KV of three models streams differ by 3% at
most."""
LENGTH_BYTES: Final = 4


class TierCodec:
    """Codes blocks at one level.

    Args:
        planes: where the numbers of a block of each group lie; empty for a group that is stored uncompressed.
        sizes: bytes of a block of each group.
        name: the setting `kv_tier_codec`.

    Raises:
        ConfigError: nothing can be coded.

    Attributes:
        chosen: the level and its cost; None until measured.
    """

    def __init__(self, planes: Sequence[Sequence[KVPlane]], sizes: Sequence[int], name: str) -> None:
        self.name, self.sizes = name, tuple(sizes)
        self.chosen: LevelCost | None = None
        self._codecs = _make_codecs(planes, sizes)
        self._samples: list[list[bytes]] = [[] for _ in sizes]
        self._num_seen = 0
        self._scratch = threading.local()

    # Choosing a level

    def add_sample(self, group: int, content: bytes) -> bool:
        """Takes a block on which to measure levels; returns whether there are enough."""
        samples = self._samples[group]
        if len(samples) < NUM_SAMPLES:
            samples.append(content)
        self._num_seen += 1
        wanted = [len(found) for found, codec in zip(self._samples, self._codecs, strict=True) if codec is not None]
        return min(wanted) >= NUM_SAMPLES or (self._num_seen >= MANY_SAMPLES and max(wanted) >= NUM_SAMPLES)

    def choose(self, byte_s: float) -> LevelCost:
        """Measures the cost of each level, and chooses one for a tier that reads a byte in this time. Drops the samples."""
        self.chosen = choose_level([self._measure(level) for level in list_levels(self.name)], byte_s)
        self._samples = []
        return self.chosen

    def _measure(self, level: CodecLevel) -> LevelCost:
        stored, total_s = [], 0.0
        for size, codec, samples in zip(self.sizes, self._codecs, self._samples, strict=True):
            num_bytes, decode_s = size, 0.0
            if codec is not None and samples and not level.is_raw:
                num_bytes, decode_s = _measure_group(codec, level, samples)
            stored.append(num_bytes)
            total_s += decode_s
        return LevelCost(level, tuple(stored), total_s)

    # Coding

    @property
    def stored_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group as it is stored."""
        return self.sizes if self.chosen is None else self.chosen.stored_bytes

    def is_coded(self, group: int) -> bool:
        """Whether the blocks of a group are stored as streams."""
        return self.stored_bytes[group] != self.sizes[group]

    def encode(self, group: int, content: bytes) -> memoryview | bytes | None:
        """Returns a block as it is stored, valid until this thread's next one; None for one that does not fit."""
        if not self.is_coded(group):
            return content
        codec, chosen, size = self._codecs[group], self.chosen, self.stored_bytes[group]
        assert codec is not None
        assert chosen is not None
        room = self._take_room(size)
        length = codec.encode(content, chosen.level.step, room[LENGTH_BYTES:])
        if not length:
            return None
        room[:LENGTH_BYTES].view("<u4")[0] = length
        room[LENGTH_BYTES + length :] = 0
        return room.data

    def decode(self, group: int, stored: memoryview, content: memoryview) -> bool:
        """Fills a block from its stored bytes; returns whether it could."""
        codec = self._codecs[group]
        length = int.from_bytes(stored[:LENGTH_BYTES], "little")
        if codec is None or length > len(stored) - LENGTH_BYTES:
            return False
        return codec.decode(stored[LENGTH_BYTES : LENGTH_BYTES + length], content)

    def _take_room(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        room = getattr(self._scratch, "room", None)
        if room is None or len(room) < size:
            room = self._scratch.room = np.empty(max(self.stored_bytes), np.uint8)
        found: np.ndarray[tuple[int], np.dtype[np.uint8]] = room[:size]
        return found


def _make_codecs(planes: Sequence[Sequence[KVPlane]], sizes: Sequence[int]) -> list[BlockCodec | None]:
    """Returns the codec of each group; None for one whose blocks are not all numbers."""
    reason = why_no_kernels()
    if reason is not None:
        raise ConfigError(f"kv_tier_codec needs the native kernels ({reason}); leave it out", param="kv_tier_codec")
    from cloister.backends.native.kv_codec import BlockCodec  # not before it is known to be there

    codecs = [
        BlockCodec(own, size) if size and sum(plane.num_bytes for plane in own) == size else None
        for own, size in zip(planes, sizes, strict=True)
    ]
    if not any(codecs):
        raise ConfigError(
            "kv_tier_codec compresses KV in bfloat16 or float32, and this model's is something else; leave it out, or set "
            "kv_dtype to the type of the activations",
            param="kv_tier_codec",
        )
    return codecs


def _measure_group(codec: BlockCodec, level: CodecLevel, samples: Sequence[bytes]) -> tuple[int, float]:
    """Returns the size of a stored block, and the processor time of decoding one."""
    room, block = np.empty(codec.num_bytes, np.uint8), np.empty(codec.num_bytes, np.uint8)
    longest, best_s = 0, float("inf")
    for content in samples:
        length = codec.encode(content, level.step, room)
        if not length:
            return codec.num_bytes, 0.0
        longest = max(longest, length)
        started_s = time.thread_time()
        codec.decode(room[:length].data, block.data)
        best_s = min(best_s, time.thread_time() - started_s)
    return min(codec.num_bytes, LENGTH_BYTES + int(MARGIN * longest)), best_s
