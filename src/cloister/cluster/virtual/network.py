"""A network between fronts and engines that loses, repeats, delays and reorders datagrams on demand."""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """State of the path in one direction between a front and a replica.

    Attributes:
        loss_rate, repeat_rate: share of datagrams that are lost, and that arrive twice.
        jitter_s: maximum random extra delay, by which datagrams overtake each other.
        is_cut: nothing arrives.
    """

    loss_rate: float = 0.0
    repeat_rate: float = 0.0
    jitter_s: float = 0.0
    is_cut: bool = False


GOOD = NetworkPath()
_SENT: Final = struct.Struct("<q?dq")
"""Replica, direction, time and length."""


class VirtualNetwork:
    """Carries datagrams.

    Args:
        draw: decides what happens to each.
        delay_s: of a datagram on a good path.

    Attributes:
        faults: how many datagrams were lost, repeated and delayed.
        digest: hash of all datagrams sent, with their times.
    """

    def __init__(self, draw: random.Random, delay_s: float) -> None:
        self.faults: Counter[str] = Counter()
        self.digest = hashlib.sha256()
        self._draw = draw
        self._delay_s = delay_s
        self._paths: dict[tuple[int, bool], NetworkPath] = {}

    def set_path(self, replica: int, is_to_engine: bool, path: NetworkPath) -> None:
        """Sets the path to a replica, or the one back."""
        self._paths[replica, is_to_engine] = path

    def send(self, replica: int, is_to_engine: bool, data: bytes, deliver: Callable[[bytes], None]) -> None:
        """Calls `deliver` with a datagram once, twice or never, some time later."""
        loop = asyncio.get_running_loop()
        self.digest.update(_SENT.pack(replica, is_to_engine, loop.time(), len(data)) + data)
        path = self._paths.get((replica, is_to_engine), GOOD)
        if path.is_cut or (path.loss_rate and self._draw.random() < path.loss_rate):
            self.faults["lost"] += 1
            return
        num_copies = 1
        if path.repeat_rate and self._draw.random() < path.repeat_rate:
            self.faults["repeated"] += 1
            num_copies = 2
        for _ in range(num_copies):
            delay_s = self._delay_s
            if path.jitter_s:
                self.faults["delayed"] += 1
                delay_s += self._draw.random() * path.jitter_s
            loop.call_later(delay_s, deliver, data)
