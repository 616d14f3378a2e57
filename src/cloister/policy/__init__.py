"""Admission, privacy profiles and quotas.

`apply_profile` turns settings into a `Policy`, and a `Gate` admits each request under it. `CountRelease` publishes metrics
where the profile allows counts only. No I/O, except `read_credentials` and the other functions of `keyfile`.
"""

from cloister.policy.counts import ALLOWED_COUNTS, PROFILING_THREAT, CountRelease
from cloister.policy.credentials import Credential, Credentials
from cloister.policy.gate import Admission, Gate
from cloister.policy.keyfile import read_credentials
from cloister.policy.matrix import Entry, gather
from cloister.policy.policy import Policy, Use
from cloister.policy.profile import default_profile, is_loopback
from cloister.policy.quotas import Account, Charge, KeyQuota
from cloister.policy.settings import apply_profile, apply_profile_to_front
from cloister.policy.verdict import Profile, Ruling, Verdict

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
    "apply_profile",
    "apply_profile_to_front",
    "default_profile",
    "gather",
    "is_loopback",
    "read_credentials",
]
