"""`/health`: good while steps advance or nothing waits (rule 11). The one route that needs no key."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cloister import __version__
from cloister.server.errors import error_headers
from cloister.server.front import front_of, json_response
from cloister.types.errors import EngineError

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def report_health(request: Request) -> Response:
    """Answers 200 or 503. Says no more than that: who asks need not be known."""
    if front_of(request).engine.health().good:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable"}, 503, error_headers(EngineError("")))


# `/version`.


class Version(msgspec.Struct, frozen=True):
    """Reply of /version."""

    version: str


VERSION: Final = Version(__version__)


@router.get("/version")
async def report_version() -> Response:
    """Returns the version of Cloister that answers."""
    return json_response(VERSION)
