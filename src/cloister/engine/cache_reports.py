"""What is cached of one scope: the engine's report, and the front's calls that ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.kv import KeptUsage
from cloister.types.events import CacheUsage

REPORT_TIMEOUT_S: Final = 5.0
"""How long the front waits for an engine's report: it is made between two steps."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the engines of one model have cached of one scope.

    Attributes:
        places: by place, of all engines that answered.
        unanswered: indexes of the replicas that did not answer in time.
    """

    places: list[CacheUsage]
    unanswered: list[int]


def describe_usage(place: str, kept: KeptUsage, sizes: Sequence[int], block_size: int, now: float) -> CacheUsage:
    """Returns a report on one place.

    Args:
        sizes: bytes of a block of each group.
        block_size: tokens of a block. A group with a window has fewer blocks than tokens, so that with most of them counts.
    """
    return CacheUsage(
        place=place,
        num_blocks=sum(kept.num_blocks),
        num_tokens=max(kept.num_blocks) * block_size,
        num_bytes=sum(num * size for num, size in zip(kept.num_blocks, sizes, strict=True)),
        oldest_s=None if kept.oldest_s is None else round(max(0.0, now - kept.oldest_s), 3),
        used_s=None if kept.used_s is None else round(max(0.0, now - kept.used_s), 3),
    )


def add_up(reports: Iterable[CacheUsage]) -> list[CacheUsage]:
    """Returns one report for each place."""
    by_place: dict[str, list[CacheUsage]] = {}
    for report in reports:
        by_place.setdefault(report.place, []).append(report)
    return [
        CacheUsage(
            place=place,
            num_blocks=sum(one.num_blocks for one in same),
            num_tokens=sum(one.num_tokens for one in same),
            num_bytes=sum(one.num_bytes for one in same),
            oldest_s=max((one.oldest_s for one in same if one.oldest_s is not None), default=None),
            used_s=min((one.used_s for one in same if one.used_s is not None), default=None),
        )
        for place, same in by_place.items()
    ]
