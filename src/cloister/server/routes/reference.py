"""`/openapi.json` and `/docs`: the reference of the API, for programs and for people. They say nothing of anybody."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.front import front_of
from cloister.server.middleware.ignored import ignored_fields
from cloister.server.openapi import describe_api
from cloister.server.prompts import PromptReader
from cloister.server.reference import CONTENT_SECURITY, write_reference

router = APIRouter()

HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class Told:
    """What of a server its reference depends on."""

    model: str
    asks_for_keys: bool
    strict_fields: bool
    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_n: int

    @classmethod
    def of(cls, reader: PromptReader) -> Told:
        return cls(
            reader.model_name,
            reader.gate.asks_for_keys,
            ignored_fields().is_strict,
            reader.vocab_size,
            reader.model.hidden_size,
            reader.model.max_model_len,
            reader.max_n,
        )

    def describe(self) -> dict[str, Any]:
        """Returns the OpenAPI document."""
        figures = {name: getattr(self, name) for name in ("vocab_size", "hidden_size", "max_model_len", "max_n")}
        return describe_api(self.model, asks_for_keys=self.asks_for_keys, strict_fields=self.strict_fields, figures=figures)


@cache
def _as_json(told: Told) -> bytes:
    return msgspec.json.encode(told.describe())


@cache
def _as_page(told: Told) -> bytes:
    return write_reference(told.describe()).encode()


@router.get("/openapi.json")
async def report_api(request: Request) -> Response:
    """Returns the OpenAPI document."""
    front = front_of(request)
    body = await front.off_the_loop(_as_json, Told.of(front.reader))
    return Response(body, media_type="application/json")


@router.get("/docs")
async def show_reference(request: Request) -> Response:
    """Returns the document as a page."""
    front = front_of(request)
    body = await front.off_the_loop(_as_page, Told.of(front.reader))
    return Response(body, headers=HEADERS, media_type="text/html; charset=utf-8")
