"""Documents in a prompt that are encoded separately, each behind the prefix that they share."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Final

import msgspec

MAX_LINKS: Final = 64
"""Link tokens of one document."""


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
        num_links: link tokens of each document (KVLink, Yang et al. 2025, arXiv:2502.16002, section 3.2). Those of all
            documents stand behind the last one, in the order of the documents. The links of a document see the prefix, the
            documents up to it, and the links up to themselves, as if the documents behind it did not stand in between; they
            turn by that position too, unless there are `positions`. What they read is the request's adapter's.
    """

    starts: tuple[int, ...]
    end: int
    temperature: float = 1.0
    scale: float = 1.0
    positions: tuple[tuple[int, int], ...] = ()
    num_links: int = 0

    @property
    def links_end(self) -> int:
        """One past the last link token's position."""
        return self.end + self.num_links * len(self.starts)

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

    def find_hidden(self, position: int) -> tuple[int, int]:
        """Returns the positions [first, end) before `position` that the token there does not see; equal ones for none.

        Both are multiples of the block size. The token is computed as if they did not stand there.
        """
        if self.starts[0] <= position < self.end:
            return self.starts[0], self.starts[bisect_right(self.starts, position) - 1]
        if self.end <= position < self.links_end:
            return self._document_end((position - self.end) // self.num_links), self.end
        return 0, 0

    def shift(self, position: int) -> int:
        """Returns by how much a document's token at `position` is computed nearer to the prefix than it stands; 0 elsewhere."""
        first, end = self.find_hidden(position) if position < self.end else (0, 0)
        return end - first

    def cut_links(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns positions [start, end) cut where the links of another document begin, and behind the last link."""
        bounds = range(self.end + self.num_links, self.links_end + 1, self.num_links) if self.num_links else ()
        return list(pairwise((start, *(bound for bound in bounds if start < bound < end), end)))

    def _document_end(self, number: int) -> int:
        return self.starts[number + 1] if number + 1 < len(self.starts) else self.end

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged): lengths tell which documents were sent."""
        return f"Documents(num_documents={len(self.starts)})"
