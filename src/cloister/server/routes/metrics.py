"""`/metrics` in the text format of Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.front import front_of
from cloister.server.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def report_metrics(request: Request) -> Response:
    """Returns what the profile lets an operator see."""
    return Response(front_of(request).metrics.render(), media_type=CONTENT_TYPE)
