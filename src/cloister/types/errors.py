"""Errors shown to users and clients. Each says what to do; none repeats user input."""

from __future__ import annotations

import errno
from typing import Final

OUT_OF_MEMORY: Final = (
    "the system refuses this process more memory; free some, raise its limit (`ulimit -v`, or the container's), or choose a "
    "smaller model"
)
_REFUSALS: Final = ("failed to map segment", "annot allocate memory")
"""What glibc says of a shared library for which there is no memory (`_dl_map_segments` in elf/dl-map-segments.h)."""


class CloisterError(Exception):
    """Base of every error that Cloister raises on purpose.

    Attributes:
        message: one or two sentences: what happened and what to do; without user content.
        code: machine-readable slug, as in the OpenAI error object.
        param: the request field or setting at fault, if one is.
        status: the HTTP status that the server answers with.
        is_final: for an engine that did not start: no other start can succeed.
    """

    code = "internal_error"
    status = 500
    is_final = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(CloisterError):
    """The request itself is wrong; sending it again unchanged cannot work."""

    code = "invalid_request"
    status = 400


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit into the context window or the KV cache."""

    code = "context_length_exceeded"


class AuthenticationError(CloisterError):
    """The API key is missing or unknown."""

    code = "invalid_api_key"
    status = 401


class PolicyError(CloisterError):
    """The active profile refuses a feature; the message names the rule."""

    code = "refused_by_policy"
    status = 403


class NotFoundError(CloisterError):
    """There is no such model or route."""

    code = "not_found"
    status = 404


class RequestTooLargeError(CloisterError):
    """The body is larger than the server accepts."""

    code = "request_too_large"
    status = 413


class RetryLaterError(CloisterError):
    """The same request may be accepted later.

    Attributes:
        retry_after_s: when to try again, in seconds, at least 1.
    """

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = max(1.0, retry_after_s)


class QueueFullError(RetryLaterError):
    """The queue is full."""

    code = "queue_full"


class RateLimitError(RetryLaterError):
    """The limits of an API key are exhausted."""

    code = "rate_limit_exceeded"


class DeadlineError(CloisterError):
    """The request's deadline passed before its answer was complete."""

    code = "deadline_exceeded"
    status = 504


class EngineError(CloisterError):
    """The engine failed or died while it held the request; it is safe to send it again."""

    code = "engine_error"
    status = 503


class ModelError(CloisterError):
    """A model directory cannot be used: missing file, unknown architecture, wrong shape."""

    code = "model_error"


class ConfigError(CloisterError):
    """A setting is invalid or contradicts another one."""

    code = "config_error"


class MemoryBudgetError(ConfigError):
    """The configuration does not fit into memory; the message states a figure that does.

    Attributes:
        fit: memory that there is for an engine, over what it needs at least; None if it is not known.
    """

    code = "out_of_memory_budget"
    fit: float | None = None


def lacks_memory(error: BaseException) -> bool:
    """Whether the system refused memory: no sign of a damaged file, or of an installation that is wrong."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError):
        return any(words in str(error) for words in _REFUSALS)
    return isinstance(error, (MemoryError, MemoryBudgetError))


def describe_read_error(name: str, error: OSError) -> CloisterError:
    """Returns the error of a model's file that the system does not let this process read: no word of its content."""
    if lacks_memory(error):
        return MemoryBudgetError(f"{name} cannot be read: {OUT_OF_MEMORY}")
    return ModelError(f"{name} cannot be read: {error.strerror}; check the disk and who may read the file")


def recreate(message: str, code: str, fit: float | None = None) -> CloisterError:
    """Returns the error that another process raised, from its message and code, and `MemoryBudgetError.fit`."""
    kinds = (kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, CloisterError))
    found = next((kind for kind in kinds if kind.code == code and not issubclass(kind, RetryLaterError)), EngineError)
    error = found(message, code=code)
    if isinstance(error, MemoryBudgetError):
        error.fit = fit
    return error
