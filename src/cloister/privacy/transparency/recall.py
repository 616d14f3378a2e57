"""An epoch that was believed once, checked again later from its bundle alone. No I/O, no clock.

What a client compares with what it remembers of the log, or reads in it, is not checked here: that the log was not rewritten
since, that the release was not revoked later, and which nodes belonged to the cloud. The witnesses' signatures stand for the
first.
"""

from __future__ import annotations

from cloister.privacy.transparency.bundle import parse_bundle
from cloister.privacy.transparency.checkpoint import open_checkpoint
from cloister.privacy.transparency.checks import Logged, View, check_inclusion, check_release
from cloister.privacy.transparency.epoch import check_epoch
from cloister.privacy.transparency.note import cosigned_at
from cloister.privacy.transparency.refusal import Reason, TransparencyError
from cloister.privacy.transparency.trust import Trust


def recall(data: bytes, trust: Trust) -> tuple[Logged, float]:
    """Returns what clients believed, and the first moment at which they could (Unix seconds): enough witnesses had cosigned.

    Raises:
        TransparencyError: no client that trusts these keys can ever have believed it.
    """
    bundle = parse_bundle(data)
    epoch = bundle.epoch
    check_epoch(epoch)
    _, note = open_checkpoint(bundle.checkpoint, trust.log)
    times = sorted(cosigned_at(note, trust.witnesses).values())
    moment = float(max([epoch.not_before, *times[: trust.threshold]]))
    checkpoint, _ = trust.open_checkpoint(bundle.checkpoint, moment)
    if moment >= epoch.not_after:
        raise TransparencyError(Reason.EXPIRED, "the epoch was over before enough witnesses had cosigned it")
    check_inclusion(bundle, checkpoint)
    if epoch.profile not in trust.profiles:
        raise TransparencyError(Reason.UNKNOWN_PROFILE, f"the nodes ran under the profile {epoch.profile}, which is not taken")
    release = check_release(bundle, trust, View())
    return Logged(epoch, release, checkpoint, bundle.checkpoint), moment
