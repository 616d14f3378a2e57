"""Where the numbers of a KV block lie in its exported bytes, by position and channel: what a codec must know of a layout."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PlaneArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVPlane:
    """Keys or values of one layer, of one head or of all. All planes of a block together are its bytes.

    A position t lies `(t // inner_tokens) * token_stride + (t % inner_tokens) * inner_token_stride` numbers behind the first
    one, a channel likewise.

    Attributes:
        offset: bytes before the first number.
        number_bytes: 2 for bfloat16, 4 for float32.
    """

    offset: int
    number_bytes: int
    num_tokens: int
    inner_tokens: int
    num_channels: int
    inner_channels: int
    token_stride: int
    inner_token_stride: int
    channel_stride: int
    inner_channel_stride: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.num_channels * self.number_bytes

    def places(self) -> npt.NDArray[np.int64]:
        """Returns where each number lies, [num_tokens, num_channels], in numbers from the first one."""
        token, channel = np.arange(self.num_tokens), np.arange(self.num_channels)
        rows = token // self.inner_tokens * self.token_stride + token % self.inner_tokens * self.inner_token_stride
        columns = (
            channel // self.inner_channels * self.channel_stride + channel % self.inner_channels * self.inner_channel_stride
        )
        return rows[:, None] + columns


def plane_array(planes: tuple[KVPlane, ...]) -> PlaneArray:
    """Returns what the kernels read of planes: [num_planes, 10], their fields."""
    return np.array([astuple(plane) for plane in planes], np.int64).reshape(len(planes), 10)
