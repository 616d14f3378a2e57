"""Errors in OpenAI's format, {"error": {message, type, code, param}}, with a status and no text of the request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cloister.policy.oidc import AccessTokenError
from cloister.types.errors import (
    AuthenticationError,
    CloisterError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RateLimitError,
)
from cloister.types.request import FinishReason, SequenceOutput

ENGINE_RETRY_S: Final = 2.0
"""Retry delay for an engine that is down; a restart of the embedded model takes about as long."""


class MethodError(CloisterError):
    """The route exists, the method does not."""

    code = "method_not_allowed"
    status = 405


class MediaTypeError(CloisterError):
    """The body is not declared as plain JSON."""

    code = "unsupported_media_type"
    status = 415


class BodyTimeoutError(CloisterError):
    """The body did not arrive in time."""

    code = "request_timeout"
    status = 408


class HostError(CloisterError):
    """A browser sent a request with a foreign host name (DNS rebinding)."""

    code = "host_not_allowed"
    status = 403


class OriginError(CloisterError):
    """A request from a web page whose origin the operator did not allow."""

    code = "origin_not_allowed"
    status = 403

    def __init__(self) -> None:
        super().__init__("Pages of this origin may not use this server; its operator can name it with --allowed-origins.")


class OverloadedError(CloisterError):
    """The front could not prepare the prompt in time; it is safe to send it again."""

    code = "overloaded"
    status = 503


UNSUPPORTED: Final = "unsupported_grammar"
TOO_LATE: Final = "The answer was not complete in time; ask for fewer tokens or try again."
INTERNAL: Final = CloisterError("The server made a mistake; it was logged without your data. Please try again.")


def error_type(status: int) -> str:
    """Returns the `type` that OpenAI clients expect with a status."""
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_object(error: CloisterError) -> dict[str, Any]:
    """Returns the body of an error reply."""
    fields = {"message": error.message, "type": error_type(error.status), "param": error.param, "code": error.code}
    return {"error": fields}


def error_body(error: CloisterError) -> bytes:
    """Returns `error_object` as JSON."""
    return msgspec.json.encode(error_object(error))


def error_headers(error: CloisterError) -> dict[str, str]:
    """Returns the headers of an error: when to try again (RFC 9110, 10.2.3), how to authenticate (11.6.1)."""
    if isinstance(error, QueueFullError | RateLimitError):
        return {"retry-after": str(math.ceil(error.retry_after_s))}
    if error.status == 503:
        return {"retry-after": str(math.ceil(ENGINE_RETRY_S))}
    if isinstance(error, AuthenticationError):
        reason = f' error="{error.code}"' if isinstance(error, AccessTokenError) else ""  # RFC 6750, 3
        return {"www-authenticate": f"Bearer{reason}"}
    return {}


def failure_of(output: SequenceOutput) -> CloisterError | None:
    """Returns the error of a sequence; None if it continues or ended with an answer."""
    match output.finish_reason:
        case None | FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.REJECTED:
            return ContextLengthError(output.error or "The request cannot run on this server; make it shorter.")
        case FinishReason.UNSUPPORTED:
            return InvalidRequestError(output.error or "The grammar cannot be followed; make it simpler.", code=UNSUPPORTED)
        case FinishReason.TIMEOUT:
            return DeadlineError(output.error or TOO_LATE)
        case FinishReason.ABORT:
            return EngineError(output.error or "The server is shutting down; send the request again in a moment.")
        case _:
            return EngineError(output.error or "The engine failed; it is safe to send the request again.")


def invalid(message: str, param: str | None = None, code: str | None = None) -> InvalidRequestError:
    """Returns a 400 that names the field at fault."""
    return InvalidRequestError(message, param=param, code=code)


_OWN: Final = "the operator decides what is served"

ABSENT: Final[Mapping[str, str]] = {
    "/v1/audio": "There is no speech here: models of this server read and write text only.",
    "/v1/images": "There are no images here: models of this server read and write text only.",
    "/v1/videos": "There are no videos here: models of this server read and write text only.",
    "/v1/realtime": "There are no realtime sessions here: send requests to /v1/responses or /v1/chat/completions.",
    "/v1/moderations": "This server does not moderate.",
    "/v1/fine_tuning": f"This server trains no models: {_OWN}.",
    "/v1/assistants": "There are no assistants here: send the conversation to /v1/responses or /v1/chat/completions.",
    "/v1/threads": "There are no threads here: send the conversation to /v1/responses or /v1/chat/completions.",
    "/v1/vector_stores": "There are no vector stores here: /v1/embeddings makes the vectors.",
    "/v1/fim": "There is no such route: /v1/completions takes `suffix`, /infill and /api/generate fill in too.",
    "/v1/uploads": "There are no uploads in parts here: send the whole file to /v1/files.",
    "/slots": "There are no slots to inspect: requests of others are private. /metrics has counts.",
    "/api/create": f"This server makes no models: {_OWN}.",
    "/api/copy": f"This server copies no models: {_OWN}.",
    "/api/delete": f"This server deletes no models: {_OWN}.",
    "/api/push": f"This server publishes no models: {_OWN}.",
    "/api/blobs": f"This server takes no files of models: {_OWN}.",
}
"""APIs of other servers that this one lacks: path prefix -> explanation."""


def explain_absence(path: str) -> str:
    """Returns the message for an unknown path."""
    found = next((why for folder, why in ABSENT.items() if f"{path}/".startswith(f"{folder}/")), None)
    return found or "There is no such route; the API begins with /v1."
