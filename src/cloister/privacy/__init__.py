"""Who may ask, what may be switched on, and what may be kept.

`settle` turns settings into a `Policy`, a `Gate` admits each request under it, `CountRelease` is what metrics leave through
where the profile allows counts only. Pure but for `read_credentials` and its neighbours in `keyfile`.
"""

from cloister.privacy.catalogue import Entry, gather
from cloister.privacy.counts import ALLOWED_COUNTS, PROFILING_THREAT, CountRelease
from cloister.privacy.credentials import Credential, Credentials
from cloister.privacy.features import RUNTIME_ADAPTERS_THREAT
from cloister.privacy.gate import Admission, Gate
from cloister.privacy.keyfile import read_credentials
from cloister.privacy.limits import Account, Charge, Limits
from cloister.privacy.policy import Policy, Use
from cloister.privacy.profile import default_profile, is_loopback
from cloister.privacy.settings import settle, settle_front
from cloister.privacy.verdict import Profile, Ruling, Verdict

__all__ = [
    "ALLOWED_COUNTS",
    "PROFILING_THREAT",
    "RUNTIME_ADAPTERS_THREAT",
    "Account",
    "Admission",
    "Charge",
    "CountRelease",
    "Credential",
    "Credentials",
    "Entry",
    "Gate",
    "Limits",
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
