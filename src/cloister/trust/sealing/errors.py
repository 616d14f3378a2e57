"""Errors while opening a message: a single error for everything that depends on a key."""

from __future__ import annotations

from cloister.types.errors import CloisterError, ConfigError


class UnsealError(CloisterError):
    """A sealed message cannot be opened.

    Unknown key, replay, wrong tag, truncated or reordered chunks all give this error with the same text and without a chained
    exception, so that an attacker learns nothing from manipulated messages.
    """

    code = "unsealing_failed"
    status = 400

    def __init__(self) -> None:
        super().__init__("The message cannot be opened; take the current key configuration and seal it anew.")


class MessageError(CloisterError):
    """The opened message is not valid binary HTTP (RFC 9292, section 4)."""

    code = "invalid_binary_http"
    status = 400


class ReplayCacheFullError(CloisterError):
    """The replay cache is full, so a further message could not be recognised again; none is accepted."""

    code = "too_many_messages"
    status = 503


class KeyConfigurationError(ConfigError):
    """A key configuration is malformed, or offers no supported algorithm."""
