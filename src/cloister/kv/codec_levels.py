"""Levels of the codec of stored KV, and which of them a tier uses (CacheGen, Liu et al. 2024). Pure: no I/O, clock or arrays.

A setting names one level, or lets the measured speed of the tier choose: the slower the tier, the more decoding and loss are
worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WORTHWHILE: Final = 0.8
"""A level that loses more is worth it if loads then take less than this part of the time."""


@dataclass(frozen=True, slots=True)
class CodecLevel:
    """One level.

    Attributes:
        step: quantization step, as a part of the channel's standard deviation; 0: lossless.
        is_raw: stored as it is.
    """

    name: str
    step: float = 0.0
    is_raw: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether decoding returns the stored bits."""
        return self.step == 0.0


RAW: Final = CodecLevel("raw", is_raw=True)
LEVELS: Final = (
    RAW,
    CodecLevel("lossless"),
    CodecLevel("fine", 0.25),
    CodecLevel("medium", 0.5),
    CodecLevel("coarse", 1.0),
)
"""From the most exact on."""
AUTO, AUTO_LOSSY = "auto", "auto-lossy"
CODEC_NAMES: Final = (AUTO, *(level.name for level in LEVELS[1:]), AUTO_LOSSY)
"""What the setting may say: a level, or which ones the tier's speed chooses from: the exact ones, or all."""


def list_levels(name: str) -> tuple[CodecLevel, ...]:
    """Returns the levels that a setting allows, from the most exact on.

    Raises:
        KeyError: there is no such setting.
    """
    if name == AUTO:
        return tuple(level for level in LEVELS if level.is_exact)
    if name == AUTO_LOSSY:
        return LEVELS
    return ({level.name: level for level in LEVELS[1:]}[name],)


def is_lossy(name: str | None) -> bool:
    """Whether a setting allows a level that loses something."""
    return name is not None and not all(level.is_exact for level in list_levels(name))


@dataclass(frozen=True, slots=True)
class LevelCost:
    """Measured size and decoding time of one entry of a block table at a level.

    Attributes:
        stored_bytes: of its block of each group of layers.
        decode_s: time that decoding them takes.
    """

    level: CodecLevel
    stored_bytes: tuple[int, ...]
    decode_s: float


def choose_level(costs: Sequence[LevelCost], byte_s: float) -> LevelCost:
    """Returns the most exact level that loads about as fast as it gets.

    Args:
        costs: at least one, from the most exact on.
        byte_s: time that reading one stored byte takes.
    """
    enough_s = min(_load_s(cost, byte_s) for cost in costs) / WORTHWHILE
    return next(cost for cost in costs if _load_s(cost, byte_s) <= enough_s)


def _load_s(cost: LevelCost, byte_s: float) -> float:
    return sum(cost.stored_bytes) * byte_s + cost.decode_s
