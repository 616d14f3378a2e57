"""Search results for people and as data: counts, kinds and places, never what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from cloister.trust.residue.scan import Searched

_MOST_PLACES = 12


def describe(searched: Sequence[Searched], roles: Mapping[str, str], shapes: Mapping[int, str]) -> Iterator[str]:
    """Yields lines for an operator: what was searched, and what was found where, by kind and by kind of request."""
    for one in searched:
        role = roles.get(one.where, "files")
        rate = f", {one.num_bytes / one.elapsed_s / 1e6:.0f} MB/s" if one.elapsed_s else ""
        swapped = f", {one.num_swapped} pages in swap" if one.num_swapped else ""
        found = f"{len(one.finds)} finds" if one.finds else "nothing"
        yield f"{role} ({_short(one.where)}): {one.num_bytes / 2**20:.0f} MiB in {one.num_mappings}{rate}{swapped}: {found}"
        for (place, kind), count in one.by_kind().most_common(_MOST_PLACES):
            yield f"    {count} x {kind} in {place}"
        by_shape = Counter(shapes.get(find.owner, "?") for find in one.finds)
        if by_shape:
            yield "    of: " + ", ".join(f"{shape} {count}" for shape, count in by_shape.most_common())


def to_data(searched: Sequence[Searched], roles: Mapping[str, str], shapes: Mapping[int, str]) -> list[dict[str, object]]:
    """Returns the same as data for JSON."""
    return [
        {
            "role": roles.get(one.where, "files"),
            "where": one.where,
            "bytes": one.num_bytes,
            "mappings": one.num_mappings,
            "swapped_pages": one.num_swapped,
            "seconds": round(one.elapsed_s, 3),
            "gaps": one.gaps,
            "finds": [{"place": p, "kind": k, "count": c} for (p, k), c in one.by_kind().most_common()],
            "finds_by_shape": dict(Counter(shapes.get(find.owner, "?") for find in one.finds)),
        }
        for one in searched
    ]


def _short(where: str) -> str:
    return where if len(where) <= 60 else where[:57] + "..."
