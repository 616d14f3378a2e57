"""Errors as clients of the Messages API read them: {"type": "error", "error": {type, message}}."""

from __future__ import annotations

from typing import Any, Final

PREFIX: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_object(status: int, message: str) -> dict[str, Any]:
    """Returns the body of an error reply."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
