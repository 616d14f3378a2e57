"""`/v1/pdf/text`: the text layer of a PDF file, for the page and other clients."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloister.policy import Admission
from cloister.server.errors import invalid
from cloister.server.files.service import read_form
from cloister.server.route_table import RouteTable
from cloister.server.schemas import Strict
from cloister.server.state import ServerState, admission_of, json_response, state_of
from cloister.types.errors import NotFoundError

router = RouteTable()


class PdfForm(Strict):
    """Parts of the form of /v1/pdf/text."""

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]


class PdfText(msgspec.Struct, frozen=True):
    """Reply of /v1/pdf/text."""

    pages: int
    text: str
    object: Literal["pdf.text"] = "pdf.text"


@router.post("/v1/pdf/text")
async def read_pdf(request: Request) -> Response:
    """Returns the text layer of a PDF file, and keeps nothing of it.

    Raises:
        NotFoundError: this server does not read PDF files.
        InvalidRequestError: no text can be extracted; the message says why.
    """
    state = state_of(request)
    if state.pdf is None:
        raise NotFoundError(
            "A sealed node cannot read PDF files: that takes a process, and its worker may not start one. Turn it into "
            "text first, for example with pdftotext.",
            code="no_pdf_reader",
        )
    parts = await state.off_the_loop(read_form, request.headers.get("content-type", ""), await request.body())
    if "file" not in parts:
        raise invalid("The form must have the part `file`.", "file", "invalid_form")
    answer = await state.pdf.read(parts["file"].data, _owner(state, admission_of(request)))
    return json_response(PdfText(answer.num_pages, answer.text))


def _owner(state: ServerState, admission: Admission) -> bytes | None:
    """Returns the owner for per-tenant limits; None on a single-user server, or if callers cannot be distinguished."""
    gate = state.reader.gate
    if not gate.asks_for_keys:
        return None
    return admission.owner or (admission.tenant.encode() if gate.policy.names_tenants else None)
