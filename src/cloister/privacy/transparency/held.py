"""Which memberships held within the last day, and how much of them another one keeps. No I/O, no clock.

A day's change is bounded against every membership that held within that day, its beginning included: against a single one, two
steps around the moment at which that one is replaced would be taken for one each.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from cloister.privacy.transparency.epoch import Count
from cloister.privacy.transparency.membership import Membership

DAY_S: Final = 86400
MOST_HELD: Final = 16
"""Memberships of one day that are remembered; with more of them the day's change is not known any more."""


class Held(Struct, frozen=True, forbid_unknown_fields=True):
    """A membership that held.

    Attributes:
        membership: what it says.
        since_s: when it was first seen to hold, Unix seconds.
    """

    membership: Membership
    since_s: Count


Past = Annotated[tuple[Held, ...], Meta(max_length=MOST_HELD)]
"""Oldest first: the one that held a day ago (or the first that was seen), and all that held since."""


def held_within_a_day(past: Past, at: int) -> Past:
    """Returns the part of the past that a membership at a time, Unix seconds, is held against."""
    older = [index for index, held in enumerate(past) if held.since_s <= at - DAY_S]
    return past[older[-1] :] if older else past


def least_kept(past: Past, membership: Membership) -> tuple[float, Membership]:
    """Returns what part of its capacity a membership keeps of the one of which it keeps least, and that one.

    Args:
        past: one at least.
    """
    shares = [
        (membership.kept_of(held.membership) / max(held.membership.capacity, membership.capacity), held.membership)
        for held in past
    ]
    return min(shares, key=lambda share: share[0])


def add_held(past: Past, membership: Membership, at: int) -> Past:
    """Returns the past with a membership that holds at a time, Unix seconds; the oldest stays where there are too many."""
    if past and past[-1].membership == membership:
        return past
    return (*past[:1], *past[1:][-(MOST_HELD - 2) :], Held(membership, at))


def adopt_baseline(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a state file; those of an earlier version, which remembered one membership, as they are now."""
    if "baseline" not in fields:
        return fields
    rest = {name: value for name, value in fields.items() if name not in ("baseline", "baseline_s")}
    baseline, since_s = fields["baseline"], fields.get("baseline_s", 0)
    return {**rest, "past": [] if baseline is None else [{"membership": baseline, "since_s": since_s}]}
