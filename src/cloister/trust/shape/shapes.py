"""The traffic shape of each profile, and the threats it mitigates. Pure data.

The size was measured (`python -m benchmarks.traffic leak`): the event of one token has 231 bytes besides its text, so a frame
of 512 holds any token of the examined vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cloister.policy.verdict import Profile
from cloister.types.threat import Requirement, ThreatProfile


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Size and timing of frames.

    Attributes:
        frame_bytes: size of every frame of a stream.
        tick_s: frames are sent when the node's monotonic clock is a multiple of this, at most one each time.
        constant: a frame is sent on every tick from the one after the request's arrival, even without data, and the number of
            frames is a bucket size.
        least_frames: frames of the shortest answer under a constant cadence, if that is more than the smallest bucket.
    """

    frame_bytes: int
    tick_s: float
    constant: bool
    least_frames: int = 0


@dataclass(frozen=True, slots=True)
class SizeClass:
    """A declared size of sealed requests in `private`, which may hold images or text, and of the answers to them.

    Attributes:
        request_bytes: what requests are padded to.
        least_frames: what answers are padded to. At 10 ms a frame they hide how long images take, up to that time.
    """

    name: str
    request_bytes: int
    least_frames: int


SHAPES: Final[Mapping[Profile, TrafficShape | None]] = {
    Profile.OPEN: None,
    Profile.TEAM: None,
    Profile.PRIVATE: TrafficShape(frame_bytes=512, tick_s=0.005, constant=False),
    Profile.PARANOID: TrafficShape(frame_bytes=512, tick_s=0.020, constant=True),
}

_WITH_DRAFTS: Final = TrafficShape(frame_bytes=512, tick_s=0.010, constant=True)
"""Used in `private` with drafts. Accepted drafts are sent one per tick in every shape, but in a shape without frames for idle
ticks, the following gap reveals their number (docs/traffic.md quantifies this)."""

FIRST_EDGE: Final = 64
"""Number of frames in the smallest bucket: enough for any refusal, so that an error looks like a short answer."""
EDGE_RATIO: Final = 4


def shape_of(profile: str, *, drafts: bool = False) -> TrafficShape | None:
    """Returns the shape of sealed answers under a profile; None for no shaping.

    Args:
        drafts: drafts are verified, so that the number of tokens per step depends on content.
    """
    shape = SHAPES[Profile(profile)]
    return shape if shape is None or shape.constant or not drafts else _WITH_DRAFTS


SIZE_CLASSES: Final[Mapping[str, SizeClass]] = {
    "small": SizeClass("small", 2**18, 1024),
    "medium": SizeClass("medium", 2**20, 4096),
    "large": SizeClass("large", 2**22, 16384),
}
"""Answers last 10, 41 and 164 s at least."""


def shape_for_request(profile: str, shape: TrafficShape | None, num_bytes: int) -> TrafficShape | None:
    """Returns the shape of the answer to a sealed request, which in `private` depends on the request's size class.

    Args:
        shape: of the profile's answers.
        num_bytes: of the request with its padding, as everybody sees it.
    """
    reached = [size_class for size_class in SIZE_CLASSES.values() if num_bytes >= size_class.request_bytes]
    if shape is None or Profile(profile) is not Profile.PRIVATE or not reached:
        return shape
    tick_s = shape.tick_s if shape.constant else 2 * shape.tick_s
    return replace(shape, tick_s=tick_s, constant=True, least_frames=reached[-1].least_frames)


def find_edge(num_frames: int) -> int:
    """Returns the padded number of frames of an answer with `num_frames`: 64, 256, 1,024, 4,096 and so on."""
    edge = FIRST_EDGE
    while edge < num_frames:
        edge *= EDGE_RATIO
    return edge


# The threat that traffic shaping mitigates.


SHAPING_THREAT = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="number of frames in private; bucket of that number in paranoid, and in private while drafts are verified or in a "
    "size class",
    where=("network",),
    attack="traffic analysis: topic, length or accepted drafts from sizes and times of sealed chunks",
    mitigations=(
        "frames of one size",
        "one event a frame and one frame a tick",
        "paranoid, drafts and size classes: a frame on every tick, in buckets",
    ),
)
