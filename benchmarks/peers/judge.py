"""Sets our figures beside the best peer's that loses as little, and beside what the machine allows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.peers.ledger import Ledger, Result
from benchmarks.peers.losses import Loss, Losses
from benchmarks.peers.roster import Entrant
from benchmarks.peers.shapes import Roof, Shape
from benchmarks.peers.work import FIGURES, NUM_NEW, Figure, spread_lengths

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
    """One figure of ours in one format on one instruction set.

    Attributes:
        loss: of ours; None where it is unknown.
        best: the best peer that loses about as much or less, and its median; None if there was none.
        best_loss: of that peer.
        ratio: how many times better than the best peer, more is better whatever the figure.
        limit: what the machine allows, in the figure's unit, None where there is no limit.
        share: of the limit.
    """

    figure: Figure
    number_format: str
    isa: str
    ours: Result
    loss: Loss | None
    best: tuple[Entrant, float] | None
    best_loss: Loss | None
    ratio: float | None
    limit: float | None
    share: float | None


def judge(ledger: Ledger, shape: Shape, entrants: Sequence[Entrant], losses: Losses) -> Iterator[Verdict]:
    """Yields a verdict for each figure, instruction set and format that we have."""
    for figure in FIGURES.values():
        for entrant in entrants:
            if entrant.peer != OURS or (ours := ledger.result(shape.name, entrant.name, figure.name)) is None:
                continue
            best = find_best(ledger, shape, entrants, entrant, losses, figure)
            limit = find_limit(ledger, shape, entrant, figure)
            yield Verdict(
                figure,
                entrant.number_format,
                entrant.isa,
                ours,
                losses.of(entrant),
                best,
                None if best is None else losses.of(best[0]),
                None if best is None else better(figure, ours.median, best[1]),
                limit,
                None if limit is None else better(figure, ours.median, limit),
            )


def find_best(
    ledger: Ledger, shape: Shape, entrants: Sequence[Entrant], ours: Entrant, losses: Losses, figure: Figure
) -> tuple[Entrant, float] | None:
    """Returns the best peer on the same instruction set that loses about as much or less, and its median."""
    medians = [
        (peer, result.median)
        for peer in entrants
        if not peer.peer.startswith(OURS) and peer.isa == ours.isa and losses.are_comparable(ours, peer)
        if (result := ledger.result(shape.name, peer.name, figure.name)) is not None
    ]
    choose = max if figure.more_is_better else min
    return choose(medians, key=lambda named: named[1], default=None)


def better(figure: Figure, ours: float, other: float) -> float:
    """How many times better `ours` is."""
    return ours / other if figure.more_is_better else other / ours


def find_limit(ledger: Ledger, shape: Shape, entrant: Entrant, figure: Figure) -> float | None:
    """Returns what the machine allows, in the figure's unit."""
    if figure.kind == "memory":
        return _memory_limit(shape, weights_read(shape, entrant) / shape.active_share)
    roof = make_roof(ledger, shape, entrant)
    if roof is None:
        return None
    limits = {
        "prefill": lambda: roof.prefill(figure.size),
        "decode": lambda: roof.decode(figure.size + NUM_NEW / 2),
        "together": lambda: roof.together(figure.size, NUM_NEW),
    }
    return limits[figure.kind]() if figure.kind in limits else None


def make_roof(ledger: Ledger, shape: Shape, entrant: Entrant) -> Roof | None:
    """Returns the machine as measured in the same session; four bits multiply at the pace of eight."""
    limits = " ".join(filter(None, ("limits", entrant.isa)))
    read = ledger.result(shape.name, limits, "read")
    gemm = ledger.result(shape.name, limits, "gemm_bf16" if entrant.bits == 16 else "gemm_int8")
    if read is None or gemm is None:
        return None
    return Roof(shape, read.median * 1e9, gemm.median * 1e9, weights_read(shape, entrant))


def weights_read(shape: Shape, entrant: Entrant) -> float:
    """Bytes of weights that a decode step of one token reads."""
    if entrant.weights_bytes is not None:
        return entrant.weights_bytes * shape.active_share
    return shape.weights_bytes(*_BITS_READ.get(entrant.number_format, (16.0, 16.0)))


def _memory_limit(shape: Shape, weights_bytes: float) -> float:
    """Weights and the KV of 16 requests at their longest, a tenth more, and 150 MiB; in GiB."""
    positions = sum(spread_lengths(16)) + 16 * NUM_NEW
    return ((weights_bytes + positions * shape.kv_token_bytes) * 1.1 + 150 * MIB) / 2**30
