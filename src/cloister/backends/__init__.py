"""Back ends: each builds a program from a decoder spec and its weights.

Importing this package registers every back end in `BACKENDS`; what one computes with is imported when it is chosen.
"""

from cloister.backends.base import BACKENDS
from cloister.backends.native import make_native_backend
from cloister.backends.torch import make_torch_backend

__all__ = ["BACKENDS", "make_native_backend", "make_torch_backend"]
