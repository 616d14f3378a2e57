"""`/v1/prompt_schemas`: a tenant's schemas of prompts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloister.policy import Use
from cloister.server.parse import parse_body
from cloister.server.prompt_schemas import (
    NO_SCHEMAS,
    DeletedPromptSchema,
    PromptSchemaBody,
    check_placing,
    keep_schema,
    lay_out_schema,
    remove_schema,
)
from cloister.server.route_table import RouteTable
from cloister.server.state import admission_of, json_response, state_of
from cloister.types.errors import NotFoundError

router = RouteTable()


@router.post("/v1/prompt_schemas")
async def create_prompt_schema(request: Request) -> Response:
    """Keeps a schema for its sender, and returns where its modules stand."""
    state, owner = state_of(request), admission_of(request).owner
    reader = state.reader
    reader.gate.policy.check({"documents": Use(True, "the request")})
    body = await state.off_the_loop(parse_body, await request.body(), PromptSchemaBody)
    if reader.responses is None or owner is None:
        raise NotFoundError(NO_SCHEMAS)
    check_placing(reader.model)
    layout = await state.off_the_loop(lay_out_schema, body, reader.tokenizer, reader.model)
    keep_schema(reader.responses, owner, body)
    return json_response(layout.describe(body.name))


@router.delete("/v1/prompt_schemas/{name}")
async def delete_prompt_schema(request: Request, name: str) -> Response:
    """Forgets a schema."""
    remove_schema(state_of(request).reader.responses, admission_of(request).owner, name)
    return json_response(DeletedPromptSchema(name))
