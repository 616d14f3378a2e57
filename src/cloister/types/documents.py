"""Documents in a prompt that are encoded separately, each behind the prefix that they share."""

from __future__ import annotations

from bisect import bisect_right

import msgspec


class Documents(msgspec.Struct, frozen=True):
    """Where the documents of a prompt stand: one after another, behind a shared prefix and before what asks about them.

    A document sees the prefix and itself, and is computed as if it stood directly behind the prefix. So its KV depends on
    nothing else, and is the same in every prompt with this prefix (APE, Yang et al. 2025, arXiv:2502.05431, section 3; Prompt
    Cache, Gim et al. 2024, arXiv:2311.04934, section 3). What follows the last document sees everything.

    Attributes:
        starts: first position of each; the first one is the length of the prefix. All are multiples of the block size.
        end: one past the last document's last position; such a multiple too.
        temperature, scale: how what follows weighs their keys (`backends.base.ForwardBatch.document_ranges`; APE, section 4). 1
            and 1 weigh them as all other keys, with the bits of an ordinary prompt.
        positions: (token, position) of each run of tokens that are turned by other positions than they stand at, as the modules
            of a schema are (Prompt Cache, sections 3.3 and 3.4): a token behind turns by as much more, up to the next run. The
            first run is (0, 0), the second begins behind the prefix. Empty: documents turn as directly behind the prefix, all
            else as it stands.
    """

    starts: tuple[int, ...]
    end: int
    temperature: float = 1.0
    scale: float = 1.0
    positions: tuple[tuple[int, int], ...] = ()

    @property
    def has_weights(self) -> bool:
        """Whether what follows weighs them otherwise than other keys."""
        return self.temperature != 1.0 or self.scale != 1.0

    @property
    def num_tokens(self) -> int:
        """Positions of all documents."""
        return self.end - self.starts[0]

    def find_piece_end(self, position: int) -> int | None:
        """Returns where the next piece begins that is computed elsewhere than what stands at `position`; None for the last."""
        ends = (*self.starts[1:], self.end)  # the first document stands directly behind the prefix anyway
        place = bisect_right(ends, position)
        return ends[place] if place < len(ends) else None

    def turns(self, start: int, end: int) -> list[int]:
        """Returns the positions that tokens [start, end) are turned by, where they have positions of their own."""
        found: list[int] = []
        following = (*(first for first, _ in self.positions[1:]), end)
        for (first, position), stop in zip(self.positions, following, strict=True):
            found += range(position + max(start, first) - first, position + min(stop, end) - first)
        return found

    def count_positions(self, num_tokens: int) -> int:
        """Returns how many positions a prompt of so many tokens has, those between modules too."""
        return max(num_tokens, *(turn + 1 for turn in self.turns(0, num_tokens))) if self.positions else num_tokens

    def shift(self, position: int) -> int:
        """Returns by how much the token at `position` is computed nearer to the prefix than it stands."""
        if not self.starts[0] <= position < self.end:
            return 0
        return self.starts[bisect_right(self.starts, position) - 1] - self.starts[0]

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged): lengths tell which documents were sent."""
        return f"Documents(num_documents={len(self.starts)})"
