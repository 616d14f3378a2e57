"""Chooses the back end by name, without loading it: the front needs the name too."""

from __future__ import annotations

from typing import Final

from cloister.backends.availability import why_no_kernels
from cloister.types.config import EngineConfig

NO_QUANT: Final = "none"
"""Value of the setting `quant` that leaves weights as they are stored."""


def chosen_backend(config: EngineConfig) -> str:
    """Returns the name of the back end: the setting, or the default of this machine."""
    return config.backend or choose_backend(config.device or "cpu")[0]


def choose_backend(device: str) -> tuple[str, str]:
    """Returns the default back end's name and the reason."""
    if device != "cpu":
        return "torch", f"the device is {device}"
    reason = why_no_kernels()
    return ("native", "the device is a CPU") if reason is None else ("torch", reason)
