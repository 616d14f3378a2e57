"""A client's limits on the cloud's membership and its changes. Pure: no I/O, no clock.

A signed and logged membership is public, but may still be harmful: an attacker who can omit nodes, give one of them most of the
capacity, or replace all of them within hours, chooses where requests go. Hence these limits. A user who knows why a limit is
exceeded can raise it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from cloister.trust.transparency.checks import VerifiedEpoch, View
from cloister.trust.transparency.membership import MOST_HELD, Membership, add_held, held_within_a_day, least_kept
from cloister.trust.transparency.note import cosigned_at, parse_note
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.trust import Trust
from cloister.types.errors import ConfigError

LATE_S: Final = 180
"""Latest cosigning of an epoch after its start, in seconds: backdated starts would hide how fast epochs were made. A gateway
gives up on its witnesses after two minutes (`publisher.WAIT_S`)."""
EARLY_S: Final = 60
"""Earliest cosigning before its start: future starts permit more epochs at once, as do those in the past."""
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that a user may change.

    Attributes:
        least_present: minimum fraction of the membership's capacity that the epoch must name, 0 to 1.
        most_share: largest fraction of the membership's capacity that one node may have, above 0, at most 1.
        most_change: largest fraction of the capacity that may be removed, added or replaced within a day, 0 to 1.
        accept_membership: number of a membership that is accepted regardless of its changes; 0 for none.
        accept_masked_chips: whether several nodes may be on hardware whose evidence does not identify the processor; two of
            them could share one.
    """

    least_present: float = 0.66
    most_share: float = 0.5
    most_change: float = 0.5
    accept_membership: int = 0
    accept_masked_chips: bool = False

    def __post_init__(self) -> None:
        for name in ("least_present", "most_share", "most_change"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is a part of the capacity, between 0 and 1", param=name)


def hold_to_limits(limits: Limits, believed: VerifiedEpoch, trust: Trust) -> View:
    """Checks a verified epoch against the limits.

    Args:
        believed: its view has the stored state, and the entries since then.

    Returns:
        The new state to store.

    Raises:
        TransparencyError: a limit is exceeded; nothing may be sent, and the message says what to do.
    """
    _check_pace(believed, trust)
    _check_share(limits, believed.membership)
    _check_present(limits, believed)
    return _check_change(limits, believed)


def _check_pace(believed: VerifiedEpoch, trust: Trust) -> None:
    if believed.view.pace.excess:
        raise TransparencyError(
            Reason.TOO_FAST,
            f"epochs follow each other too fast to be the same for everybody: {believed.view.pace.excess}; ask again in some "
            "minutes, and ask who runs the gateway if it lasts",
        )
    times = sorted(cosigned_at(parse_note(believed.note), trust.witnesses).values())
    late_s = times[trust.threshold - 1] - believed.epoch.not_before
    if late_s > LATE_S:
        raise TransparencyError(
            Reason.TOO_LATE,
            f"the epoch was cosigned {late_s} s after it began, {LATE_S} s are the most: it could have been made for you; ask "
            "again in some minutes",
        )
    if late_s < -EARLY_S:
        raise TransparencyError(
            Reason.TOO_EARLY,
            f"the epoch was cosigned {-late_s} s before it begins, {EARLY_S} s are the most: with times to come more of them "
            "fit into a moment; ask again in some minutes",
        )


def _check_share(limits: Limits, membership: Membership) -> None:
    largest = max(membership.members, key=lambda member: member.capacity)
    share = largest.capacity / membership.capacity
    if share > limits.most_share + _ROUNDING:
        raise TransparencyError(
            Reason.SHARE_TOO_LARGE,
            f"the node {largest.name} has {share:.0%} of the capacity, and so would read that part of everybody's requests; "
            f"this client takes {limits.most_share:.0%}. If you know why, give most_share (--most-share {_round_up(share)})",
        )


def _check_present(limits: Limits, believed: VerifiedEpoch) -> None:
    present = believed.epoch.capacity / believed.membership.capacity
    if present < limits.least_present - _ROUNDING:
        names = {node.member for node in believed.epoch.nodes}
        absent = [member.name for member in believed.membership.members if member.name not in names]
        raise TransparencyError(
            Reason.TOO_FEW_PRESENT,
            f"the gateway names nodes with {present:.0%} of the capacity of membership {believed.membership.number}, and "
            f"leaves out {', '.join(absent[:5])}{' and others' if len(absent) > 5 else ''}; this client asks for "
            f"{limits.least_present:.0%}. Ask again later; if those nodes are gone for good, a release key has to sign a "
            "membership without them. If you know why, give least_present (--least-present)",
        )


def _check_change(limits: Limits, believed: VerifiedEpoch) -> View:
    view, membership, now = believed.view, believed.membership, believed.epoch.not_before
    past = held_within_a_day(view.past, now)
    if past and membership.number > limits.accept_membership:
        how_to_take = (
            "Ask who signs memberships; if the change is right, take it with "
            f"accept_membership={membership.number} (--accept-membership {membership.number})"
        )
        kept, earlier = least_kept(past, membership)
        if kept < 1.0 - limits.most_change - _ROUNDING:
            raise TransparencyError(
                Reason.MEMBERSHIP_CHANGED,
                f"of the nodes that were there in membership {earlier.number}, membership {membership.number} keeps "
                f"{kept:.0%} by capacity; this client asks for {1.0 - limits.most_change:.0%} within a day. {how_to_take}",
            )
        if len(past) == MOST_HELD and past[-1].membership != membership:
            raise TransparencyError(
                Reason.MEMBERSHIP_CHANGED,
                f"membership {membership.number} is one more than the {MOST_HELD} that this client remembers of one day. "
                f"{how_to_take}, or wait",
            )
    if past and past[0].membership.number < membership.number <= limits.accept_membership:
        past = ()
    return msgspec.structs.replace(view, past=add_held(past, membership, now))


def _round_up(share: float) -> str:
    return f"{min(1.0, share + 0.005):.2f}"
