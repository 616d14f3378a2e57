"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.front import front_of, json_response
from cloister.server.tokens import detokenize, tokenize, tokenizer_info

router = APIRouter()


@router.post("/tokenize")
async def create_tokens(request: Request) -> Response:
    """Returns the tokens of a text or a chat, as the model would read them."""
    front = front_of(request)
    return json_response(await front.off_the_loop(tokenize, front.reader, await request.body()))


@router.post("/detokenize")
async def create_text(request: Request) -> Response:
    """Returns the text of tokens."""
    front = front_of(request)
    return json_response(await front.off_the_loop(detokenize, front.reader, await request.body()))


@router.get("/tokenizer_info")
async def report_tokenizer(request: Request) -> Response:
    """Returns the tokens that begin and end a text."""
    return json_response(tokenizer_info(front_of(request).reader))
