"""Link tokens of documents that are encoded separately: what stands at their positions, and where a step is cut for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cloister.backends.base import FloatArray
from cloister.types.documents import Documents

if TYPE_CHECKING:
    from cloister.executor.inputs import ScheduledSequence


@dataclass(frozen=True, slots=True)
class SequenceLinks:
    """The link tokens of one sequence.

    Attributes:
        embeddings: [num_links, hidden] float32: what the links of each document read.
    """

    documents: Documents
    embeddings: FloatArray

    def rows(self, start: int, end: int) -> list[tuple[int, FloatArray]]:
        """Returns (first position, embeddings) of the links in [start, end)."""
        first, last = max(self.documents.end, start), min(self.documents.links_end, end)
        places = np.arange(first, last) - self.documents.end
        return [(first, self.embeddings[places % len(self.embeddings)])] if first < last else []


def cut_at_links(parts: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Returns the parts of a step with those that compute links cut into one part for the links of each document, and one for
    what follows: each sees other blocks.

    They are computed in one forward pass all the same. Each layer writes the keys of all tokens before any token reads them, so
    links read those before them, and what follows reads all of them.
    """
    pieces = []
    for part in parts:
        documents = part.state.documents
        *runs, (last, _) = (
            [(part.plan.start, part.end)] if documents is None else documents.cut_links(part.plan.start, part.end)
        )
        for start, end in runs:
            plan = msgspec.structs.replace(part.plan, start=start, num_tokens=end - start, num_samples=0)
            pieces.append(msgspec.structs.replace(part, plan=plan, end=end, num_prompt_rows=0, num_rows=0))
        plan = msgspec.structs.replace(part.plan, start=last, num_tokens=part.plan.start + part.plan.num_tokens - last)
        pieces.append(msgspec.structs.replace(part, plan=plan))
    return pieces
