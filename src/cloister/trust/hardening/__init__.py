"""Hardening: drops the privileges of a sealed node before its libraries load, and records evidence of it.

`apply` applies measures to one process, `close` locks it down once everything is loaded. `python -P -m cloister.trust.hardening
MODULE` starts a module that way. Only the standard library is imported here, so that measures are applied first.
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
