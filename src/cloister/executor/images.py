"""Images of prompts, from the step that reaches their positions to the one that has passed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.backends.base import FloatArray, IntArray
from cloister.backends.vision import WRONG_POSITIONS, AnyVisionSpec
from cloister.executor.links import SequenceLinks
from cloister.types.errors import EngineError
from cloister.types.images import ImageTile

NOT_OFFERED = "this engine encodes no images; send text only"


@dataclass(slots=True)
class SequenceImages:
    """The images of one sequence.

    Attributes:
        tiles: those whose positions are not computed yet, in the order of the prompt.
        embeddings: number of a tile's first position -> what stands at its positions (`Program.encode_image`), of those that a
            step has reached.
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
        """Returns the images that begin before a position and are not reached by a step yet."""
        return [tile for tile in self.tiles if tile.offset < end and tile.offset not in self.embeddings]

    def rows(self, start: int, end: int) -> list[tuple[int, FloatArray]]:
        """Returns (first position, embeddings) of the positions of images in [start, end)."""
        found = []
        for tile in self.tiles:
            first, last = max(tile.offset, start), min(tile.end, end)
            if first < last:
                found.append((first, self.embeddings[tile.offset][first - tile.offset : last - tile.offset]))
        return found


@dataclass(frozen=True, slots=True)
class GridPositions:
    """What the tokens of a sequence turn by, where some stand in the rows and columns of an image (M-RoPE, arXiv:2409.12191).

    An image's tokens share one time, the number after the text before it, and count rows and columns from there. Text behind
    an image goes on after the greatest of all three, so it turns by less than its position.

    Attributes:
        spans: (first position, one past the last, columns, what later tokens turn less by) of each image, in order.
    """

    spans: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, tiles: Sequence[ImageTile]) -> GridPositions | None:
        """Returns those of a prompt with these images; None where no image has rows and columns."""
        spans = [(tile.offset, tile.end, tile.grid[1], tile.num_tokens - max(tile.grid)) for tile in tiles if tile.grid]
        return cls(tuple(spans)) if spans else None

    def turn(self, positions: IntArray) -> IntArray:
        """Returns time, row and column, [3, num_tokens], of tokens at these positions [num_tokens]."""
        turns = np.tile(positions, (3, 1))
        for start, end, columns, saved in self.spans:
            inside = (positions >= start) & (positions < end)
            places = positions[inside] - start
            turns[:, inside] += np.stack([-places, places // columns - places, places % columns - places])
            turns[:, positions >= end] -= saved
        return turns


def gather(parts: Sequence[tuple[SequenceImages | SequenceLinks, int, int, int]]) -> tuple[FloatArray, IntArray] | None:
    """Returns embeddings and the tokens that they stand at (`ForwardBatch.embeddings`, `embedding_rows`); None where none do.

    Args:
        parts: images or links of a sequence, the positions [start, end) that the step computes, and where its tokens begin.
    """
    pieces, places = [], []
    for held, start, end, first_token in parts:
        for position, rows in held.rows(start, end):
            pieces.append(rows)
            places.append(np.arange(len(rows), dtype=np.int32) + (first_token + position - start))
    if not pieces:
        return None
    width = max(rows.shape[1] for rows in pieces)  # links add nothing behind later layers, as rows of some images do
    found = np.zeros((sum(map(len, pieces)), width), np.float32)
    end = 0
    for rows in pieces:
        found[end : end + len(rows), : rows.shape[1]] = rows
        end += len(rows)
    return found, np.concatenate(places)


def find_last_seen(parts: Sequence[tuple[SequenceImages, int, int, int]], positions: IntArray) -> IntArray | None:
    """Returns the last position that each token sees (`ForwardBatch.last_seen`); None where no token sees further than itself.

    Args:
        parts: as `gather` takes them.

    Raises:
        EngineError: the step ends inside an image whose positions see each other.
    """
    found: IntArray | None = None
    for images, start, end, first_token in parts:
        for tile in images.tiles:
            if not tile.bidirectional or tile.offset >= end or tile.end <= start:
                continue
            if tile.end > end:
                raise EngineError("the step plan ends inside an image whose positions see each other")
            found = positions.copy() if found is None else found
            found[first_token + max(tile.offset, start) - start : first_token + tile.end - start] = tile.end - 1
    return found


def find_objection(vision: AnyVisionSpec | None, tiles: Sequence[ImageTile], num_tokens: int) -> str | None:
    """Returns why a sequence of `num_tokens` known tokens cannot have these images, or None."""
    if vision is None:
        return NOT_OFFERED
    end = 0
    for tile in tiles:
        if tile.offset < end or tile.end > num_tokens:
            return WRONG_POSITIONS
        if misfit := vision.find_misfit(tile):
            return misfit
        end = tile.end
    return None
