"""No way in: what a sealed node takes from itself before its libraries load, and what evidence says of it.

`apply` takes measures in one process, `close` shuts it when everything is loaded. `python -P -m cloister.privacy.hardening
MODULE` starts a module that way. Only the standard library is imported here, so that measures come before anything else.
"""

from cloister.privacy.hardening.applying import HARDENED_PROFILES, MEASURES, HardeningError, apply, close, probe
from cloister.privacy.hardening.code import preload
from cloister.privacy.hardening.measure import Measure, Missing, Needs, Result, Results
from cloister.privacy.hardening.state import HOST, Sealed, close_this, sealed

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
