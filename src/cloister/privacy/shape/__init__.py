"""How a stream of answer bytes becomes frames that tell little by their sizes and times (docs/traffic.md).

Pure: bytes in, frames out, time is an argument. `Shaper` is the node's side, `Unshaper` the client's; what a frame looks like
is in `frames`, which profile asks for which shape in `shapes`, what buckets leak in `leak`.
"""

from cloister.privacy.shape.frames import Frame, ShapeError
from cloister.privacy.shape.leak import count_bits, count_waste
from cloister.privacy.shape.shaper import Shaper
from cloister.privacy.shape.shapes import SHAPES, Shape, find_edge, shape_of
from cloister.privacy.shape.threat import SHAPING_THREAT
from cloister.privacy.shape.unshaper import Unshaper

__all__ = [
    "SHAPES",
    "SHAPING_THREAT",
    "Frame",
    "Shape",
    "ShapeError",
    "Shaper",
    "Unshaper",
    "count_bits",
    "count_waste",
    "find_edge",
    "shape_of",
]
