"""`/version`."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from cloister import __version__
from cloister.server.state import json_response

router = APIRouter()


class Version(msgspec.Struct, frozen=True):
    """Reply of /version."""

    version: str


VERSION: Final = Version(__version__)


@router.get("/version")
async def report_version() -> Response:
    """Returns the version of Cloister that answers."""
    return json_response(VERSION)
