"""Health and metrics: `/health` (progress; unauthenticated), `/ping`, `/version`, `/load`, `/metrics` and related routes."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cloister import __version__
from cloister.policy.policy import Use
from cloister.server.errors import error_headers
from cloister.server.metrics import CONTENT_TYPE, RecordedMetrics
from cloister.server.route_table import RouteTable
from cloister.server.state import ServerState, admission_of, json_response, state_of
from cloister.types.errors import EngineError, NotFoundError, PolicyError

router = RouteTable()


@router.route("/health", ["GET", "HEAD"])
@router.route("/ping", ["GET", "POST"])
async def report_health(request: Request) -> Response:
    """Replies 200 or 503 without details, because requests are unauthenticated."""
    health = state_of(request).engine.health()
    if health.good:
        status = "starting" if health.is_starting else "idle" if health.is_idle else "ok"
        return JSONResponse({"status": status})
    return JSONResponse({"status": "unavailable"}, 503, error_headers(EngineError("")))


class Version(msgspec.Struct, frozen=True):
    """Reply of /version."""

    version: str


VERSION: Final = Version(__version__)


@router.get("/version")
async def report_version() -> Response:
    """Returns the version of Cloister that answers."""
    return json_response(VERSION)


class Load(msgspec.Struct, frozen=True):
    """Reply of /load: requests that run in the engine or wait for it."""

    server_load: int


@router.get("/load")
async def report_load(request: Request) -> Response:
    """Returns the number of running requests, if the profile permits counting single ones."""
    state = _check_reader(request)
    policy = state.reader.gate.policy
    if policy.counts_only:
        raise PolicyError(
            f"{policy.ruling('request-log').rule}: the profile {policy.profile.value!r} gives sums over many requests only; "
            "/metrics has them."
        )
    return json_response(Load(state.calls.num_at_work))


@router.get("/metrics")
async def report_metrics(request: Request) -> Response:
    """Returns the metrics that the profile permits.

    Raises:
        PolicyError: as `_check_reader`.
    """
    state = _check_reader(request)
    for_operator = admission_of(request).is_operator
    return Response(state.metrics.render(for_operator=for_operator), media_type=CONTENT_TYPE)


def _check_reader(request: Request) -> ServerState:
    """Returns the server's state.

    Raises:
        PolicyError: there are tenants, the figures change with the requests of each of them, and the requester is not an
            operator. Sums over many requests do so too: a client that sends all but one of them learns the size of that one.
    """
    state = state_of(request)
    gate = state.reader.gate
    if gate.asks_for_keys:
        gate.check_operator(admission_of(request))
    return state


@router.get("/metrics/history")
async def report_history(request: Request) -> Response:
    """Returns the metrics of the last day.

    Raises:
        PolicyError: the profile permits no metrics over time, so none are recorded; or as `_check_reader`.
    """
    state = _check_reader(request)
    state.reader.gate.policy.check({"metrics-history": Use(True, "the request")})
    assert isinstance(state.metrics, RecordedMetrics)
    return json_response(state.metrics.report())


@router.get("/metrics/tenants")
async def report_tenants(request: Request) -> Response:
    """Returns each tenant's usage since the start, and its open requests.

    Raises:
        PolicyError: the profile does not distinguish tenants, or the requester is not an operator.
        NotFoundError: the server requires no keys, so there are no tenants.
    """
    state = state_of(request)
    state.reader.gate.policy.check({"tenant-figures": Use(True, "the request")})
    state.reader.gate.check_operator(admission_of(request))
    if state.calls.tenants is None:
        raise NotFoundError("This server uses no API keys, so it knows no tenants.", code="no_tenants")
    return json_response(state.calls.tenants.report())
