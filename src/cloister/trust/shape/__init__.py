"""Traffic shaping: converts an answer stream to frames whose sizes and times reveal little (docs/traffic.md).

Pure: bytes in, frames out, time is an argument. `Shaper` is the node's side, `Unshaper` the client's. `frames` defines the
frame format, `binary_http` the one for other clients. `shapes` defines each profile's shape.
"""

from cloister.trust.shape.binary_http import BinaryHttpShaper
from cloister.trust.shape.frames import BINARY_HTTP, FRAMES, FRAMING_FIELD, FRAMINGS, Frame, ShapeError, Unshaper
from cloister.trust.shape.shaper import Shaper
from cloister.trust.shape.shapes import (
    SHAPES,
    SHAPING_THREAT,
    SIZE_CLASSES,
    SizeClass,
    TrafficShape,
    find_edge,
    shape_for_request,
    shape_of,
)

__all__ = [
    "BINARY_HTTP",
    "FRAMES",
    "FRAMINGS",
    "FRAMING_FIELD",
    "SHAPES",
    "SHAPING_THREAT",
    "SIZE_CLASSES",
    "BinaryHttpShaper",
    "Frame",
    "ShapeError",
    "Shaper",
    "SizeClass",
    "TrafficShape",
    "Unshaper",
    "find_edge",
    "shape_for_request",
    "shape_of",
]
