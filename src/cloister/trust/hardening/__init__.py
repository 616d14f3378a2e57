"""Hardening: the privileges that a sealed node drops before its libraries load, and the evidence of it.

`apply` takes measures in one process, `close` shuts it when everything is loaded. `python -P -m cloister.trust.hardening
MODULE` starts a module that way. Only the standard library is imported here, so that measures come before anything else.
"""

from cloister.trust.hardening.applying import HARDENED_PROFILES, MEASURES, HardeningError, apply, close, probe
from cloister.trust.hardening.code import preload
from cloister.trust.hardening.measure import Measure, Missing, Needs, Result, Results
from cloister.trust.hardening.state import HOST, Sealed, close_this, sealed

__all__ = [
    "HARDENED_PROFILES",
    "HOST",
    "MEASURES",
    "HardeningError",
    "Measure",
    "Missing",
    "Needs",
    "Result",
    "Results",
    "Sealed",
    "apply",
    "close",
    "close_this",
    "preload",
    "probe",
    "sealed",
]
