"""`/metrics` in the text format of Prometheus, and its past as JSON."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.privacy.policy import Use
from cloister.server.front import front_of, json_response
from cloister.server.metrics import CONTENT_TYPE, RecordedMetrics

router = APIRouter()


@router.get("/metrics")
async def report_metrics(request: Request) -> Response:
    """Returns what the profile lets an operator see."""
    return Response(front_of(request).metrics.render(), media_type=CONTENT_TYPE)


@router.get("/metrics/history")
async def report_history(request: Request) -> Response:
    """Returns the figures of the last day.

    Raises:
        PolicyError: the profile lets out no figures of times, so none are kept.
    """
    front = front_of(request)
    front.reader.gate.policy.check({"metrics-history": Use(True, "the request")})
    assert isinstance(front.metrics, RecordedMetrics)
    return json_response(front.metrics.report())
