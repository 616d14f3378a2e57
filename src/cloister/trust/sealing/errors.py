"""Errors while opening a message: a single kind for all that depends on a key."""

from __future__ import annotations

from cloister.types.errors import CloisterError, ConfigError


class UnsealError(CloisterError):
    """A sealed message cannot be opened.

    Unknown key, replay, wrong tag, chunks cut off or out of order: they are all this one error with these very words, and
    nothing is chained to it, so that who sends changed messages learns nothing from the difference.
    """

    code = "unsealing_failed"
    status = 400

    def __init__(self) -> None:
        super().__init__("The message cannot be opened; take the current key configuration and seal it anew.")


class MessageError(CloisterError):
    """What was sealed is no valid binary HTTP message (RFC 9292, section 4)."""

    code = "invalid_binary_http"
    status = 400


class ReplayCacheFullError(CloisterError):
    """So many messages came within the window that no further one could be recognised again; none is accepted."""

    code = "too_many_messages"
    status = 503


class KeyConfigurationError(ConfigError):
    """A key configuration is malformed, or offers nothing that this program implements."""
