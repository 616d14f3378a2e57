"""Tracks and orders the encoding of images of running sequences. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cloister.scheduler.sequence import SequenceRecord, Status
from cloister.types.images import ImageTile


class ImageEncodings:
    """Images that are encoded beside the steps. A sequence is computed up to its first image that is not encoded yet.

    Args:
        num_at_once: maximum number of concurrent encodings, and of encoded images of a sequence that are not computed yet.

    Attributes:
        sequences: running sequences with images that are not computed yet, by id.
    """

    def __init__(self, num_at_once: int) -> None:
        self.sequences: dict[int, SequenceRecord] = {}
        self._num_at_once = num_at_once
        self._is_encoded: dict[int, dict[int, bool]] = {}
        """seq_id -> number of an image's first position -> whether its encoding has ended"""

    def join(self, sequence: SequenceRecord) -> None:
        """Adds a sequence that starts to run; after a preemption the runner has none of its images."""
        self.sequences[sequence.seq_id] = sequence
        self._is_encoded[sequence.seq_id] = {}

    def begin(self, rank: Callable[[SequenceRecord], Any]) -> list[tuple[int, int]]:
        """Returns (seq_id, first position) of the images to encode next.

        Args:
            rank: orders sequences, the most urgent first.
        """
        num_left = self._num_at_once
        for sequence in list(self.sequences.values()):
            images = self._find_left(sequence)
            if not images:
                del self.sequences[sequence.seq_id], self._is_encoded[sequence.seq_id]
                continue
            known = self._is_encoded[sequence.seq_id]
            self._is_encoded[sequence.seq_id] = known = {
                image.offset: known[image.offset] for image in images if image.offset in known
            }
            num_left -= sum(not is_encoded for is_encoded in known.values())
        chosen: list[tuple[int, int]] = []
        for sequence in sorted(self.sequences.values(), key=rank):
            known = self._is_encoded[sequence.seq_id]
            new = [image.offset for image in self._find_left(sequence) if image.offset not in known]
            new = new[: max(0, min(num_left - len(chosen), self._num_at_once - len(known)))]
            known.update(dict.fromkeys(new, False))
            chosen += [(sequence.seq_id, offset) for offset in new]
        return chosen

    @staticmethod
    def _find_left(sequence: SequenceRecord) -> list[ImageTile]:
        """Returns the images of a sequence that are not fully planned yet; none if it does not run."""
        if sequence.status is not Status.RUNNING:
            return []
        return [image for image in sequence.request_state.request.images if image.end > sequence.num_planned]

    def note(self, seq_id: int, offset: int) -> None:
        """Notes that an image is encoded; ignores sequences that have ended."""
        if offset in self._is_encoded.get(seq_id, ()):
            self._is_encoded[seq_id][offset] = True

    def fit(self, sequence: SequenceRecord, num_wanted: int) -> int:
        """Returns how many of the next positions of a sequence precede its first image that is not encoded."""
        start = sequence.num_planned
        images: tuple[ImageTile, ...] = sequence.request_state.request.images
        found: Mapping[int, bool] = self._is_encoded.get(sequence.seq_id, {})
        for image in images:
            if image.offset >= start + num_wanted:
                break
            if image.end > start and not found.get(image.offset, False):
                return max(0, image.offset - start)
        return num_wanted
