"""Cache directories of files that speed up the next start, and their size limits, from the settings."""

from __future__ import annotations

from pathlib import Path

from cloister.types.config import EngineConfig


def cache_bytes(config: EngineConfig) -> int:
    """Returns the disk limit of packed weights, and equally of calibrated ones."""
    return round(config.weights_cache_mb * (1 << 20))


def kept_tokenizers(config: EngineConfig) -> Path | None:
    """Returns the cache directory for tokenizers that are slow to build; None disables it."""
    cache = weights_cache(config)
    return None if cache is None else cache / "tokenizers"


def weights_cache(config: EngineConfig) -> Path | None:
    """Returns the cache directory for packed weights; None disables it, as for a user without a home directory."""
    if not config.weights_cache:
        return None
    try:
        return Path(config.weights_cache).expanduser()
    except RuntimeError:  # neither HOME nor a user entry, as in many containers
        return None
