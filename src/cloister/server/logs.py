"""The request log: one line per request, with counts and times and no content; and the log of internal errors."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import Final

from cloister.server.calls import HttpCall
from cloister.server.errors import INTERNAL
from cloister.types.errors import CloisterError
from cloister.types.logs import FIELDS

REQUESTS: Final = logging.getLogger("cloister.requests")
QUIET_ROUTES: Final = frozenset({"/health", "/ping", "/metrics", "/page/{digest}/{name}"})
"""Routes polled by machines, or fetched in bulk by a browser: they are logged only on failure."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class RequestLog:
    """Logs finished calls.

    Args:
        shows_clients: whether lines include the client's address.
    """

    def __init__(self, *, shows_clients: bool = False) -> None:
        self._shows_clients = shows_clients

    def write(self, call: HttpCall) -> None:
        """Logs one call."""
        if call.route in QUIET_ROUTES and call.status < 400:
            return
        fields = line_of(call)
        if self._shows_clients and call.client is not None:
            fields["client"] = call.client
        REQUESTS.info("request", extra=fields)


def line_of(call: HttpCall) -> dict[str, object]:
    """Returns the fields of a call's line, all of them on the list of fields that may be logged."""
    fields: dict[str, object] = {
        "request_id": call.call_id,
        "method": method_of(call),
        "route": call.route,
        "status": call.status,
        "duration_s": round((call.ended_s or call.began_s) - call.began_s, 6),
    }
    if call.engine_stats:
        fields |= _work_of(call)
    assert fields.keys() <= set(FIELDS)
    return fields


def method_of(call: HttpCall) -> str:
    """Returns the method if it is a known one: it is client input too."""
    return call.method if call.method in _METHODS else "other"


def _work_of(call: HttpCall) -> dict[str, object]:
    engine_stats = list(call.engine_stats.values())
    fields: dict[str, object] = {
        "num_prompts": len(engine_stats),
        "num_prompt_tokens": call.sum(lambda stats: stats.num_prompt_tokens),
        "num_cached_tokens": call.sum(lambda stats: stats.num_cached_tokens),
        "num_output_tokens": call.sum(lambda stats: stats.num_output_tokens),
        "num_preemptions": call.sum(lambda stats: len(stats.preempted_s)),
        "finish_reasons": [reason for stats in engine_stats for reason in stats.reasons],
    }
    if replicas := [index for stats in engine_stats for index in stats.replicas]:
        fields["replicas"] = list(dict.fromkeys(replicas))
    queued = [w.scheduled_s - w.arrival_s for w in engine_stats if w.scheduled_s is not None and w.arrival_s is not None]
    first = [stats.first_token_s for stats in engine_stats if stats.first_token_s is not None]
    if queued:
        fields["queue_s"] = round(max(queued), 6)
    if first:
        fields["first_token_s"] = round(min(first) - call.began_s, 6)
    return fields


# The log of internal errors: type and code location, never an exception's text.


FAILURES: Final = logging.getLogger("cloister.server")
STORAGE_CODES: Final = frozenset({"damaged_file", "storage_failed"})
"""Errors with the status 500 whose message is meant for clients."""


def log_failure(error: BaseException) -> None:
    """Logs the type and code locations of an unexpected exception. Its text could contain user content."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    FAILURES.error("unexpected %s at %s", type(error).__name__, places or "no known place")


def public_error(error: Exception) -> CloisterError:
    """Returns the error to show to a client: errors meant for clients unchanged, others as an internal error. Errors with the
    status 500 are logged."""
    if isinstance(error, CloisterError) and error.status != CloisterError.status:
        return error
    log_failure(error)
    return error if isinstance(error, CloisterError) and error.code in STORAGE_CODES else INTERNAL
