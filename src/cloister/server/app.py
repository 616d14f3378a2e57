"""The ASGI application: the routes, wrapped in the middleware that every request passes.

From outermost to innermost: lingering, failures (and counting), CORS, Host check, authentication, limits, body,
disconnect, routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from cloister.engine.request_client import RequestClient
from cloister.policy import CountRelease, Gate, is_loopback
from cloister.server.calls import CallListener, HttpCalls, count_unread
from cloister.server.conversation import ChatFormat
from cloister.server.errors import INTERNAL, MethodError, error_body, error_headers, explain_absence, invalid
from cloister.server.files.service import FileService
from cloister.server.image_decoding import Decoding, DecodingProcess
from cloister.server.image_fetching import ImageFetcher
from cloister.server.images import ImageReader
from cloister.server.load_shedding import BodyBudget, body_ceiling
from cloister.server.logs import RequestLog, public_error
from cloister.server.messages import PREFIX as MESSAGES_FOLDER
from cloister.server.messages import error_object as message_error
from cloister.server.metrics import EngineGauges, Exposition, Metrics, RecordedMetrics, ReleasedCounts, make_tenant_figures
from cloister.server.middleware.auth import AuthenticationMiddleware, LocalHostMiddleware
from cloister.server.middleware.body import BodyMiddleware, DisconnectMiddleware
from cloister.server.middleware.cors import CorsMiddleware, parse_origins
from cloister.server.middleware.failures import ErrorFormMiddleware, ErrorMiddleware, V1PrefixMiddleware
from cloister.server.middleware.key_limits import KeyLimitMiddleware
from cloister.server.middleware.lingering import LingeringMiddleware
from cloister.server.oidc import TokenVerifier
from cloister.server.ollama.writing import error_object as ollama_error
from cloister.server.operations import BODY_PATHS, FORM_PATHS
from cloister.server.parse import IgnoredFieldsMiddleware
from cloister.server.pdf.reading import PdfReader
from cloister.server.prompts import PromptReader
from cloister.server.responses.keeping import ResponseStore
from cloister.server.route_table import RouteTable
from cloister.server.routes import (
    cache,
    chat,
    completions,
    embeddings,
    files,
    health,
    llamacpp,
    messages,
    models,
    ollama,
    page,
    pdf,
    policy,
    prompt_schemas,
    reference,
    replicas,
    responses,
    tokens,
)
from cloister.server.state import PREPARE_TIMEOUT_S, ServerState, open_reading_threads
from cloister.text import ChatTemplate, Tokenizer
from cloister.trust.hardening import HARDENED_PROFILES
from cloister.types.config import ServerConfig
from cloister.types.errors import CloisterError, NotFoundError

BODY_TIMEOUT_S: Final = 30.0
_ROUTERS: Final = (
    chat.router,
    responses.router,
    messages.router,
    completions.router,
    models.router,
    health.router,
    policy.router,
    embeddings.router,
    tokens.router,
    ollama.router,
    files.router,
    pdf.router,
    llamacpp.router,
    reference.router,
    replicas.router,
    cache.router,
    prompt_schemas.router,
)
PLAIN_PATHS: Final = frozenset(route.path for router in _ROUTERS for route in router.routes if "{" not in route.path)
"""Paths without parameters: a request that is refused before routing is still counted for its route."""


def create_app(
    engine: RequestClient,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    gate: Gate,
    config: ServerConfig,
    *,
    listeners: Sequence[CallListener] = (),
    stored: FileService | None = None,
    responses_kept: ResponseStore | None = None,
    request_timeout_s: float = 600.0,
    body_timeout_s: float = BODY_TIMEOUT_S,
    prepare_timeout_s: float = PREPARE_TIMEOUT_S,
    num_threads: int | None = None,
    open_decoding: Callable[[], Decoding] | None = None,
) -> ASGIApp:
    """Builds a server.

    Args:
        listeners: each is called with every finished call, such as a tracer.
        stored: store of users' files and batches; None for none.
        responses_kept: store of responses to continue; None for none.
        request_timeout_s: deadline of a request in the engine.
        body_timeout_s: timeout for receiving a body.
        prepare_timeout_s: timeout for templating and tokenizing a prompt.
        num_threads: threads of the kernels; text work gets as many, but at least 2 and at most 8.
        open_decoding: begins to decode an image file in another process; None executes a program for it.
    """
    exposition = make_exposition(engine, gate, config.served_names)
    calls = HttpCalls(exposition.count_reply, _listeners(exposition, config, gate, listeners), make_tenant_figures(gate))
    app: ASGIApp = create_routes(
        engine,
        tokenizer,
        template,
        gate,
        config,
        calls,
        exposition,
        names=config.served_names,
        stored=stored,
        responses_kept=responses_kept,
        request_timeout_s=request_timeout_s,
        prepare_timeout_s=prepare_timeout_s,
        num_threads=num_threads,
        open_decoding=open_decoding,
    )
    return surround(app, calls, gate, config, stored=stored, body_timeout_s=body_timeout_s)


def make_exposition(engine: RequestClient, gate: Gate, names: Sequence[str]) -> Exposition:
    """Returns the metrics of one engine that the profile permits."""
    if gate.policy.counts_only:
        return ReleasedCounts(CountRelease())
    metrics = Metrics(EngineGauges(engine, next(iter(names), engine.model.name)))
    return RecordedMetrics(metrics) if gate.policy.allows("metrics-history") else metrics


def create_routes(
    engine: RequestClient,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    gate: Gate,
    config: ServerConfig,
    calls: HttpCalls,
    exposition: Exposition,
    *,
    names: Sequence[str],
    stored: FileService | None = None,
    responses_kept: ResponseStore | None = None,
    request_timeout_s: float,
    prepare_timeout_s: float = PREPARE_TIMEOUT_S,
    num_threads: int | None = None,
    open_decoding: Callable[[], Decoding] | None = None,
) -> Starlette:
    """Builds the routes of one model; `surround` adds the common middleware.

    Args:
        names: model names for clients; empty for the model's own.
        num_threads: threads of the kernels; text work gets as many, but at least 2 and at most 8.
        open_decoding: begins to decode an image file in another process; None executes a program for it.
    """
    model_name, *other_names = names or (engine.model.name,)
    images = None
    if engine.model.path:
        fetcher = ImageFetcher(max_bytes=config.max_request_kb * 1024) if config.remote_images else None
        path = Path(engine.model.path)
        images = ImageReader.open(path, tokenizer, gate.policy, config.max_images, fetcher, open_decoding or DecodingProcess)
    reader = PromptReader(
        model=engine.model,
        model_name=model_name,
        tokenizer=tokenizer,
        chat_format=ChatFormat.of(tokenizer, template, config, images),
        max_n=config.max_n,
        request_timeout_s=request_timeout_s,
        gate=gate,
        adapters=engine.adapters.loaded,
        other_names=tuple(other_names),
        responses=responses_kept,
    )
    engine.subscribe(exposition.observe)
    pdf = None if config.sealed else PdfReader(is_strict=gate.policy.profile in HARDENED_PROFILES)
    threads = open_reading_threads(num_threads)
    state = ServerState(engine, reader, exposition, calls, prepare_timeout_s, threads, stored, pdf)
    return _routes(state, (page.router,) if config.page else ())


def surround(
    app: ASGIApp,
    calls: HttpCalls,
    gate: Gate,
    config: ServerConfig,
    *,
    stored: FileService | None = None,
    body_timeout_s: float = BODY_TIMEOUT_S,
) -> ASGIApp:
    """Wraps routes in the common middleware, and starts the batches in `stored`."""
    limit_bytes = config.max_request_kb * 1024
    budget = BodyBudget(body_ceiling(limit_bytes))
    if stored is not None:
        inner = IgnoredFieldsMiddleware(app, strict=config.strict_fields)
        stored.begin(ErrorMiddleware(KeyLimitMiddleware(inner), calls, PLAIN_PATHS), budget)
    app = DisconnectMiddleware(app)
    # outside the route's task, so that tokens do not pass through it
    app = IgnoredFieldsMiddleware(app, strict=config.strict_fields)
    origins = parse_origins(config.allowed_origins or "")
    app = BodyMiddleware(app, limit_bytes, body_timeout_s, BODY_PATHS, budget, forms=FORM_PATHS, origins=origins)
    app = KeyLimitMiddleware(app)
    app = AuthenticationMiddleware(app, gate, TokenVerifier(gate.people) if gate.people is not None else None)
    if config.api_keys is None and gate.people is None and is_loopback(config.host):
        app = LocalHostMiddleware(app)
    if origins:
        app = CorsMiddleware(app, origins)
    app = ErrorMiddleware(app, calls, PLAIN_PATHS, has_tls=config.certfile is not None)
    app = ErrorFormMiddleware(app, {MESSAGES_FOLDER: message_error, "/api": ollama_error})
    return V1PrefixMiddleware(LingeringMiddleware(app))


def _listeners(
    exposition: Exposition, config: ServerConfig, gate: Gate, others: Sequence[CallListener]
) -> tuple[CallListener, ...]:
    return (*request_log(config, gate), count_unread(exposition.count_unread), *others)


def request_log(config: ServerConfig, gate: Gate) -> list[CallListener]:
    """Returns the request log, if the settings enable it and the profile permits it."""
    if not (config.log_requests and gate.policy.allows("request-log")):
        return []
    return [RequestLog(shows_clients=config.log_clients).write]


def _routes(state: ServerState, extra: Sequence[RouteTable]) -> Starlette:
    routes = [route for router in (*_ROUTERS, *extra) for route in router.routes]
    handlers = {CloisterError: _answer_error, HTTPException: _answer_http_exception, Exception: _answer_mistake}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.routes = routes
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, CloisterError)
    return _reply(public_error(error))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _reply(NotFoundError(explain_absence(request.scope["path"]), code="unknown_route"))
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods(request)))
        reply = _reply(MethodError(f"This route does not take the method; it takes {allowed}."))
        reply.headers["allow"] = allowed
        return reply
    return _reply(invalid("The request cannot be read; check it against the documentation."))


def _methods(request: Request) -> set[str]:
    """Returns all methods of a path: each is a separate route, and the first one reports only its own."""
    found = (route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in found for method in route.methods or ()}


async def _answer_mistake(_: Request, __: Exception) -> Response:
    # the exception propagates to `ErrorMiddleware`, which logs it.
    return _reply(INTERNAL)


def _reply(error: CloisterError) -> Response:
    return Response(error_body(error), error.status, error_headers(error), "application/json")
