"""Texts for calibration and for measuring, where nobody gives others."""

from __future__ import annotations

from pathlib import Path

from cloister.types.errors import ConfigError

CALIBRATION = Path(__file__).with_name("calibration.txt")
HELD_OUT = Path(__file__).with_name("held_out.txt")


def read_passages(path: Path) -> str:
    """Returns a text.

    Raises:
        ConfigError: there is no such file, or it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        raise ConfigError(f"{path} is not a readable file of UTF-8 text", param="text") from None
