"""What a relay sees of a recorded answer under each profile: times and sizes of sealed chunks, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.traffic.recording import Recording
from cloister.trust.shape import Shaper, TrafficShape, shape_of

CHUNK_BYTES: Final = 2 * (16 + 2)
"""What two layers of sealing add to a chunk: a tag and a length each."""
NODE_BEHIND_S: Final = 0.001
"""Between the relay's first sight of a request and the node's, on the virtual clock."""


@dataclass(frozen=True, slots=True)
class Capture:
    """One answer as it passed the relay.

    Attributes:
        times_s: of each chunk, since the request passed.
        sizes: of each chunk, bytes.
    """

    label: int
    group: str
    times_s: list[float]
    sizes: list[int]


def replay(recording: Recording, profile: str, phase_s: float) -> Capture:
    """Returns what passes when the recorded flushes go through the profile's shape.

    Args:
        phase_s: what the node's clock shows when the request comes; ticks are multiples on that clock.
    """
    shape = shape_of(profile)
    sent = _as_flushed(recording) if shape is None else _shaped(recording, shape, phase_s)
    return Capture(
        recording.label,
        recording.group,
        [NODE_BEHIND_S + time_s for time_s, _ in sent],
        [size + CHUNK_BYTES for _, size in sent],
    )


def _as_flushed(recording: Recording) -> list[tuple[float, int]]:
    return [(time_s, sum(sizes)) for time_s, sizes in recording.flushes]


def _shaped(recording: Recording, shape: TrafficShape, phase_s: float) -> list[tuple[float, int]]:
    shaper, sent = Shaper(shape, phase_s), []
    flushes = list(recording.flushes)
    while not shaper.is_over:
        due_s = shaper.due_s if shaper.due_s is not None else math.inf
        if flushes and phase_s + flushes[0][0] <= due_s:
            time_s, sizes = flushes.pop(0)
            shaper.write(_make_events(sizes), phase_s + time_s, last=not flushes)
        elif (frame := shaper.take(due_s)) is not None:
            sent.append((due_s - phase_s, len(frame.data)))
    return sent


def _make_events(sizes: Sequence[int]) -> bytes:
    return b"".join(b"x" * (size - 2) + b"\n\n" for size in sizes)
