"""`/v1/cache`: a client sees and drops what is cached of its own scope."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister.policy import Use
from cloister.server.errors import invalid
from cloister.server.prompt_schemas import SCHEMAS
from cloister.server.route_table import RouteTable
from cloister.server.schemas import MAX_CACHE_SALT
from cloister.server.state import admission_of, json_response, state_of
from cloister.types.errors import EngineError
from cloister.types.events import CacheUsage
from cloister.types.scope import ScopeKind

NO_ANSWER: Final = (
    "no engine reported in time what it has cached; ask again in a few seconds. What was to be dropped is dropped "
    "before the next request is read, or ended with its engine"
)

router = RouteTable()


class CacheContent(msgspec.Struct, frozen=True):
    """Reply of /v1/cache: the cached KV of the requester's scope, or what was just dropped.

    Attributes:
        scope: what the scope is bound to: a tenant, this machine, a session, or one request, of which nothing is kept.
        data: for each place: the device, and the tier if there is one. Of all replicas together.
        unanswered: replicas that did not answer in time; their KV is not counted.
    """

    scope: ScopeKind
    data: list[CacheUsage]
    unanswered: list[int]
    object: Literal["cache", "cache.deleted"]


@router.get("/v1/cache")
async def show_cache(request: Request) -> Response:
    """Returns what is cached of the requester's scope."""
    return await _answer(request, drop=False)


@router.delete("/v1/cache")
async def drop_cache(request: Request) -> Response:
    """Drops the cached KV of the requester's scope, and its schemas of prompts; returns how much KV that was."""
    return await _answer(request, drop=True)


async def _answer(request: Request, *, drop: bool) -> Response:
    state, admission = state_of(request), admission_of(request)
    gate = state.reader.gate
    gate.policy.check({"cache-report": Use(True, "the request")})
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        raise invalid("This route takes no body; give `cache_salt` in the query.", None, "invalid_value")
    salt = _read_salt(request)
    scope = gate.with_request_options(admission, cache_salt=salt).scope
    if drop and salt is None and state.reader.responses is not None and admission.owner is not None:
        state.reader.responses.forget(admission.owner, SCHEMAS)
    kind: Literal["cache", "cache.deleted"] = "cache.deleted" if drop else "cache"
    if scope.kind is ScopeKind.REQUEST:  # nobody can name that scope again, so no engine keeps anything of it
        return json_response(CacheContent(scope.kind, [], [], kind))
    report = await state.engine.inspect_cache(scope, drop=drop)
    if report.unanswered and not report.places:
        raise EngineError(NO_ANSWER)
    return json_response(CacheContent(scope.kind, report.places, report.unanswered, kind))


def _read_salt(request: Request) -> str | None:
    """Returns the salt of the query. Anything else there could be a mistyped salt, without which more would be dropped."""
    if set(request.query_params) - {"cache_salt"}:
        message = "This route has one query parameter, `cache_salt`; leave the others out."
        raise invalid(message, "cache_salt", "unknown_parameter")
    salts = request.query_params.getlist("cache_salt")
    if len(salts) > 1:
        raise invalid("Give `cache_salt` once.", "cache_salt", "invalid_value")
    salt = salts[0] if salts else None
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT:
        raise invalid(f"`cache_salt` has 1 to {MAX_CACHE_SALT} characters.", "cache_salt", "invalid_value")
    return salt
