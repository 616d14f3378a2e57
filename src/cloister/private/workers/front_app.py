"""ASGI application of a sealed node's front: sealed exchange, keys, evidence, health, metrics. It never holds content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from cloister.engine.request_client import Health
from cloister.private.gateway import NODE_PATH
from cloister.private.http_io import BODY_TIMEOUT_S, MAX_REQUEST_BYTES
from cloister.private.nodes import EVIDENCE_PATH, KEYS_PATH
from cloister.private.peers import check_gateway
from cloister.private.serving import File, Post, handlers
from cloister.private.workers.metrics import CONTENT_TYPE, Figures
from cloister.private.workers.worker_pool import WorkerFront, WorkerPool
from cloister.private.workers.zygote import WAITING_WORKERS
from cloister.trust.sealing import KEYS_MEDIA_TYPE

WORKER_ENTRY: Final = "cloister.private.workers.worker:build_worker"
STALLED: Final = "requests wait and the engine makes no progress; it is replaced if that goes on"
"""Why a node is unavailable while its processes run. The engine's own message contains request counts."""
SILENT: Final = "the key service does not answer; restart the node if that goes on"
"""Why a node is unavailable whose key service hangs: no request is opened, and a new key gets no evidence."""


def worker_node_app(
    pool: WorkerPool,
    health: Callable[[], Health],
    *,
    evidence: Callable[[], bytes | None] = lambda: None,
    gateway_secret: str | None = None,
    max_workers: int = WAITING_WORKERS,
    takes_requests: bool = True,
) -> Starlette:
    """Returns the application.

    Args:
        health: of the engine.
        evidence: returns the evidence document for the current key; None while there is none.
        gateway_secret: secret that a gateway must present; None accepts any request that opens.
        takes_requests: False: its engines work for another machine of its unit, and no client seals to it.
    """

    def check(scope: Scope) -> None:
        check_gateway(scope, gateway_secret)

    async def read_evidence() -> bytes | None:
        return evidence()

    def find_fault() -> str | None:
        silent = SILENT if pool.unsealer.is_silent else None
        return pool.fault or silent or (None if health().good else STALLED)

    async def tell_health(_: Request) -> Response:
        fault = find_fault()
        if fault is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": fault}, 503)

    async def tell_figures(_: Request) -> Response:
        return Response(figures.render(is_healthy=find_fault() is None), media_type=CONTENT_TYPE)

    figures = Figures()
    front = WorkerFront(
        pool, check, figures, max_request_bytes=MAX_REQUEST_BYTES, body_timeout_s=BODY_TIMEOUT_S, max_workers=max_workers
    )
    routes = [
        *([Route(NODE_PATH, Post(front))] if takes_requests else ()),
        Route(KEYS_PATH, File(pool.unsealer.publish, KEYS_MEDIA_TYPE)),
        Route(EVIDENCE_PATH, File(read_evidence, "application/json")),
        Route("/health", tell_health, methods=["GET"]),
        Route("/metrics", tell_figures, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers=handlers())
