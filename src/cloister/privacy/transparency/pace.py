"""How fast epochs follow each other, counted from the log alone. No I/O, no clock.

Epochs in short succession tell clients apart: each is public, and each is handed to somebody else, whose requests are then
known by the gateway's key in it. So clients hold a gateway to a rate, by the generic cell rate algorithm (ITU-T I.371): a few
may come at once, for a gateway that starts anew needs two, and then one in `EPOCH_EVERY_S`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta, Struct

from cloister.privacy.transparency.epoch import Count, Epoch

EPOCH_EVERY_S = 60
"""Our gateway rests as long between two (`sealed.epochs`)."""
GATEWAY_KEYS_EVERY_S = 3600
"""A gateway's key lives for a day, but in memory only: one that is restarted has another."""
BURST = 5
"""So many may come at once, of either."""


class Pace(Struct, frozen=True, forbid_unknown_fields=True):
    """What is left of both rates after the epochs that were read.

    Attributes:
        begun: the latest time at which one of the epochs begins, Unix seconds.
        epochs_due, keys_due: when both rates are full again, Unix seconds.
        gateway: SHA-256 of the gateway's keys in it, in hex.
        keys_from: when these keys would have been within their rate, Unix seconds.
        excess: why the newest epoch is over a rate; empty if it is not.
    """

    begun: Count = 0
    epochs_due: Count = 0
    keys_due: Count = 0
    gateway: Annotated[str, Meta(max_length=64)] = ""
    keys_from: Count = 0
    excess: Annotated[str, Meta(max_length=200)] = ""

    def after(self, epoch: Epoch) -> Pace:
        """Returns the pace with one more epoch of the log.

        An epoch counts as no older than those before it: one that is dated back would else give both rates all their room
        again, for the real one that follows it.
        """
        at, gateway = max(epoch.not_before, self.begun), hashlib.sha256(epoch.gateway.keys).hexdigest()
        epochs_due, epochs_from = _count(self.epochs_due, at, EPOCH_EVERY_S)
        keys_due, keys_from = self.keys_due, self.keys_from
        if gateway != self.gateway:
            keys_due, keys_from = _count(self.keys_due, at, GATEWAY_KEYS_EVERY_S)
        excess = ""
        if epoch.not_before < self.begun:
            excess = "it begins before the one that it follows"
        elif at < epochs_from:
            excess = f"more than {BURST} epochs came faster than one in {EPOCH_EVERY_S} s"
        elif at < keys_from:
            excess = f"the gateway changed its keys more than {BURST} times, faster than once in {GATEWAY_KEYS_EVERY_S} s"
        return Pace(at, epochs_due, keys_due, gateway, keys_from, excess)


def _count(due: int, at: int, every_s: int) -> tuple[int, int]:
    """Returns when the rate is full again, and when this one is within it: now, or up to `every_s` later."""
    due = max(due, at) + every_s
    most = at + BURST * every_s
    return min(due, most), at + max(due - most, 0)
