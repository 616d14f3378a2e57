"""Sets our figures beside the best peer's of equal bits, and beside what the machine allows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.peers.ledger import Ledger, Result
from benchmarks.peers.roster import Entrant
from benchmarks.peers.shapes import Roof, Shape
from benchmarks.peers.work import DECODE_PROMPT, FIGURES, NUM_NEW, Figure, spread_lengths

OURS: Final = "cloister"
HTTP: Final = "cloister over HTTP"
MIB: Final = 2**20
_BITS_READ: Final = {"bf16": (16.0, 16.0), "int8": (8.0, 8.0), "int4": (4.5, 8.0), "qoq": (4.125, 8.0)}
"""Bits of a weight of ours with its scales, in the layers and in the vocabulary's matrix; of a peer's the file says it."""
GOALS: Final = {
    "prefill": (1.3, 0.75),
    "decode": (1.3, 0.85),
    "together": (1.5, 0.65),
    "memory": (1.0, 1.0),
}
"""By kind of figure: times the best peer, and share of the limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure of ours in one format.

    Attributes:
        best: name and median of the best peer of equal bits, None if there was none.
        ratio: how many times better than the best peer, more is better whatever the figure.
        share: of the limit that the machine sets, None where there is no limit.
    """

    figure: Figure
    number_format: str
    ours: Result
    best: tuple[str, float] | None
    ratio: float | None
    share: float | None


def judge(ledger: Ledger, shape: Shape, entrants: Sequence[Entrant]) -> Iterator[Verdict]:
    """Yields a verdict for each figure and format that we have."""
    for figure in FIGURES.values():
        for entrant in entrants:
            if entrant.peer != OURS or (ours := ledger.result(shape.name, entrant.name, figure.name)) is None:
                continue
            best = find_best(ledger, shape, entrants, entrant.bits, figure)
            ratio = None if best is None else better(figure, ours.median, best[1])
            limit = find_limit(ledger, shape, entrant, figure)
            share = None if limit is None else better(figure, ours.median, limit)
            yield Verdict(figure, entrant.number_format, ours, best, ratio, share)


def find_best(ledger: Ledger, shape: Shape, entrants: Sequence[Entrant], bits: int, figure: Figure) -> tuple[str, float] | None:
    """Returns the best peer of equal bits and its median."""
    medians = [
        (entrant.name, result.median)
        for entrant in entrants
        if not entrant.peer.startswith(OURS) and entrant.bits == bits
        if (result := ledger.result(shape.name, entrant.name, figure.name)) is not None
    ]
    choose = max if figure.more_is_better else min
    return choose(medians, key=lambda named: named[1], default=None)


def better(figure: Figure, ours: float, other: float) -> float:
    """How many times better `ours` is."""
    return ours / other if figure.more_is_better else other / ours


def find_limit(ledger: Ledger, shape: Shape, entrant: Entrant, figure: Figure) -> float | None:
    """Returns what the machine allows, in the figure's unit."""
    if figure.kind == "memory":
        return _memory_limit(shape, weights_read(shape, entrant))
    roof = make_roof(ledger, shape, entrant)
    if roof is None:
        return None
    limits = {
        "prefill": lambda: roof.prefill(figure.size),
        "decode": lambda: roof.decode(DECODE_PROMPT + NUM_NEW / 2),
        "together": lambda: roof.together(figure.size, NUM_NEW),
    }
    return limits[figure.kind]() if figure.kind in limits else None


def make_roof(ledger: Ledger, shape: Shape, entrant: Entrant) -> Roof | None:
    """Returns the machine as measured in the same session; four bits multiply at the pace of eight."""
    read = ledger.result(shape.name, "limits", "read")
    gemm = ledger.result(shape.name, "limits", "gemm_bf16" if entrant.bits == 16 else "gemm_int8")
    if read is None or gemm is None:
        return None
    return Roof(shape, read.median * 1e9, gemm.median * 1e9, weights_read(shape, entrant))


def weights_read(shape: Shape, entrant: Entrant) -> float:
    """Bytes of weights that a decode step reads."""
    if entrant.weights_bytes is not None:
        return entrant.weights_bytes
    return shape.weights_bytes(*_BITS_READ.get(entrant.number_format, (16.0, 16.0)))


def _memory_limit(shape: Shape, weights_bytes: float) -> float:
    """Weights and the KV of 16 requests at their longest, a tenth more, and 150 MiB; in GiB."""
    positions = sum(spread_lengths(16)) + 16 * NUM_NEW
    return ((weights_bytes + positions * shape.kv_token_bytes) * 1.1 + 150 * MIB) / 2**30
