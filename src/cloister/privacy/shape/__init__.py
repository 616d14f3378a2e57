"""How a stream of answer bytes becomes frames that tell little by their sizes and times (docs/traffic.md).

Pure: bytes in, frames out, time is an argument. `Shaper` is the node's side, `Unshaper` the client's. What a frame looks like
is in `frames`, and for clients of other makers in `binary_http`. Which profile asks for which shape is in `shapes`.
"""

from cloister.privacy.shape.binary_http import BinaryHttpShaper
from cloister.privacy.shape.frames import Frame, ShapeError
from cloister.privacy.shape.framings import BINARY_HTTP, FRAMES, FRAMING_FIELD, FRAMINGS
from cloister.privacy.shape.shaper import Shaper
from cloister.privacy.shape.shapes import SHAPES, SHAPING_THREAT, TrafficShape, find_edge, shape_of
from cloister.privacy.shape.unshaper import Unshaper

__all__ = [
    "BINARY_HTTP",
    "FRAMES",
    "FRAMINGS",
    "FRAMING_FIELD",
    "SHAPES",
    "SHAPING_THREAT",
    "BinaryHttpShaper",
    "Frame",
    "ShapeError",
    "Shaper",
    "TrafficShape",
    "Unshaper",
    "find_edge",
    "shape_of",
]
