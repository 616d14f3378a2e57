"""Images of prompts: encoded when a step reaches their positions, and kept until it has passed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.backends.base import FloatArray, IntArray, Program
from cloister.backends.vision import VisionSpec
from cloister.types.images import ImageTile

NOT_OFFERED = "this engine encodes no images; send text only"


@dataclass(slots=True)
class SequenceImages:
    """The images of one sequence.

    Attributes:
        tiles: those whose positions are not computed yet, in the order of the prompt.
        embeddings: number of a tile's first position -> [num_tokens, hidden], of those that a step has reached.
    """

    tiles: list[ImageTile]
    embeddings: dict[int, FloatArray] = field(default_factory=dict)

    def drop_before(self, position: int) -> None:
        """Drops the images that end before a position, and overwrites their embeddings."""
        while self.tiles and self.tiles[0].end <= position:
            found = self.embeddings.pop(self.tiles.pop(0).offset, None)
            if found is not None:
                found.fill(0)

    def missing(self, end: int) -> list[ImageTile]:
        """Returns the images that begin before a position and are not encoded yet."""
        return [tile for tile in self.tiles if tile.offset < end and tile.offset not in self.embeddings]

    def rows(self, start: int, end: int) -> list[tuple[int, FloatArray]]:
        """Returns (first position, embeddings) of the positions of images in [start, end)."""
        found = []
        for tile in self.tiles:
            first, last = max(tile.offset, start), min(tile.end, end)
            if first < last:
                found.append((first, self.embeddings[tile.offset][first - tile.offset : last - tile.offset]))
        return found


def encode_missing(program: Program, parts: Sequence[tuple[SequenceImages, int]]) -> None:
    """Encodes the images that a step reaches.

    Args:
        parts: images of a sequence, and one past the last position that the step computes of it.
    """
    wanted = []
    for images, end in parts:
        wanted += [(images, tile) for tile in images.missing(end)]
    if not wanted:
        return
    for (images, tile), embeddings in zip(wanted, program.encode_images([tile.pixels for _, tile in wanted]), strict=True):
        images.embeddings[tile.offset] = embeddings


def gather(parts: Sequence[tuple[SequenceImages, int, int, int]]) -> tuple[FloatArray, IntArray] | None:
    """Returns embeddings and the tokens that they stand at (`ForwardBatch.embeddings`, `embedding_rows`); None where none do.

    Args:
        parts: images of a sequence, the positions [start, end) that the step computes, and where its tokens begin.
    """
    pieces, places = [], []
    for images, start, end, first_token in parts:
        for position, rows in images.rows(start, end):
            pieces.append(rows)
            places.append(np.arange(len(rows), dtype=np.int32) + (first_token + position - start))
    return (np.concatenate(pieces), np.concatenate(places)) if pieces else None


def find_objection(vision: VisionSpec | None, tiles: Sequence[ImageTile], num_tokens: int) -> str | None:
    """Returns why a sequence of `num_tokens` known tokens cannot have these images, or None."""
    if vision is None:
        return NOT_OFFERED
    end = 0
    for tile in tiles:
        if tile.offset < end or tile.end > num_tokens or tile.num_tokens != vision.num_tokens:
            return "the positions of the images do not fit the prompt"
        if len(tile.pixels) != vision.image_bytes:
            return "an image is not of the size that the model takes"
        end = tile.end
    return None
