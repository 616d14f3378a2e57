"""How the server is: `/health` (progress; without a key), `/ping`, `/version`, `/load`, `/metrics` and what belongs to them."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cloister import __version__
from cloister.policy.policy import Use
from cloister.server.errors import error_headers
from cloister.server.metrics import CONTENT_TYPE, RecordedMetrics
from cloister.server.state import admission_of, json_response, state_of
from cloister.types.errors import EngineError, NotFoundError, PolicyError

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def report_health(request: Request) -> Response:
    """Answers 200 or 503. Says no more than that: who asks need not be known."""
    if state_of(request).engine.health().good:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable"}, 503, error_headers(EngineError("")))


router.add_api_route("/ping", report_health, methods=["GET", "POST"])


class Version(msgspec.Struct, frozen=True):
    """Reply of /version."""

    version: str


VERSION: Final = Version(__version__)


@router.get("/version")
async def report_version() -> Response:
    """Returns the version of Cloister that answers."""
    return json_response(VERSION)


class Load(msgspec.Struct, frozen=True):
    """Reply of /load: requests that the engine works on or that wait for it."""

    server_load: int


@router.get("/load")
async def report_load(request: Request) -> Response:
    """Says how many requests are at work, where the profile lets single ones be counted."""
    state = state_of(request)
    policy = state.reader.gate.policy
    if policy.counts_only:
        raise PolicyError(
            f"{policy.ruling('request-log').rule}: the profile {policy.profile.value!r} tells sums over many requests only; "
            "/metrics has them."
        )
    return json_response(Load(state.calls.num_at_work))


@router.get("/metrics")
async def report_metrics(request: Request) -> Response:
    """Returns what the profile lets an operator see."""
    return Response(state_of(request).metrics.render(), media_type=CONTENT_TYPE)


@router.get("/metrics/history")
async def report_history(request: Request) -> Response:
    """Returns the figures of the last day.

    Raises:
        PolicyError: the profile lets out no figures of times, so none are kept.
    """
    state = state_of(request)
    state.reader.gate.policy.check({"metrics-history": Use(True, "the request")})
    assert isinstance(state.metrics, RecordedMetrics)
    return json_response(state.metrics.report())


@router.get("/metrics/tenants")
async def report_tenants(request: Request) -> Response:
    """Returns what each tenant did since the start and has open.

    Raises:
        PolicyError: the profile tells no tenants apart, or whoever asks is no operator.
        NotFoundError: the server asks for no keys, so there are no tenants.
    """
    state = state_of(request)
    state.reader.gate.policy.check({"tenant-figures": Use(True, "the request")})
    state.reader.gate.check_operator(admission_of(request))
    if state.calls.tenants is None:
        raise NotFoundError("This server asks for no API keys, so it knows of no tenants.", code="no_tenants")
    return json_response(state.calls.tenants.report())
