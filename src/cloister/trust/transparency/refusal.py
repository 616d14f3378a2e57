"""Errors about data that must be public and equal for all clients."""

from __future__ import annotations

from enum import StrEnum

from cloister.types.errors import CloisterError


class Reason(StrEnum):
    """The error as a slug for programs; its message describes it."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    NOT_CANONICAL = "not_canonical"
    NOT_YET_VALID = "epoch_not_yet_valid"
    EXPIRED = "epoch_expired"
    OUT_OF_ORDER = "epoch_out_of_order"
    NOT_NEWEST = "epoch_not_newest"
    UNKNOWN_PROFILE = "unknown_profile"
    OTHER_LOG = "other_log"
    BAD_LOG_SIGNATURE = "bad_log_signature"
    BAD_SIGNATURE = "bad_signature"
    TOO_FEW_WITNESSES = "too_few_witnesses"
    STALE_CHECKPOINT = "stale_checkpoint"
    FUTURE_CHECKPOINT = "checkpoint_from_the_future"
    NOT_INCLUDED = "not_included"
    NOT_CONSISTENT = "not_consistent"
    ROLLED_BACK = "log_rolled_back"
    SPLIT_VIEW = "split_view"
    WRONG_RELEASE = "wrong_release"
    REVOKED = "release_revoked"
    HIDDEN_MINIMUM = "hidden_minimum_release"
    NO_MEMBERSHIP = "no_membership"
    NOT_A_MEMBER = "not_a_member"
    WRONG_CAPACITY = "wrong_capacity"
    TOO_FEW_PRESENT = "too_few_nodes_present"
    SHARE_TOO_LARGE = "share_too_large"
    MEMBERSHIP_CHANGED = "membership_changed"
    TOO_FAST = "epochs_too_fast"
    TOO_LATE = "epoch_too_late"
    TOO_EARLY = "epoch_too_early"


class TransparencyError(CloisterError):
    """A log, a checkpoint, an epoch or a release is invalid; `reason` is the violated rule.

    A client then sends nothing: it may be a dishonest operator.

    Attributes:
        reason: the rule.
        evidence: two contradictory signed checkpoints, if any.
    """

    code = "not_transparent"
    status = 502

    def __init__(self, reason: Reason, message: str, evidence: tuple[str, ...] = ()) -> None:
        super().__init__(message, code=f"{self.code}.{reason}")
        self.reason = reason
        self.evidence = evidence
