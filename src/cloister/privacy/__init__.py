"""Who may ask, what may be switched on, and what may be kept.

`settle` turns settings into a `Policy`, a `Gate` admits each request under it, `CountRelease` is what metrics leave through
where the profile allows counts only. Pure but for `read_credentials` and its neighbours in `keyfile`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.privacy.catalogue import Entry, gather
    from cloister.privacy.counts import ALLOWED_COUNTS, PROFILING_THREAT, CountRelease
    from cloister.privacy.credentials import Credential, Credentials
    from cloister.privacy.gate import Admission, Gate
    from cloister.privacy.keyfile import read_credentials
    from cloister.privacy.limits import Account, Charge, KeyQuota
    from cloister.privacy.policy import Policy, Use
    from cloister.privacy.profile import default_profile, is_loopback
    from cloister.privacy.settings import settle, settle_front
    from cloister.privacy.verdict import Profile, Ruling, Verdict

__all__ = [
    "ALLOWED_COUNTS",
    "PROFILING_THREAT",
    "Account",
    "Admission",
    "Charge",
    "CountRelease",
    "Credential",
    "Credentials",
    "Entry",
    "Gate",
    "KeyQuota",
    "Policy",
    "Profile",
    "Ruling",
    "Use",
    "Verdict",
    "default_profile",
    "gather",
    "is_loopback",
    "read_credentials",
    "settle",
    "settle_front",
]

_HOME = {
    "ALLOWED_COUNTS": "cloister.privacy.counts",
    "Account": "cloister.privacy.limits",
    "Admission": "cloister.privacy.gate",
    "Charge": "cloister.privacy.limits",
    "CountRelease": "cloister.privacy.counts",
    "Credential": "cloister.privacy.credentials",
    "Credentials": "cloister.privacy.credentials",
    "Entry": "cloister.privacy.catalogue",
    "Gate": "cloister.privacy.gate",
    "KeyQuota": "cloister.privacy.limits",
    "PROFILING_THREAT": "cloister.privacy.counts",
    "Policy": "cloister.privacy.policy",
    "Profile": "cloister.privacy.verdict",
    "Ruling": "cloister.privacy.verdict",
    "Use": "cloister.privacy.policy",
    "Verdict": "cloister.privacy.verdict",
    "default_profile": "cloister.privacy.profile",
    "gather": "cloister.privacy.catalogue",
    "is_loopback": "cloister.privacy.profile",
    "read_credentials": "cloister.privacy.keyfile",
    "settle": "cloister.privacy.settings",
    "settle_front": "cloister.privacy.settings",
}


def __getattr__(name: str) -> object:
    # lazy: `hardening` lies in this package and has to run before any library is loaded
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
