"""Back ends: each builds a program from a decoder spec and its weights.

Importing this package registers every back end in `BACKENDS`; what one computes with is imported when it is chosen.
"""

from cloister.backends import native, torch
from cloister.backends.factories import BACKENDS

__all__ = ["BACKENDS", "native", "torch"]
