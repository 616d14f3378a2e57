"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.state import json_response, state_of
from cloister.server.tokens import detokenize, tokenize, tokenizer_info

router = APIRouter()


@router.post("/tokenize")
async def create_tokens(request: Request) -> Response:
    """Returns the tokens of a text or a chat, as the model would read them."""
    state = state_of(request)
    return json_response(await state.off_the_loop(tokenize, state.reader, await request.body()))


@router.post("/detokenize")
async def create_text(request: Request) -> Response:
    """Returns the text of tokens."""
    state = state_of(request)
    return json_response(await state.off_the_loop(detokenize, state.reader, await request.body()))


@router.get("/tokenizer_info")
async def report_tokenizer(request: Request) -> Response:
    """Returns the tokens that begin and end a text."""
    return json_response(tokenizer_info(state_of(request).reader))
