"""`/metrics` for Prometheus, its history as JSON, and per-tenant metrics for operators."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.policy.policy import Use
from cloister.server.metrics import CONTENT_TYPE, RecordedMetrics
from cloister.server.state import admission_of, json_response, state_of
from cloister.types.errors import NotFoundError

router = APIRouter()


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
