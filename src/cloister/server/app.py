"""The ASGI application: routes inside, and around them what every request passes.

From the outside in: failures (and counting), host, authentication, body, disconnect, routes.
"""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cloister.engine.base import AsyncEngine
from cloister.privacy import CountRelease, Gate, is_loopback
from cloister.server.errors import INTERNAL, MethodError, error_body, error_headers, invalid
from cloister.server.front import PREPARE_TIMEOUT_S, Front
from cloister.server.metrics import Exposition, Metrics, ReleasedCounts
from cloister.server.middleware.auth import Authentication
from cloister.server.middleware.body import BodyReader
from cloister.server.middleware.disconnect import WRITE_TIMEOUT_S, CancelOnDisconnect
from cloister.server.middleware.failures import Failures
from cloister.server.middleware.host import LocalHostOnly
from cloister.server.prompts import PromptReader
from cloister.server.routes import chat, completions, health, metrics, models
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import ServerConfig
from cloister.types.errors import CloisterError, NotFoundError

BODY_TIMEOUT_S: Final = 30.0
_ROUTERS: Final = (chat.router, completions.router, models.router, health.router, metrics.router)


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    gate: Gate,
    config: ServerConfig,
    *,
    request_timeout_s: float = 600.0,
    body_timeout_s: float = BODY_TIMEOUT_S,
    prepare_timeout_s: float = PREPARE_TIMEOUT_S,
    write_timeout_s: float = WRITE_TIMEOUT_S,
) -> ASGIApp:
    """Puts a server together.

    Args:
        request_timeout_s: deadline of a request in the engine.
        body_timeout_s: how long a body may take to arrive.
        prepare_timeout_s: how long a prompt may take to become tokens.
        write_timeout_s: how long a client may leave a reply unread.
    """
    reader = PromptReader(
        model=engine.model,
        model_name=config.served_model_name or engine.model.name,
        tokenizer=tokenizer,
        template=template,
        max_n=config.max_n,
        request_timeout_s=request_timeout_s,
        gate=gate,
    )
    exposition: Exposition = ReleasedCounts(CountRelease()) if gate.policy.counts_only else Metrics()
    engine.subscribe(exposition.observe)
    app: ASGIApp = _routes(Front(engine, reader, exposition, prepare_timeout_s))
    app = CancelOnDisconnect(app, write_timeout_s)
    app = BodyReader(app, config.max_request_kb * 1024, body_timeout_s)
    app = Authentication(app, gate)
    if config.api_keys is None and is_loopback(config.host):
        app = LocalHostOnly(app)
    return Failures(app, exposition.count_reply)


def _routes(front: Front) -> FastAPI:
    # The pages of FastAPI's documentation would load scripts from other hosts; docs/ has the reference.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.front = front
    app.add_exception_handler(CloisterError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_mistake)
    for router in _ROUTERS:
        app.include_router(router)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, CloisterError)
    return _reply(error if error.status != CloisterError.status else INTERNAL)


async def _answer_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _reply(NotFoundError("There is no such route; the API begins with /v1.", code="unknown_route"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        reply = _reply(MethodError(f"This route does not take the method; it takes {allowed}."))
        reply.headers["allow"] = allowed
        return reply
    return _reply(invalid("The request cannot be read; check it against the documentation."))


async def _answer_mistake(_: Request, __: Exception) -> Response:
    # `Failures`, to which the exception goes on, logs it.
    return _reply(INTERNAL)


def _reply(error: CloisterError) -> Response:
    return Response(error_body(error), error.status, error_headers(error), "application/json")
