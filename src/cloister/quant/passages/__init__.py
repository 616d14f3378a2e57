"""Default texts for calibration and for measuring quality."""

from __future__ import annotations

from pathlib import Path

from cloister.types.text_files import read_text_file

CALIBRATION = Path(__file__).with_name("calibration.txt")
HELD_OUT = Path(__file__).with_name("held_out.txt")


def read_passages(path: Path) -> str:
    """Returns a text.

    Raises:
        ConfigError: there is no such file, or it is not UTF-8.
    """
    return read_text_file(path, param="text")
